"""The JSON schema: current, and every report that is saved keeps to it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nimble_viz.report.schema import report_schema, schema_text
from tests.support.sample_reports import RENDERED, fused_report

ROOT = Path(__file__).parents[3]
RECORDINGS = sorted(path for of in ("examples", "tests") for path in (ROOT / of / "recordings").glob("*.nimble"))


def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (comes with nbformat)")
    schema = report_schema()
    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(schema)))
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema)))


def test_the_schema_in_the_documentation_is_current() -> None:
    kept = (ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8")
    assert kept == schema_text(), "run: python -m nimble_viz.report.schema > docs/report.schema.json"


@pytest.mark.parametrize("case", [case for case in RENDERED if "thousand" not in case])
def test_saved_reports_keep_to_it(tmp_path: Path, case: str) -> None:
    tree = json.loads(gzip.decompress(RENDERED[case]().save(tmp_path / "r.nimble").read_bytes()))
    assert [error.message for error in validator().iter_errors(tree)] == []


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda one: one.name)
def test_recordings_of_this_and_earlier_versions_keep_to_it(path: Path) -> None:
    tree = json.loads(gzip.decompress(path.read_bytes()))
    assert next(validator().iter_errors(tree), None) is None


def test_fields_are_the_same_as_those_saved(tmp_path: Path) -> None:
    tree = json.loads(gzip.decompress(fused_report(12).save(tmp_path / "r.nimble").read_bytes()))
    assert set(tree["report"]) == set(report_schema()["$defs"]["ReportData"]["properties"])
