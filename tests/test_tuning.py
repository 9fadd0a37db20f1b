"""The measured choice, on a device whose times are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Wide
from torch import nn

from nimble_core.devices.fake import FakeDevice
from nimble_core.errors import CaptureError, DeviceError, InputError
from nimble_core.options import Options
from nimble_core.pipeline import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.policies import POLICIES
from nimble_core.schedule import Schedule
from nimble_core.simulate import DeviceModel
from nimble_core.tuning import Tuned, eager_cases, tune


class Watched(FakeDevice):
    """Keeps count of what is open; engines of some policies can be made wrong, large or impossible."""

    def __init__(self, *args: Any, wrong: str = "", impossible: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrong, self.impossible = wrong, impossible
        self.open: list[str] = []
        self.captured: list[str] = []

    def capture(self, recording: Any, schedule: Schedule, *args: Any) -> Any:
        if self.impossible and schedule.policy.startswith(self.impossible):
            raise DeviceError("out of memory")
        made = super().capture(recording, schedule, *args)
        self.open.append(schedule.policy)
        self.captured.append(schedule.policy)
        run, close = made.run, made.close

        def closed() -> None:
            self.open.remove(schedule.policy)
            close()

        made.close = closed  # type: ignore[method-assign]
        if self.wrong and schedule.policy.startswith(self.wrong):
            made.run = lambda inputs, static=False: [out + 1 for out in run(inputs)]  # type: ignore[method-assign]
        return made


def recorded(device: FakeDevice, model: nn.Module | None = None) -> Recorded:
    torch.manual_seed(0)
    model, x = model or Wide().eval(), torch.randn(2, 16)
    return record_static(device, model, check_inputs(model, (x,), {}), (x,), {}, strict=True, step=Stopwatch())


@contextmanager
def tuning(device: Watched, options: Options = Options(), **kwargs: Any) -> Iterator[Tuned]:
    found = recorded(device)
    with state_kept(found):
        tuned = tune(device, found, options, step=Stopwatch(), **kwargs)
    yield tuned
    assert sorted(device.open) == sorted(one.schedule.policy for one in tuned.executables.values())
    tuned.close()
    assert not device.open


WAITS_COST_MORE = DeviceModel("waits", sync_ns=1e6)


def test_streams_are_chosen_where_they_pay() -> None:
    with tuning(Watched(1000.0)) as tuned:
        assert tuned.best.schedule.streams > 1
        chosen = [one for one in tuned.candidates if one.chosen]
        assert [one.name for one in chosen] == [tuned.best.schedule.policy]
        assert all(one.check and one.check.passed for one in tuned.candidates if one.measurement)
        assert {"single", tuned.best.schedule.policy} == set(tuned.executables)
        assert tuned.costs
        assert set(tuned.costs.ns) == {1000.0}


def test_one_stream_is_chosen_where_they_do_not() -> None:
    with tuning(Watched(1000.0, model=WAITS_COST_MORE)) as tuned:
        assert tuned.best.schedule.policy == "single"
        fastest = min(one.measurement.median_ns for one in tuned.candidates if one.measurement)
        (single,) = [one for one in tuned.candidates if one.name == "single"]
        assert single.measurement
        assert single.measurement.median_ns == fastest
        assert single.chosen
        assert len(tuned.executables) == 2, "the fastest of several streams is kept beside it"


def test_a_tie_goes_to_fewer_streams() -> None:
    with tuning(Watched(0.0)) as tuned:
        assert tuned.best.schedule.policy == "single"


def test_the_most_promising_are_captured() -> None:
    device = Watched(1000.0)
    with tuning(device) as tuned:
        left = [one for one in tuned.candidates if "simulated slower" in one.note]
        taken = [one for one in tuned.candidates if one.measurement and one.name != "single"]
        assert len(taken) == 1
        assert all(one.simulated_ns >= taken[0].simulated_ns for one in left)
        assert all(one.measurement is None and not one.nbytes for one in left)


def test_full_tuning_tries_caps_too() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="full")) as tuned:
        names = {one.name for one in tuned.candidates}
        assert "contention, 2 streams" in names
        assert set(device.captured) == names
        assert all(one.measurement for one in tuned.candidates)
        plans = [(one.streams, one.syncs) for one in tuned.candidates if one.name.endswith("2 streams")]
        assert all(streams <= 2 for streams, _ in plans)


def test_nothing_is_measured_without_tuning() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="off")) as tuned:
        assert device.captured == ["nimble"]
        assert tuned.best.schedule.policy == "nimble"
        assert tuned.observed is None
        assert not tuned.checks


def test_the_budget_bounds_the_candidates() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="full", budget_s=0.0)) as tuned:
        assert len(device.captured) == 2, "one stream, and one to compare it with"
        assert any("budget" in one.note for one in tuned.candidates)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_named_policy_is_taken_at_its_word(policy: str) -> None:
    device = Watched(1000.0, model=WAITS_COST_MORE)
    with tuning(device, Options(policy=policy)) as tuned:
        assert tuned.best.schedule.policy == policy
        assert set(device.captured) == {"single", policy}


def test_a_function_is_a_policy() -> None:
    def mine(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy="mine")

    with tuning(Watched(1000.0), Options(policy=mine)) as tuned:
        assert tuned.best.schedule.policy == "mine"
    with pytest.raises(InputError, match="returned a int"), tuning(Watched(), Options(policy=lambda graph, costs: 3)):
        pass


def test_wrong_outputs_win_nothing() -> None:
    device = Watched(1000.0, wrong="nimble")
    with tuning(device, Options(tune="full")) as tuned:
        wrong = [one for one in tuned.candidates if one.name.startswith("nimble")]
        assert wrong
        assert all(one.check and one.check.differs and "differ" in one.note for one in wrong)
        assert not tuned.best.schedule.policy.startswith("nimble")


def test_a_wrong_single_stream_is_said_and_refused_under_strict() -> None:
    with tuning(Watched(1000.0, wrong="single")) as tuned:
        assert "not what eager computes" in tuned.wrong
        assert tuned.best.schedule.policy != "single"
    device = Watched(1000.0, wrong="single")
    with pytest.raises(CaptureError, match="not what eager computes"), tuning(device, Options(strict=True)):
        pass
    assert not device.open


def test_a_candidate_that_does_not_fit_is_left_out() -> None:
    device = Watched(1000.0, impossible="contention")
    with tuning(device, Options(tune="full")) as tuned:
        assert any("out of memory" in one.note for one in tuned.candidates)
        assert any("contention was left out" in note for note in tuned.notes)
    with pytest.raises(DeviceError), tuning(Watched(impossible="single")):
        pass
    device = Watched(impossible="nimble")
    with pytest.raises(DeviceError), tuning(device, Options(policy="nimble")):
        pass
    assert not device.open


def test_an_interruption_closes_everything() -> None:
    class Interrupted(Watched):
        def clock_ns(self) -> float:
            if len(self.captured) > 1:
                raise KeyboardInterrupt
            return super().clock_ns()

    device = Interrupted(1000.0)
    with pytest.raises(KeyboardInterrupt), tuning(device):
        pass
    assert not device.open


def test_eager_cases_leave_no_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(self.norm(x), 0.5, True)

    model = Counting().train()
    found = recorded(FakeDevice(), model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = eager_cases(found), eager_cases(found)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    for (a, out), (b, again) in zip(first.eager, second.eager, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(out[0], again[0])
    assert not torch.equal(first.eager[0][0][0], first.eager[1][0][0])
