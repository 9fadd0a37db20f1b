"""Which form of a Triton kernel is the fastest in a replay: block sizes and numbers of warps that Inductor has compete.

By itself Inductor times single launches with an empty cache. For kernels of a few microseconds that is mostly what the
host takes to launch, so that chance decides: the same kernel of Whisper's encoder took 17 or 25 us on an H200 in two
preparations. In a replay kernels follow each other, and find in the cache what the one before has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from nimble_core.runtime.cuda.capturing import own_streams
from nimble_core.torch_compat.compiler import AUTOTUNER_BENCH, BENCHMARKER

__all__ = ["forms_timed"]

_Time = Callable[[Callable[[], object]], float | None]


@contextmanager
def forms_timed(device: torch.device, time_ns: _Time) -> Iterator[None]:
    """Have Inductor choose by replays inside, on this thread, where it has kernels at all.

    Args:
        device: on which.
        time_ns: time a call as one of several in a replayed graph, ns; None if it cannot be captured.
    """
    if not (AUTOTUNER_BENCH.loaded and AUTOTUNER_BENCH.find() and BENCHMARKER.find()):
        yield
        return
    usual, replays = AUTOTUNER_BENCH.require(), _Replays(BENCHMARKER.require(), time_ns)

    def bench(tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        if get_ident() != replays.thread:
            return float(usual(tuner, launcher, *args, **kwargs))
        caller, stream = torch.cuda.current_stream(device), own_streams(device, 1)[0]
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):  # whose launches a capture sees: Inductor asks for the stream only once
                return float(usual(tuner, launcher, *args, **kwargs))
        finally:
            caller.wait_stream(stream)

    with AUTOTUNER_BENCH.replaced_by(bench), BENCHMARKER.replaced_by(replays):
        yield


@dataclass(frozen=True, slots=True)
class _Replays:
    """Stands for Inductor's benchmarker."""

    usual: Any
    time_ns: _Time
    thread: int = field(default_factory=get_ident)

    def benchmark(self, fn: Callable[[], object], *args: Any, **kwargs: Any) -> float:
        """Time a launch, ms: in a replay, or as usual where it cannot be captured or has an impossible size."""
        taken = self.time_ns(fn) if get_ident() == self.thread else None
        return float(self.usual.benchmark(fn, *args, **kwargs)) if taken is None else taken / 1e6

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)
