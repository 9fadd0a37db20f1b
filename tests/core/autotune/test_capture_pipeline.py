"""From a model to a recording, and from a schedule to an executable that stays within its memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.ir.allocations import Ask
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static, state_kept
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, NotStaticError, ScheduleError
from nimble_core.utils.units import format_bytes
from tests.support.models import Norms, Wide, make


def recorded(model: Any, *args: Any, device: FakeDevice | None = None, strict: bool = False, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    return record_static(device or FakeDevice(), model, signature, strict=strict, step=Stopwatch())


def test_a_stopwatch_adds_up_what_has_one_name() -> None:
    watch = Stopwatch()
    with watch("a"):
        pass
    first = watch.seconds["a"]
    with pytest.raises(KeyError), watch("a"):
        raise KeyError
    with watch("b"):
        pass
    assert list(watch.seconds) == ["a", "b"]
    assert watch.seconds["a"] > first > 0


def test_devices_by_their_inputs() -> None:
    assert device_for(torch.device("cpu")).kind == "cpu"
    with pytest.raises(InputError, match="only cuda and cpu"):
        device_for(torch.device("meta"))


def test_inputs_are_checked() -> None:
    x = torch.randn(2, 16)
    assert check_inputs(Wide(), (x,), {}).paths == ["args[0]"]
    with pytest.raises(InputError, match="Wide itself"):
        check_inputs(Wide, (x,), {})
    with pytest.raises(InputError, match=r"kwargs\['x'\] is a Other, a class of its own"):
        check_inputs(Wide(), (), {"x": x.as_subclass(type("Other", (torch.Tensor,), {}))})
    with pytest.raises(InputError, match=r"parameter branches.0.weight is on meta, args\[0\] on cpu"):
        check_inputs(Wide().to("meta"), (x,), {})


def test_nothing_is_collected_from_the_first_recording_to_the_hazards() -> None:
    collecting: dict[str, bool] = {}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        collecting[name] = gc.isenabled()
        yield
        collecting[f"after {name}"] = gc.isenabled()

    model, x = Wide(), torch.randn(2, 16)
    signature = check_inputs(model, (x,), {})
    record_static(FakeDevice(), model, signature, strict=False, step=step)
    steps = ("record", "record again", "hazards")
    assert collecting == dict.fromkeys([*steps, *(f"after {name}" for name in steps)], False)
    assert gc.isenabled()


def test_allocations_are_traced_in_the_second_recording_alone() -> None:
    class Traces(FakeDevice):
        def __init__(self) -> None:
            super().__init__()
            self.traced: list[bool] = []

        def record(self, *args: Any, traced: bool = True, **kwargs: Any) -> Any:
            self.traced.append(traced)
            recording = super().record(*args, traced=traced, **kwargs)
            asks = tuple((Ask(index),) for index in range(len(recording.program.calls)))
            return replace(recording, asks=asks if traced else ())

    device, x = Traces(), torch.randn(2, 16)
    recording = recorded(Wide(), x, device=device).recording
    assert device.traced == [False, True]
    assert recording.asks == tuple((Ask(index),) for index in range(len(recording.program.calls)))


def test_the_steps_of_recording() -> None:
    watch = Stopwatch()
    model, x = Wide(), torch.randn(2, 16)
    found = record_static(FakeDevice(), model, check_inputs(model, (x,), {}), strict=True, step=watch)
    assert list(watch.seconds) == ["record", "record again", "hazards"]
    assert found.graph.size == len(found.recording.program.calls)
    assert not found.whole


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_a_branch_on_random_numbers_of_the_host_is_not_static(draw: Callable[[], float]) -> None:
    states = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(NotStaticError):
        recorded(lambda x: x * draw(), torch.randn(3))
    assert random.getstate() == states[0]
    assert (numpy.random.get_state()[1] == states[1]).all()


def test_values_made_out_of_sight() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    found = recorded(forward, torch.randn(3))
    assert found.whole
    assert "aten.add" in found.recording.unseen_where
    with pytest.raises(CaptureError, match="outside of torch") as caught:
        recorded(forward, torch.randn(3), strict=True)
    assert "aten.add" in caught.value.where

    class Cuda(FakeDevice):
        kind = "cuda"

    with pytest.raises(NotStaticError, match="outside of torch"):
        recorded(forward, torch.randn(3), device=Cuda())


def test_replays_leave_state_inputs_and_random_numbers() -> None:
    model, device = torch.nn.Sequential(norms := Norms(), torch.nn.Dropout()).train(), FakeDevice()
    x = torch.randn(2, 3, 4, 4)
    found = recorded(model, x, device=device)
    one = capture(device, found, schedule_by(found, "single", None, 1))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()

    def run() -> None:
        with state_kept(found):
            one.run([x])
            assert not torch.equal(norms.norm.running_mean, kept["0.norm.running_mean"])
            assert not torch.equal(torch.get_rng_state(), state)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    model, args, _ = make("writes_input")
    found = recorded(model, *args, device=device)
    before = [arg.clone() for arg in args]
    with state_kept(found):
        capture(device, found, schedule_by(found, "single", None, 1)).run(list(args))
        assert not torch.equal(args[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_a_schedule_that_races_is_not_captured() -> None:
    device = FakeDevice()
    found = recorded(Wide(), torch.randn(2, 16), device=device)
    good = schedule_by(found, "nimble", None, None)
    assert good.syncs
    with pytest.raises(ScheduleError):
        capture(device, found, replace(good, syncs=good.syncs[1:]))


def test_a_limit_on_memory_closes_the_engine() -> None:
    closed: list[int] = []

    class Watched(FakeDevice):
        def lay_out(self, recording: Any, schedule: Any, *, stagger: bool = True) -> None:
            return None

        def capture(self, *args: Any) -> Any:
            made = super().capture(*args)
            made.nbytes = 2048
            made.close = lambda: closed.append(1)  # type: ignore[method-assign]
            return made

    device = Watched()
    found = recorded(Wide(), torch.randn(2, 16), device=device)
    with pytest.raises(DeviceError, match=r"2.00 KiB, more than memory_limit=1.00 KiB"):
        capture(device, found, schedule_by(found, "single", None, 1), memory_limit=1024)
    assert closed == [1]
    capture(device, found, schedule_by(found, "single", None, 1), memory_limit=2048)


def test_costs_are_what_the_device_saw() -> None:
    device = FakeDevice(lambda call: 10.0 * (call.index + 1))
    found = recorded(Wide(2), torch.randn(2, 16), device=device)
    seen = observe(device, found, capture(device, found, schedule_by(found, "single", None, 1)))
    assert seen.costs.ns == tuple(10.0 * (index + 1) for index in range(found.graph.size))


def masked(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's masks do: a look at the values in eager, none in a capture."""
    if not torch.cuda.is_current_stream_capturing() and (x > 0).all():
        return x + 1
    return torch.where(x > 0, x, -x) + 1


