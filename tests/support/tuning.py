"""Tuning on devices whose times are exact, and that keep count of what is open."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nimble_core.autotune.autotune import Tuned, tune
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.options import Options
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.utils.errors import DeviceError
from tests.support.models import Wide


class Watched(FakeDevice):
    """Keeps count of what is open; engines of some policies can be made wrong or impossible."""

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


class LikeCuda(Watched):
    """A device on which ``fuse="auto"`` tries everything; each call of some kernels takes longer."""

    kind = "cuda"

    def __init__(self, slow: dict[str, float] | None = None, **kwargs: Any) -> None:
        super().__init__(1000.0, **kwargs)
        self.slow = slow or {}
        self.recorded: list[str] = []

    def record(self, *args: Any, **kwargs: Any) -> Any:
        recording = super().record(*args, **kwargs)
        self.recorded.append(recording.program.fuse)
        return recording

    def costs(self, program: Any) -> Any:
        found = super().costs(program)
        return replace(found, ns=tuple(ns * self.slow.get(program.fuse, 1.0) for ns in found.ns))


class Noisy(LikeCuda):
    """A machine on which every call takes up to a hundred times as long as it should."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draw = random.Random(5)

    def synchronize(self) -> None:
        self.advance(10 ** self.draw.uniform(4, 7))


class NoisyHost(Noisy):
    """The same without a GPU."""

    kind = "cpu"


def recorded(device: FakeDevice, model: nn.Module | None = None) -> Recorded:
    """Record a model on two rows of 16 numbers."""
    torch.manual_seed(0)
    model, x = model or Wide().eval(), torch.randn(2, 16)
    return record_static(device, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())


@contextmanager
def tuning(
    device: Watched, options: Options = Options(), model: nn.Module | None = None, **kwargs: Any
) -> Iterator[Tuned]:
    """Tune, and check that what is open is what was returned."""
    found = recorded(device, model)
    try:
        with state_kept(found):
            tuned = tune(device, found, options, step=Stopwatch(), **kwargs)
    except BaseException:
        assert not device.open
        raise
    yield tuned
    assert sorted(device.open) == sorted(one.schedule.policy for one in tuned.executables.values())
    tuned.close()
    assert not device.open


def by_name(tuned: Tuned) -> dict[str, Candidate]:
    """Return what was tried, by name."""
    return {one.name: one for one in tuned.candidates}
