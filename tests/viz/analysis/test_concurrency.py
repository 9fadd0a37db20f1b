"""How much can run, and runs, side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.analysis import concurrency
from nimble_viz.analysis.concurrency import graph_width, in_flight
from tests.support.sample_reports import (
    CASES,
)


def test_width_is_exact_up_to_a_bound_and_says_so_above(monkeypatch):
    report = CASES["wide"]()
    assert graph_width(report.graph) == (12, "12")
    monkeypatch.setattr(concurrency, "EXACT_CALLS", 59)
    bound, text = graph_width(report.graph)
    assert bound <= 12
    assert text.startswith(f"at least {bound} ")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=12))
def test_in_flight_is_what_a_clock_would_count(drawn):
    lanes = (Lane("0", "stream"), Lane("host", "host"))
    spans = sorted(
        (Span(0, float(at), float(at + long), None, "k") for at, long in drawn), key=lambda one: one.start_ns
    )
    line = Timeline("mine", "measured", "clock", lanes, (*spans, Span(1, 90.0, 99.0, None, "host")))
    most, mean = in_flight(line)
    counted = [sum(span.start_ns <= at < span.end_ns for span in spans) for at in range(31)]
    assert most == max(counted)
    assert mean == pytest.approx(sum(counted) / line.length_ns)
