"""What disturbed a measurement: each cause is named where it is, and no cause where it is not; one line, one remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nimble_core.ir.measurement import summarize
from nimble_viz.analysis.compared import disturbances, why_undecided
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.tiles import verdict
from nimble_viz.render.report import Report
from tests.support.sample_reports import sample_report, timed

QUIET = {"throttling": (), "sm_clock_mhz": (1980, 1965), "other_processes": 0, "others": 0.3, "load": 0.4}


def quiet(samples: int = 144, noise: float = 0.8, **where: Any) -> Report:
    """A report whose runs take the same time and scatter by ``noise``, of a machine as ``where`` says."""
    report = timed(sample_report(24), dict.fromkeys(("eager", "single", "nimble"), 5e5), noise=noise, samples=samples)
    return replace(report, environment=replace(report.environment, **(QUIET | where)))


def why(report: Report) -> str:
    found = report.ratio("nimble")
    assert found is not None
    assert found.verdict == "undecided"
    return why_undecided(report, found)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"others": 14.2, "cores": 2}, "load 14 on 2 cores"),
        ({"others": 1.44, "cores": 2}, "load 1.4 on 2 cores"),
        ({"others": -1.0, "load": 16.4, "cores": 2, "threads": 2}, "load 16 on 2 cores"),
        ({"throttling": ("software power cap",)}, "the GPU was throttled (software power cap)"),
        ({"sm_clock_mhz": (1980, 1410)}, "the GPU's clock went from 1980 to 1410 MHz"),
        ({"other_processes": 3}, "processes of others on the GPU: 3"),
    ],
)
def test_what_the_machine_did_is_named(where: dict[str, Any], said: str) -> None:
    report = quiet(**where)
    assert disturbances(report) == (said,)
    assert why(report).startswith(f"{said}; ")
    assert f"; {why(report)}; " in verdict(report)
    assert f"while measuring: {said}" in summary(report)["warnings"]
    decided = timed(report, {"eager": 9e5, "single": 5e5, "nimble": 5e5})
    assert said not in verdict(decided)
    assert f"while measuring: {said}" in summary(decided)["warnings"]


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"others": 0.9, "cores": 2},
        {"others": -1.0, "load": 2.4, "cores": 2, "threads": 2},  # what this process did before counts, too
        {"others": -1.0, "load": -1.0},
        {"cores": 0, "others": 9.0},
        {"sm_clock_mhz": (1980,)},
        {"other_processes": None},
    ],
)
def test_a_quiet_machine_is_not_blamed(where: dict[str, Any]) -> None:
    report = quiet(**where)
    assert disturbances(report) == ()
    spread = max(report.measurements[0].spread, report.measurements[2].spread)
    assert why(report) == f"times vary by {spread:.0%}; run again on a quieter machine"
    assert not [text for text in summary(report)["warnings"] if text.startswith("while measuring")]


def test_interrupted_samples_are_named_by_their_share() -> None:
    report = quiet()
    for dropped, said in ((15, ()), (48, ("up to 25% of a run's samples were interrupted and dropped",))):
        taken = tuple(replace(one, dropped=dropped) for one in report.measurements)
        assert disturbances(replace(report, measurements=taken)) == said
        assert (why(replace(report, measurements=taken)).partition("; ")[0] in said) == bool(said)


def test_runs_that_drift_apart_are_named_and_those_that_drift_together_are_not() -> None:
    report = quiet()
    eager, single, nimble = report.measurements
    rising = [ns * (1 + 0.014 * k) for k, ns in enumerate(sorted(nimble.samples_ns))]
    apart = replace(report, measurements=(eager, single, summarize("nimble", rising)))
    assert why(apart).startswith("nimble replay drifted by +")
    alike = tuple(
        summarize(one.name, [ns * (1 + 0.014 * k) for k, ns in enumerate(one.samples_ns)])
        for one in report.measurements
    )
    assert min(one.drift for one in alike) > 0.5
    assert why(replace(report, measurements=alike)).startswith("times vary by ")


def test_too_few_rounds_are_named_before_all_else_where_they_decide_nothing() -> None:
    loud = {"others": 14.0, "cores": 2}
    assert why(quiet(12, **loud)) == "only 12 rounds fitted in the time; raise budget_s"
    assert why(quiet(20, **loud)).startswith("load 14 on 2 cores; ")
    assert why(quiet(20, noise=0.4)) == "only 20 rounds fitted in the time; raise budget_s"
    assert why(replace(quiet(12), complete=False)) == "only 12 rounds were measured; run again"
    report = quiet(40)  # of which only every third is of the same round
    taken = tuple(
        replace(one, rounds=tuple(k * by for k in range(40)))
        for one, by in zip(report.measurements, (1, 1, 3), strict=True)
    )
    assert why(replace(report, measurements=taken)).startswith("only 14 rounds ")
