"""Make the JSON schema of report files: ``python -m nimble_viz.report.schema > docs/report.schema.json``.

It says what the types say. ``check_report`` checks the rest: indices within range, lists that fit each other.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from nimble_viz.report.file import Wire

__all__ = ["report_schema", "schema_text"]

_FIELD = re.compile(r"^(?P<name>\w+): (?P<text>.+)$")


def report_schema() -> dict[str, Any]:
    """Describe the JSON inside a ``.nimble`` file as JSON Schema (draft 2020-12).

    Descriptions are those of the dataclasses. Unknown fields are allowed, as ``load`` ignores them.
    """
    (root,), types = msgspec.json.schema_components([Wire], ref_template="#/$defs/{name}")
    documented = {one.__name__: one for one in _dataclasses_in(Wire)}
    for name, made in types.items():
        _describe(made, documented[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nimble report",
        **root,
        "$defs": dict(sorted(types.items())),
    }


def schema_text() -> str:
    """Return ``report_schema`` as the text of ``docs/report.schema.json``."""
    return json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n"


def _dataclasses_in(root: type) -> list[type]:
    """List ``root`` and every dataclass that its fields hold, however deep."""
    found: list[type] = []
    pending: list[Any] = [msgspec.inspect.type_info(root)]
    while pending:
        kind = pending.pop()
        if isinstance(kind, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if kind.cls in found:
                continue
            found.append(kind.cls)
            pending += [field.type for field in kind.fields]
        elif isinstance(kind, msgspec.inspect.UnionType):
            pending += kind.types
        elif isinstance(kind, msgspec.inspect.TupleType):
            pending += kind.item_types
        elif isinstance(kind, msgspec.inspect.VarTupleType):
            pending.append(kind.item_type)
    return found


def _describe(made: dict[str, Any], source: type) -> None:
    """Put the class's docstring beside what it describes: the first part on top, arguments at their fields."""
    text, fields = _parts(source)
    made["description"] = text
    for name, field in made.get("properties", {}).items():
        if name in fields:
            field["description"] = fields[name]


def _parts(source: type) -> tuple[str, Mapping[str, str]]:
    """Split a docstring into its text and its ``Args``, each on one line."""
    if source.__doc__ is None or (
        dataclasses.is_dataclass(source) and source.__doc__.startswith(f"{source.__name__}(")
    ):
        return "", {}
    text, _, arguments = inspect.cleandoc(source.__doc__).partition("\n\nArgs:\n")
    fields: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(arguments.partition("\n\n")[0]).splitlines():
        found = None if line.startswith(" ") else _FIELD.match(line)
        if found:
            name = found["name"]
            fields[name] = found["text"]
        elif name:
            fields[name] += " " + line.strip()
    return " ".join(text.split()), fields


if __name__ == "__main__":
    print(schema_text(), end="")
