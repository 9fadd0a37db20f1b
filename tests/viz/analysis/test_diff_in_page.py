"""An earlier report in the page of a later one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_viz.analysis.diff import beside
from nimble_viz.analysis.view_data import view_data
from nimble_viz.render.report import Report
from tests.support.sample_reports import RENDERED, fused_report, profile_report, sample_report


def slower(report: Report, *calls: int) -> Report:
    """``report`` in which these calls take three times as long alone."""
    ns = tuple(3 * one if call in calls else one for call, one in enumerate(report.costs.ns))
    return replace(report, costs=replace(report.costs, ns=ns))


def test_what_got_slower_is_listed_most_first() -> None:
    old = sample_report()
    new = slower(old, 5, 7)
    found = beside(old, new)
    order = sorted((5, 7), key=lambda call: -old.costs.ns[call])
    assert [row["call"] for row in found["slower"]] == order
    assert {row["ratio"] for row in found["slower"]} == {"3.00x"}
    assert beside(new, old)["slower"] == []
    assert "no difference from before" in beside(old, old)["text"]
    assert "their spread is not known" in beside(fused_report(), fused_report())["text"]


def test_the_old_replay_is_told_by_the_new_calls() -> None:
    old = sample_report()
    calls = old.program.calls
    fewer = replace(old.program, calls=tuple(replace(call, index=at) for at, call in enumerate(calls[1:])))
    new = replace(old, program=fewer, graph=old.graph)
    columns = beside(old, new)["line"]["columns"]
    places = {old.timeline("nimble").spans[at].call for at in range(3)}
    assert 0 in places
    assert min(columns["call"]) == -1
    assert max(columns["call"]) == len(calls) - 2


def test_the_page_draws_it_beside_the_replay() -> None:
    old = sample_report()
    data = view_data(slower(old, 5), old)
    assert [line["run"] for line in data["timelines"]][-1] == "before"
    assert [run["run"] for run in data["summary"]["tiles"]["picture"]["runs"]] == ["eager", "nimble", "before"]
    assert view_data(old)["before"] is None


@pytest.mark.parametrize("case", [case for case in RENDERED if "thousand" not in case])
def test_any_two_reports_lie_beside_each_other(case: str) -> None:
    report = RENDERED[case]()
    for other in (profile_report(), sample_report(), fused_report()):
        for old, new in ((report, other), (other, report)):
            found = beside(old, new)
            calls = found["line"]["columns"]["call"] if found["line"] else []
            assert all(-1 <= call < len(new.program.calls) for call in calls)
            assert found["text"]
