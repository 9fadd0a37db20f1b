"""Make the JSON schema of report files: ``python -m nimble_viz.report.schema > docs/report.schema.json``.

It says what the types say. ``check_report`` checks the rest: indices within range, lists that fit each other.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

from nimble_viz.report.file import Wire

__all__ = ["report_schema", "schema_text"]


def report_schema() -> dict[str, Any]:
    """Describe the JSON inside a ``.nimble`` file as JSON Schema (draft 2020-12)."""
    (root,), types = msgspec.json.schema_components([Wire], ref_template="#/$defs/{name}")
    for made in types.values():
        made["description"] = inspect.cleandoc(made.get("description", ""))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nimble report",
        **root,
        "$defs": dict(sorted(types.items())),
    }


def schema_text() -> str:
    """Return ``report_schema`` as the text of ``docs/report.schema.json``."""
    return json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