def unmasked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.cuda.is_current_stream_capturing() else x + 1


def test_eagers_branch_is_recorded_where_it_can_be() -> None:
    program = recorded(unmasked, torch.ones(3)).recording.program
    assert [call.label for call in program.calls] == ["add"]
    assert program.notes == ()


def test_else_the_branch_that_the_model_keeps_for_captures() -> None:
    program = recorded(masked, torch.ones(3)).recording.program
    assert "where" in [call.label for call in program.calls]
    (note,) = program.notes
    assert "_local_scalar_dense" in note
    assert "test_capture_pipeline.py" in note


def test_unknown_policies_name_the_choices() -> None:
    with pytest.raises(InputError, match="nonsense") as caught:
        schedule_by(recorded(Wide(), torch.randn(2, 16)), "nonsense", None, None)
    assert "single" in caught.value.fix


def towers(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x * k).relu().sigmoid().sum() for k in range(1, 6)])


def test_what_is_held_beside_the_plan_is_learned() -> None:
    beside = 4096

    class Wasteful(FakeDevice):
        def capture(self, *args: Any) -> Any:
            made = super().capture(*args)
            made.nbytes += beside
            return made

    device = Wasteful()

    found = recorded(towers, torch.randn(16, 16), device=device)
    schedule = schedule_by(found, "nimble", None, None)
    free = capture(device, found, schedule).nbytes
    least = capture(device, found, schedule_by(found, "single", None, 1)).nbytes
    assert least < free
    fits = [limit for limit in range(least, free + 1, 512) if _holds(device, found, schedule, limit)]
    assert fits
    assert fits == list(range(fits[0], free + 1, 512)), "a larger limit is never refused where a smaller one was kept"


