"""The page's data: plain JSON, complete and small."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_viz.analysis.payload import Kept, pack, unpack, view_data
from tests.support.sample_reports import (
    RENDERED,
)


@pytest.fixture(scope="module", params=list(RENDERED))
def report(request: pytest.FixtureRequest):
    return RENDERED[request.param]()


def test_every_case_is_plain_json_and_keeps_its_calls(report):
    data = json.loads(json.dumps(view_data(report), allow_nan=False))
    assert unpack(data["calls"]["operator"], data) == [call.operator for call in report.program.calls]
    assert unpack(data["dag"]["columns"]["critical"], data) == list(report.critical_path)
    for plan, shown in zip(report.schedules, data["dag"]["plans"], strict=True):
        assert unpack(shown["columns"]["stream"], data) == list(plan.stream)
        pairs = zip(*(unpack(shown["columns"][end], data) for end in ("producer", "consumer")), strict=True)
        assert tuple(pairs) == plan.syncs


@given(st.one_of(st.lists(st.integers(-5, 10**9)), st.lists(st.text(max_size=4)), st.lists(st.just(7))))
def test_pack_is_undone_by_unpack(column):
    kept = Kept()
    packed = json.loads(json.dumps([pack(column, kept), pack(column[:-1], kept), pack(column, kept)]))
    data = {"strings": list(kept.strings), "columns": json.loads(json.dumps(kept.columns))}
    assert [unpack(one, data) for one in packed] == [column, column[:-1], column]
