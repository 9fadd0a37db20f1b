"""From a schedule to an executable: checked, within its memory, and watched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nimble_core.autotune.capture_pipeline import capture, device_for, schedule_by
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.utils.errors import DeviceError, InputError, ScheduleError
from nimble_core.utils.units import format_bytes
from tests.support.models import Wide


def recorded(model: Any, *args: Any, device: FakeDevice | None = None, strict: bool = False, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    return record_static(device or FakeDevice(), model, signature, strict=strict, step=Stopwatch())


def test_devices_by_their_inputs() -> None:
    assert device_for(torch.device("cpu")).kind == "cpu"
    with pytest.raises(InputError, match="only cuda and cpu"):
        device_for(torch.device("meta"))


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
