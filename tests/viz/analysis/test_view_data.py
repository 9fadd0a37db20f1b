"""The viewer's data: plain JSON, complete."""

from __future__ import annotations

import json

import pytest

from nimble_viz.analysis.view_data import view_data
from tests.support.sample_reports import RENDERED


@pytest.fixture(scope="module", params=list(RENDERED))
def report(request: pytest.FixtureRequest):
    return RENDERED[request.param]()


def test_every_case_is_plain_json_and_keeps_its_calls(report):
    data = json.loads(json.dumps(view_data(report), allow_nan=False))
    columns = data["columns"]
    assert columns[data["calls"]["operator"]] == [call.operator for call in report.program.calls]
    assert columns[data["dag"]["columns"]["critical"]] == list(report.critical_path)
    for plan, shown in zip(report.schedules, data["dag"]["plans"], strict=True):
        assert columns[shown["columns"]["stream"]] == list(plan.stream)
        pairs = zip(*(columns[shown["columns"][end]] for end in ("producer", "consumer")), strict=True)
        assert tuple(pairs) == plan.syncs


def test_equal_columns_are_held_once(report):
    columns = view_data(report)["columns"]
    assert len(columns) == len(set(columns))
