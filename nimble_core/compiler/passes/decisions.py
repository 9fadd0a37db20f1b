"""Choices made by measurement, kept so that another process can repeat them without measuring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from nimble_core.compiler.to_fx import calls_of
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.device import Timed

__all__ = ["Decisions", "Timer", "example"]

Timer = Callable[[Sequence[Timed]], Sequence[float | None]]
"""Times each call, or several side by side, on an idle device, in ns; None for one that fails or cannot be timed."""


def example(
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Make a tensor of small numbers, to time calls on; they come from a generator of its own, not from the user's."""
    one = torch.empty(tuple(sizes), dtype=dtype, device=device, memory_format=memory_format)
    return one.uniform_(-0.1, 0.1, generator=torch.Generator(device).manual_seed(0))


@dataclass(slots=True)
class Decisions:
    """Which kernels replace which eager calls: repeated if choices are given, measured otherwise.

    Args:
        timer: measures calls; None: nothing is measured.
        given: choices made earlier for the same program; None: there are none.
        until_s: when to stop measuring, by ``time.perf_counter``.
        made: the choices taken, in order.
        times: what was measured, ns, by key.
    """

    timer: Timer | None = None
    given: frozenset[KernelChoice] | None = None
    until_s: float = math.inf
    made: list[KernelChoice] = field(default_factory=list)
    times: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)

    def times_ns(self, key: Hashable, calls: Callable[[], Sequence[Timed]]) -> tuple[float, ...] | None:
        """Time alternatives, once for each key.

        Args:
            key: all that their times depend on.
            calls: makes them, with their example tensors.

        Returns:
            ns of each, infinite for one that fails; None if nothing is measured: examples may not fit beside the model.
        """
        if self.timer is None:
            return None
        if key not in self.times:
            if time.perf_counter() > self.until_s:
                return None
            try:
                self.times[key] = tuple(math.inf if ns is None else ns for ns in self.timer(calls()))
            except torch.OutOfMemoryError:
                return None
        return self.times[key]

    def second_is_faster(self, key: Hashable, calls: Callable[[], Sequence[Timed]]) -> bool:
        """Whether the second of two calls takes less time; False if unmeasured, or if one fails."""
        times = self.times_ns(key, calls)
        return times is not None and times[1] < times[0] < math.inf

    def take(self, node: fx.Node, kernel: str, *, wanted: bool) -> bool:
        """Decide whether ``node`` gets ``kernel``, and note it if so. Given choices override ``wanted``."""
        choice = KernelChoice(min(calls_of(node), default=0), kernel)
        taken = wanted if self.given is None else choice in self.given
        if taken:
            self.made.append(choice)
        return taken
