"""What calls are coloured by: sums are those of the eager calls behind them, what is unknown is -1."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_viz.analysis.overhead import colours, exposed
from nimble_viz.render.report import Report
from tests.support.sample_reports import fused_report, plan_report, sample_report, training_report

FUSED = fused_report()


def why(report: Report) -> dict[str, str]:
    return {row["key"]: row["why"] for row in colours(report)}


@given(
    known=st.sets(st.integers(0, len(FUSED.eager_calls) - 1)),
    stands=st.lists(
        st.lists(st.integers(0, len(FUSED.eager_calls) - 1), max_size=5),
        min_size=len(FUSED.program.calls),
        max_size=len(FUSED.program.calls),
    ),
)
def test_whatever_stands_for_what_no_overhead_is_lost_or_counted_twice(
    known: set[int], stands: list[list[int]]
) -> None:
    profile = FUSED.overhead
    assert profile is not None
    rows = tuple(row for row in profile.calls if row.call in known)
    calls = tuple(replace(call, eager=tuple(own)) for call, own in zip(FUSED.program.calls, stands, strict=True))
    program = replace(FUSED.program, calls=calls)
    found = exposed(replace(FUSED, program=program, overhead=replace(profile, calls=rows)))
    assert [value < 0 for value in found] == [not known & {*own} for own in stands]
    stood = {index for own in stands for index in own}
    expected = sum(row.exposed_ns for row in rows if row.call in stood)
    assert sum(value for value in found if value > 0) == pytest.approx(expected, abs=len(found))


def test_without_fusion_a_call_has_its_own_overhead() -> None:
    report = sample_report(60)
    assert report.overhead is not None
    assert exposed(report) == [round(row.exposed_ns) for row in report.overhead.calls]
    half = replace(report, overhead=replace(report.overhead, calls=report.overhead.calls[:30]))
    assert exposed(half)[30:] == [-1] * 30
    row = next(row for row in colours(half) if row["key"] == "exposed")
    assert (row["unknown"], row["why"]) == ("30 calls not among those of profiled eager", "")


def test_what_is_not_known_is_not_offered_and_says_why() -> None:
    assert why(training_report()) == {"stream": "", "exposed": "", "time": "", "phase": ""}
    assert why(sample_report(60))["phase"] == "all calls are forward"
    assert why(sample_report(60, overhead=False))["exposed"] == "eager was not profiled"
    assert why(plan_report())["time"] == "not measured"
    assert why(plan_report())["exposed"] == "eager was not profiled"
    profile = replace(sample_report(60).overhead, calls=())
    assert why(replace(sample_report(60), overhead=profile))["exposed"] == "not in the profile"
