"""What-if schedules: the policy simulated, compared with others simulated alike, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nimble_viz
from nimble_core.ir.costs import uniform_costs
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.what_if import no_simulation, simulate_plan
from tests.support.sample_reports import plan_report, profile_report, sample_report

RECORDING = Path(__file__).parents[3] / "examples" / "recordings" / "googlenet-h200.nimble"
WIDE = sample_report(60)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "single"])
def test_it_is_the_policy_simulated(policy: str) -> None:
    report = nimble_viz.load(RECORDING)
    found = simulate_plan(report, policy, 3)
    plan = check_schedule(report.graph, POLICIES[policy](report.graph, report.costs, max_streams=3), report.program)
    assert found.length_ns == found.run["length_ns"] == simulate(report.graph, plan, report.costs, H200).length_ns
    assert tuple(found.plan["stream"]) == plan.stream
    assert found.run["source"] == "simulated"
    assert str(found).startswith("SIMULATED, not measured: ")


def test_like_is_compared_with_like() -> None:
    report = nimble_viz.load(RECORDING)
    policy = report.chosen.rpartition(", ")[2]
    chosen = report.schedule(report.chosen)
    assert chosen is not None
    found = simulate_plan(report, policy, 1)
    assert (found.streams, found.over_single) == (1, pytest.approx(1))
    assert found.chosen_ns == simulate(report.graph, chosen, report.costs, H200).length_ns
    assert found.over_chosen == found.chosen_ns / found.length_ns
    assert simulate_plan(replace(report, chosen=""), policy, 2).over_chosen is None


@given(streams=st.integers(1, 32), policy=st.sampled_from(sorted(POLICIES)))
def test_it_keeps_the_cap(streams: int, policy: str) -> None:
    found = simulate_plan(WIDE, policy, streams)
    assert max(found.plan["stream"]) < streams
    assert found.streams <= streams
    assert found.syncs == len(found.plan["producer"]) == len(found.plan["consumer"])


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (lambda: sample_report(60, device="cpu"), "how calls on this host slow each other down is not known"),
        (plan_report, "times were not measured"),
        (profile_report, "profile of code as it is"),
        (lambda: sample_report(0), "no call that reaches the device"),
        (lambda: sample_report(5_001), "more than 5,000 calls"),
        (lambda: replace(sample_report(20), costs=uniform_costs(20)), "times were not measured"),
    ],
)
def test_what_cannot_be_simulated_is_said(report, why: str) -> None:
    made = report()
    assert why in no_simulation(made)
    with pytest.raises(InputError, match=f"nothing can be simulated: .*{why}"):
        simulate_plan(made, "nimble", 2)


@pytest.mark.parametrize(
    ("policy", "streams", "said"),
    [
        ("nimbel", 2, r"no policy 'nimbel' to simulate\n.*one of single, nimble, "),
        (None, 2, "no policy None"),
        ("nimble", 0, "streams=0 is no number of streams"),
        ("nimble", "2", r"streams='2' is no number of streams\n.*a whole number, 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(policy: str, streams: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulate_plan(WIDE, policy, streams)
