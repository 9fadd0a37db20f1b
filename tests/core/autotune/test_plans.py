"""Which plans are captured: different ones, the most promising first, none of hopeless kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nimble_core.autotune.plans import asked_plan, searched_plans, simulated_ns
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static
from tests.support.models import Wide

DEVICE = FakeDevice()


class LikeCuda(FakeDevice):
    kind = "cuda"


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    model, x = Wide().eval(), torch.randn(2, 16)
    return record_static(DEVICE, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())


@pytest.mark.parametrize(("device", "captured"), [(DEVICE, 1), (LikeCuda(), 3)])
@pytest.mark.parametrize("tune", ["fast", "full"])
def test_plans_that_differ_are_found_the_most_promising_first(
    device: FakeDevice, captured: int, tune: Any, recorded: Recorded
) -> None:
    costs = uniform_costs(recorded.graph.size)
    single = POLICIES["single"](recorded.graph, costs)
    plans = searched_plans(device, "none", recorded, Options(tune=tune, max_streams=5), costs, single)
    kept = [plan for plan in plans if not plan.note]
    assert len(kept) == (min(captured, len(plans)) if tune == "fast" else len(plans))
    assert kept == plans[: len(kept)]
    assert all(plan.note == "not captured: simulated slower" for plan in plans[len(kept) :])
    if captured == 1 and tune == "fast":
        assert kept[0].simulated_ns == min(plan.simulated_ns for plan in plans)
    essences = [(one.schedule.stream, one.schedule.order, one.schedule.syncs) for one in plans]
    assert len(set(essences)) == len(plans) > 1
    assert (single.stream, single.order, single.syncs) not in essences
    names = [plan.schedule.policy for plan in plans]
    assert len(set(names)) == len(names)
    assert any(name.endswith("2 streams") for name in names) == (tune == "full")
    for plan in plans:
        assert plan.schedule.streams <= 5
        assert plan.simulated_ns == simulated_ns(device, recorded, plan.schedule, costs) > 0


@pytest.mark.parametrize(
    ("mine", "name"), [("mine", "mine"), ("single", "single of your own"), ("none", "none of your own")]
)
def test_a_function_is_a_policy_and_no_name_is_taken_from_others(mine: str, name: str, recorded: Recorded) -> None:
    def policy(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy=mine)

    assert asked_plan("none", recorded, policy, None, None).schedule.policy == name
    assert asked_plan("none", recorded, "single", None, None).schedule.policy == "single"
