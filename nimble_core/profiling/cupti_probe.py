"""Detects CUPTI by how long launching a graph takes: to ask CUPTI itself would load it."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from nimble_core.utils.locks import capturing, launching

if TYPE_CHECKING:
    import torch

__all__ = ["launches_are_slow"]

_NODES = 1000
_SLOW_NS = 100_000
"""To launch as many takes 10 to 20 µs, and 370 to 440 with CUPTI in (H200, driver 580)."""
_LAUNCHES = 5


def launches_are_slow() -> bool:
    """Return whether CUPTI is in; False where CUDA is not in use yet, True where it cannot be told.

    Takes a millisecond without CUPTI, in which a profiler would see a thousand kernels, and six with it.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        with capturing, launching:
            graph, stream, _ = _probe()
            return all(_launched_ns(graph, stream) > _SLOW_NS for _ in range(_LAUNCHES))
    except RuntimeError:  # out of memory, for example
        return True


def _launched_ns(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> int:
    import torch

    with torch.cuda.stream(stream):
        start = time.perf_counter_ns()
        graph.replay()
        taken = time.perf_counter_ns() - start
    stream.synchronize()
    return taken


@cache
def _probe() -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream, torch.Tensor]:
    """Capture a graph of small kernels; return it, a stream for it, and what it writes."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        filled = torch.zeros(1, device=stream.device)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_NODES):
            filled.fill_(1.0)
        graph.capture_end()
    return graph, stream, filled
