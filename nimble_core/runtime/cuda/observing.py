"""Watches replays of a captured graph: when each of its nodes ran, and what each call costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import torch

from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.timeline import Observation
from nimble_core.profiling import cupti
from nimble_core.profiling.kernel_matching import TIMED, observation, tell_by_id
from nimble_core.runtime.cuda.executable import CudaExecutable
from nimble_core.runtime.cuda.graph_nodes import links_change

__all__ = ["multiprocessors", "observe_replays", "observed"]


def observe_replays(executable: CudaExecutable, replays: int, synchronize: Callable[[], object]) -> Observation:
    """Time every replayed node, by call; none and a note why where nothing can be seen.

    Through CUPTI by graph node id.
    """
    found = _watched(executable, replays, synchronize)
    if not executable.raw.ahead or not links_change(executable.raw):
        return found
    with executable.none_ahead():  # else a kernel's time begins while it waits for the one before
        return replace(found, costs=_watched(executable, replays, synchronize).costs)


def _watched(executable: CudaExecutable, replays: int, synchronize: Callable[[], object]) -> Observation:
    wall = _event_times_ns(executable, max(replays, 5))
    watched: list[float] = []

    def replay() -> None:
        watched.extend(_event_times_ns(executable, replays))  # one by one: what is compared is taken alike

    why_not = cupti.unavailable()
    seen, places = cupti.collect(replay, synchronize, executable.raw.nodes)
    note = f"{why_not}: replayed kernels have no times" if why_not else ""
    profiled = median(watched) if watched else 0.0
    gpu = multiprocessors(executable.device)
    return observed(executable, seen, places, replays, median(wall), gpu, note, profiled)


def observed(
    executable: CudaExecutable,
    seen: Sequence[cupti.Activity],
    places: Mapping[int, int],
    replays: int,
    wall_ns: float,
    gpu: Multiprocessors,
    note: str,
    profiled_ns: float = 0.0,
) -> Observation:
    """Make an observation of what was seen.

    Args:
        executable: what was replayed.
        seen: what the GPU did meanwhile.
        places: position of each node of the graph by its id.
        replays: how many there were.
        wall_ns: a replay that nobody watched.
        gpu: where it ran.
        note: why nothing could be seen.
        profiled_ns: a watched replay.
    """
    raw = executable.raw
    ids = {node: position for node, position in places.items() if raw.kinds[position] in TIMED}
    return observation(
        tell_by_id(seen, raw, ids, replays),
        raw,
        executable.schedule,
        replays,
        clock="CUPTI activity, GPU clock",
        profiled_ns=profiled_ns,
        unprofiled_ns=wall_ns,
        gpu=gpu,
        note=note,
    )


def _event_times_ns(executable: CudaExecutable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        executable.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e6)
    return times


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """Return what the multiprocessors of ``device`` hold."""
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        count=found.multi_processor_count,
        threads=found.max_threads_per_multi_processor,
        registers=getattr(found, "regs_per_multiprocessor", 65536),
        shared_bytes=found.shared_memory_per_multiprocessor,
    )
