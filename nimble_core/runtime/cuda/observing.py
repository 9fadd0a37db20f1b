"""Watches replays of a captured graph: when each of its nodes ran, and what each call costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import torch

from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.timeline import Observation
from nimble_core.profiling import cupti, kineto
from nimble_core.profiling.kernel_matching import TIMED, Launch, observation, tell_by_id, tell_by_order
from nimble_core.runtime.cuda.executable import CudaExecutable
from nimble_core.runtime.cuda.graph_nodes import links_change, read_launches
from nimble_core.utils.errors import DeviceError

__all__ = ["multiprocessors", "observe_replays", "observed"]


def observe_replays(executable: CudaExecutable, replays: int, synchronize: Callable[[], object]) -> Observation:
    """Time every replayed node, by call; none and a note why where nothing can be seen.

    Through CUPTI by graph node id; without ``cupti-python`` through ``torch.profiler``, by name and order.
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

    why_not, clock = cupti.unavailable(), "CUPTI activity, GPU clock"
    seen: list[cupti.Activity] = []
    places: dict[int, int] = {}
    if not why_not:
        seen, places = cupti.collect(replay, synchronize, executable.raw.nodes)
    elif not cupti.taken():
        seen, clock = kineto.collect(replay, synchronize), "torch.profiler, GPU clock"
    note = f"{why_not}: replayed kernels have no times" if why_not and not seen else ""
    profiled = median(watched) if watched else 0.0
    gpu = multiprocessors(executable.device)
    return observed(executable, seen, places, replays, median(wall), gpu, note, profiled, clock)


def observed(
    executable: CudaExecutable,
    seen: Sequence[cupti.Activity],
    places: Mapping[int, int],
    replays: int,
    wall_ns: float,
    gpu: Multiprocessors,
    note: str,
    profiled_ns: float = 0.0,
    clock: str = "CUPTI activity, GPU clock",
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
        clock: how times were taken.
    """
    raw = executable.raw
    ids = {node: position for node, position in places.items() if raw.kinds[position] in TIMED}
    told = tell_by_id(seen, raw, ids, replays)
    launches: tuple[Launch, ...] = ()
    if seen and not any(activity.node >= 0 for activity in seen):
        try:
            launches = read_launches(raw)
        except DeviceError as error:
            note = f"no graph node ids, and {error.what}"
        else:
            told = tell_by_order(seen, raw, launches, replays)
    return observation(
        told,
        raw,
        executable.schedule,
        replays,
        clock=clock,
        profiled_ns=profiled_ns,
        unprofiled_ns=wall_ns,
        gpu=gpu,
        launches=launches,
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
