"""The measured choice among plans, on a device whose times are exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.utils.errors import CaptureError, DeviceError, InputError
from tests.support.tuning import Watched, by_name, tuning

WAITS_COST_MORE = DeviceModel("waits", sync_ns=1e6)


@pytest.mark.parametrize(
    ("device", "several"),
    [
        (lambda: Watched(1000.0), True),
        (lambda: Watched(1000.0, model=WAITS_COST_MORE), False),
        (lambda: Watched(0.0), False),  # a tie goes to fewer streams
    ],
)
def test_streams_are_chosen_where_they_pay(device: Callable[[], Watched], several: bool) -> None:
    with tuning(device()) as tuned:
        assert (tuned.best.schedule.streams > 1) == several
        (chosen,) = [one for one in tuned.candidates if one.chosen]
        assert chosen.name == tuned.best.schedule.policy
        assert chosen.measurement
        assert chosen.measurement.median_ns == min(
            one.measurement.median_ns for one in tuned.candidates if one.measurement
        )
        assert all(one.check and one.check.passed for one in tuned.candidates if one.measurement)
        assert {"single", tuned.best.schedule.policy} <= set(tuned.executables)
        assert len(tuned.executables) == 2, "beside one stream the fastest of several is kept"


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        (Options(tune="off"), {"nimble"}),
        (Options(tune="off", policy="single"), {"single"}),
        *((Options(policy=policy), {"single", policy}) for policy in sorted(POLICIES)),
    ],
)
def test_a_policy_that_is_asked_for_is_taken(options: Options, captured: set[str]) -> None:
    device = Watched(1000.0, model=WAITS_COST_MORE)
    with tuning(device, options) as tuned:
        assert set(device.captured) == (captured if options.policy != "single" else {"single"})
        assert tuned.best.schedule.policy == (options.policy if options.policy != "auto" else "nimble")
        assert not tuned.checks
        assert (tuned.observed is None) == (options.tune == "off" or options.policy == "single")


def test_a_function_is_a_policy() -> None:
    def mine(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy="mine")

    with tuning(Watched(1000.0), Options(policy=mine)) as tuned:
        assert tuned.best.schedule.policy == "mine"
    with pytest.raises(InputError, match="returned a int"), tuning(Watched(), Options(policy=lambda graph, costs: 3)):
        pass


def test_the_most_promising_are_captured_and_full_tuning_captures_all() -> None:
    device = Watched(1000.0)
    with tuning(device) as tuned:
        left = [one for one in tuned.candidates if "simulated slower" in one.note]
        (taken,) = [one for one in tuned.candidates if one.measurement and one.name != "single"]
        assert all(one.simulated_ns >= taken.simulated_ns for one in left)
        assert all(one.measurement is None and not one.nbytes for one in left)
    device = Watched(1000.0)
    with tuning(device, Options(tune="full")) as tuned:
        assert set(device.captured) == by_name(tuned).keys() >= {"single", "contention, 2 streams"}
        assert all(one.measurement for one in tuned.candidates)


def test_the_budget_bounds_the_candidates() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="full", budget_s=0.0)) as tuned:
        assert len(device.captured) == 2, "one stream, and one to compare it with"
        assert any("budget" in one.note for one in tuned.candidates)


# -- memory -----------------------------------------------------------------------------------------------------------


class Broad(nn.Module):
    """Branches of 8 KB results that can all run at once, each ``steps`` calls long."""

    def __init__(self, branches: int = 8, steps: int = 1) -> None:
        super().__init__()
        self.branches, self.steps = branches, steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for at in range(self.branches):
            y = (x[:, at : at + 1].expand(2, 1 << 10) * at).relu()
            for _ in range(1, self.steps):
                y = y.sin()
            found.append(y.sum())
        return torch.stack(found).sum() + x


class Fed(nn.Module):
    """A chain that reads another 8 KB result at each of its steps: these may be made early, but need not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chain = x
        for at in range(10):
            fed = x[:, at : at + 1].expand(2, 1 << 10) * at
            chain = chain.tanh().exp().sin() + (fed * chain[:, :1]).mean()
        return chain


