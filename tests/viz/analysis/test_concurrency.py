"""How much can run, and runs, side by side."""

from __future__ import annotations

from dataclasses import replace

from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_viz.analysis import concurrency
from nimble_viz.analysis.concurrency import graph_width, what_if
from tests.support.sample_reports import CASES, old_report, sample_report


def test_width_is_exact_up_to_a_bound_and_says_so_above(monkeypatch):
    report = CASES["wide"]()
    assert graph_width(report.graph) == (12, "12")
    monkeypatch.setattr(concurrency, "EXACT_CALLS", 59)
    bound, text = graph_width(report.graph)
    assert bound <= 12
    assert text.startswith(f"at least {bound} ")


def test_what_if_answers_with_simulated_times():
    report = sample_report(60)
    asked = what_if(report)
    assert [row["streams"] for row in asked["rows"]] == [1, 2, 3, 4]
    plan = POLICIES["nimble"](report.graph, report.costs, max_streams=3)
    assert asked["rows"][2]["ns"] == simulate(report.graph, plan, report.costs, H200).length_ns
    assert asked["answer"].endswith("(simulated)")
    assert [row["streams"] for row in asked["rows"] if row["enough"]] == [asked["enough"]]
    fastest = min(row["ns"] for row in asked["rows"])
    assert all(row["ns"] > 1.02 * fastest for row in asked["rows"] if row["streams"] < asked["enough"])


def test_what_if_is_not_asked_without_gpu_costs_or_choice():
    report = sample_report(60)
    assert what_if(CASES["host"]()) is None
    assert what_if(CASES["narrow"]()) is None
    assert what_if(CASES["ten thousand"]()) is None
    assert what_if(replace(report, costs=uniform_costs(60))) is None
    assert what_if(replace(report, chosen="single"))["policy"] == "contention"
    assert "was not recorded" in what_if(old_report())["note"]
    assert "was not recorded" not in what_if(report)["note"]


def test_one_stream_is_enough_where_waits_cost_more_than_calls():
    report = sample_report(60, width=2)
    asked = what_if(replace(report, costs=Costs((100.0,) * 60, "given")))
    assert asked["enough"] == 1
    assert asked["answer"].startswith("One stream is enough")