def test_places_that_another_order_makes_too_small_are_not_used() -> None:
    class Moody(FakeDevice):
        """In another order a call gets a larger block for the same result."""

        def lay_out(self, recording: Any, schedule: Any, *, stagger: bool = True) -> Any:
            layout = super().lay_out(recording, schedule, stagger=stagger)
            assert layout is not None
            if schedule.order == first.order and schedule.syncs == first.syncs:
                return layout
            return replace(layout, arena={storage: nbytes + grown for storage, nbytes in layout.arena.items()})

    device = Moody()
    found = recorded(towers, torch.randn(16, 16), device=device)
    first, grown = schedule_by(found, "nimble", None, None), 0
    limit = capture(device, found, first).nbytes - 512
    assert capture(device, found, first, memory_limit=limit).nbytes <= limit
    grown = 1
    with pytest.raises(DeviceError, match="in another order"):
        capture(device, found, first, memory_limit=limit)


def test_workspaces_are_staggered_where_there_is_room() -> None:
    class Counting(FakeDevice):
        """Calls of libraries that count in their workspaces."""

        def lay_out(self, recording: Any, schedule: Any, *, stagger: bool = True) -> Any:
            asked.append(stagger)
            layout = super().lay_out(recording, schedule, stagger=stagger)
            assert layout is not None
            return replace(layout, staggered_nbytes=4096) if stagger else layout

    asked: list[bool] = []
    device = Counting()
    found = recorded(lambda x: (x * 2).relu().sum(), torch.randn(16, 16), device=device)
    schedule = schedule_by(found, "single", None, 1)
    needed = capture(FakeDevice(), found, schedule).nbytes
    for limit, wanted in ((None, [True]), (needed + 4096, [True]), (needed + 4095, [True, False])):
        asked.clear()
        capture(device, found, schedule, memory_limit=limit)
        assert asked == wanted

    found = recorded(towers, torch.randn(16, 16), device=device)
    schedule = schedule_by(found, "nimble", None, None)
    limit = capture(FakeDevice(), found, schedule).nbytes - 512
    asked.clear()
    capture(device, found, schedule, memory_limit=limit)
    assert asked == [True, False, False], "nor in another order, for which nobody has seen that there is room"


def _holds(device: FakeDevice, found: Any, schedule: Any, limit: int) -> bool:
    try:
        return capture(device, found, schedule, memory_limit=limit).nbytes <= limit
    except DeviceError as error:
        said = str(error)
    if f"memory_limit={format_bytes(limit)}" not in said:
        pytest.fail(said)
    return False


@pytest.mark.parametrize(("returned", "said"), [(lambda x: x * 2, 1), (lambda x: x + torch.from_numpy(x.numpy()), 0)])
def test_draws_are_said_but_not_of_what_is_called_as_it_is(returned: Callable[..., Any], said: int) -> None:
    """Two recordings agree more often than not on a branch that is seldom taken."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if random.random() > 2 else returned(x)

    found = recorded(forward, torch.randn(3))
    assert found.whole is (not said)
    assert len(found.said) == said
    assert found.recording.program.notes == found.said
    assert all("Python's random" in one for one in found.said)