class Owning(Broad):
    """The same, beside a parameter that is larger than all that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1 << 18))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.sum()


@pytest.fixture
def little_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 4 KB beyond eager's memory have to be worth it."""
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)


@pytest.mark.usefixtures("little_is_much")
@pytest.mark.parametrize(
    ("model", "options", "more", "tried", "taken"),
    [
        (Broad(), {}, {}, 4, False),  # as fast only with all of it
        (Broad(), {}, {"worth": 100.0}, 1, True),
        (Broad(), {}, {"worth": 1.0}, 4, False),
        (Fed(), {}, {}, 1, True),  # as fast without
        (Fed(), {"memory_limit": 1 << 30}, {}, 0, False),  # a limit of the user's is not tightened
        (Owning(), {}, {}, 0, False),  # little beside the parameters
        (Broad(), {}, {"eager_nbytes": 1 << 30}, 0, False),
        (Broad(), {}, {"eager_nbytes": 1 << 30, "beside_nbytes": 1 << 31}, 4, False),
    ],
)
def test_a_plan_that_holds_much_is_tried_with_less(
    model: nn.Module, options: dict[str, Any], more: dict[str, Any], tried: int, taken: bool
) -> None:
    device = Watched(1000.0)
    with tuning(device, Options(policy="auto", **options), model=model, **more) as tuned:
        named = by_name(tuned)
        less = [name for name in device.captured if name.endswith("less memory")]
        assert len(less) == tried
        assert any(one.chosen for name, one in named.items() if name in less) == taken
        for name in less:
            other, heavy = named[name], named[name.removesuffix(", less memory")]
            assert other.check
            assert other.check.passed
            assert other.nbytes < heavy.nbytes
            assert heavy.nbytes > 1.2 * named["single"].nbytes + (4 << 10) or more
            assert heavy.chosen != taken
            assert len([check for check in tuned.checks if check.name == name]) == 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_wrong_outputs_win_nothing() -> None:
    with tuning(Watched(1000.0, wrong="nimble"), Options(tune="full")) as tuned:
        wrong = [one for one in tuned.candidates if one.name.startswith("nimble")]
        assert wrong
        assert all(one.check and one.check.differs and "differ" in one.note for one in wrong)
        assert not tuned.best.schedule.policy.startswith("nimble")


def test_a_wrong_single_stream_is_said_and_refused_under_strict() -> None:
    with tuning(Watched(1000.0, wrong="single")) as tuned:
        assert "not what eager computes" in tuned.wrong
        assert tuned.best.schedule.policy != "single"
    with (
        pytest.raises(CaptureError, match="not what eager computes"),
        tuning(Watched(1000.0, wrong="single"), Options(strict=True)),
    ):
        pass


@pytest.mark.parametrize(
    ("impossible", "options", "raised"),
    [
        ("contention", Options(tune="full"), nullcontext()),
        ("single", Options(), pytest.raises(DeviceError)),
        ("nimble", Options(policy="nimble"), pytest.raises(DeviceError)),
    ],
)
def test_a_plan_that_does_not_fit_is_left_out_unless_nothing_else_could_run(
    impossible: str, options: Options, raised: AbstractContextManager[Any]
) -> None:
    with raised, tuning(Watched(1000.0, impossible=impossible), options) as tuned:
        assert "out of memory" in by_name(tuned)[impossible].note
        assert f"{impossible}: left out: out of memory" in tuned.notes


def test_an_interruption_closes_everything() -> None:
    class Interrupted(Watched):
        def clock_ns(self) -> float:
            if len(self.captured) > 1:
                raise KeyboardInterrupt
            return super().clock_ns()

    with pytest.raises(KeyboardInterrupt), tuning(Interrupted(1000.0)):
        pass
