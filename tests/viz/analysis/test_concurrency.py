"""How much can run, and runs, side by side."""

from __future__ import annotations

from nimble_viz.analysis import limit
from nimble_viz.analysis.limit import graph_width
from tests.support.sample_reports import CASES


def test_width_is_exact_up_to_a_bound_and_says_so_above(monkeypatch):
    report = CASES["wide"]()
    assert graph_width(report.graph) == (12, "12")
    monkeypatch.setattr(limit, "EXACT_CALLS", 59)
    bound, text = graph_width(report.graph)
    assert bound <= 12
    assert text.startswith(f"at least {bound} ")
