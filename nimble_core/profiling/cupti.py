"""Exact times of replayed kernels, by graph node, through CUPTI activity records (``cupti-python``).

CUPTI serves one tool at a time. torch's own profiler may run before or after in the same process (seen with torch 2.11,
CUPTI 13.0): each collection registers its callbacks anew. While it runs, or where Nsight Systems or Nsight Compute
started the process, nothing is collected: ``unavailable`` says so.

Once used, CUPTI stays in the process and makes every launch of a graph slower, with all activities switched off: 350 µs
instead of 8 for 1,290 nodes (H200, driver 580). So who brings it in here, a collection or a session of torch's profiler
(``nimble_core.profiling.kineto``), takes it out (``cuptiFinalize``). A graph that was timed, and then launched with
CUPTI in but idle, fails once it is out ("unspecified launch failure", for good): hence torch's replays are held back
(``Replays``), and CUPTI stays where somebody else brought it in or launched graphs without torch meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from nimble_core.profiling.cupti_probe import launches_are_slow
from nimble_core.profiling.replay_hook import Replays
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.locks import capturing, launching

__all__ = [
    "Activity",
    "attached_tool",
    "available",
    "collect",
    "present",
    "profiler_runs",
    "take_out",
    "taken",
    "unavailable",
]

_BUFFER_BYTES = 8 << 20
_TOOL_OF = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "NV_NSIGHT_INJECTION_PORT_BASE": "Nsight Compute",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
    "CUDA_INJECTION64_PATH": "another tool",
}
"""Environment variables that tools set in the processes that they start; the one that any of them may set is last."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing the GPU did.

    Args:
        kind: ``"kernel"``, ``"memcpy"`` or ``"memset"``.
        name: kernel name as compiled (mangled), or the kind.
        start_ns: on CUPTI's clock.
        end_ns: likewise.
        stream: stream id as CUPTI saw it.
        node: low 32 bits of the graph node id: the node's place in its graph, from 0. -1 outside graphs, or unknown.
        grid: blocks per dimension.
        block: threads per dimension.
        registers: per thread.
        shared_bytes: static and dynamic shared memory per block.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    stream: int
    node: int
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    registers: int = 0
    shared_bytes: int = 0


# CUPTI fills its buffers and hands them back on a thread of its own, for buffers under way even after a collection has
# ended: it is always given the same two functions, which live as long as the process.
_seen: list[Activity] = []
_launches: set[int] = set()
"""Launches of graphs of which something was seen, by CUPTI's number; good for one collection."""
_said = threading.Event()
"""Set once it was said that CUPTI stays."""
_names: dict[int, str] = {}
"""Kernel names by the address CUPTI gives; good for one collection."""
_fields: dict[type, dict[str, int]] = {}
"""Place of each field in a record, by type of record; ``kind`` comes first in all."""


def _requested() -> tuple[int, int]:
    return _BUFFER_BYTES, 0


def _completed(records: list[Any]) -> None:
    kinds = _kinds()
    for record in records:
        # Read here and now: a record is a window on a buffer that CUPTI takes back. And read at once: each of its
        # attributes costs 4 µs, and the replays of a large model have 15,000 records.
        row = record._data.item()
        kind = kinds.get(row[0])
        if kind is not None:
            _seen.append(_activity(kind, record, row))


@cache
def _cupti() -> Any | None:
    try:
        from cupti import cupti
    except Exception:  # not installed, or built for another CUDA: ImportError, OSError, RuntimeError
        return None
    return cupti


@cache
def _kinds() -> dict[int, str]:
    kinds = cast(Any, _cupti()).ActivityKind
    return {kinds.CONCURRENT_KERNEL: "kernel", kinds.MEMCPY: "memcpy", kinds.MEMSET: "memset"}


def attached_tool() -> str:
    """Name the tool that watches this process from outside, and what gives it away; empty if none does."""
    return next((f"{tool} ({name} is set)" for name, tool in _TOOL_OF.items() if os.environ.get(name)), "")


def unavailable() -> str:
    """Say why nothing can be collected now; empty if something can."""
    return taken() or ("" if _cupti() else "cupti-python is not installed")


def taken() -> str:
    """Say why another tool has CUPTI now; empty if none has."""
    tool = attached_tool()
    by = f"{tool} is attached" if tool else "torch.profiler is running" if profiler_runs() else ""
    return f"{by}, and CUPTI serves one tool at a time" if by else ""


def profiler_runs() -> bool:
    """Return whether torch.profiler runs, in any thread."""
    from nimble_core.torch_compat.autograd import profiler_enabled
    from nimble_core.torch_compat.members import PROFILER_RUNS

    return bool(PROFILER_RUNS.find() or profiler_enabled())  # the second is this thread's


def available() -> bool:
    """Return whether something can be collected now."""
    return not unavailable()


def collect(
    run: Callable[[], object], synchronize: Callable[[], object], nodes: Sequence[int] = ()
) -> tuple[list[Activity], dict[int, int]]:
    """Run ``run``; return what the GPU did, and positions in ``nodes`` by ``Activity.node``.

    Where CUPTI is not ours to use (``unavailable``), it is not touched, nothing is run, and both are empty.

    Args:
        run: launches work.
        synchronize: waits for it.
        nodes: raw handles of graph nodes.
    """
    cupti = _cupti() if available() else None
    if cupti is None:
        return [], {}
    synchronize()
    found, out, replays = True, False, None
    try:
        with collector_paused(), capturing, launching:
            found = present()
            replays = Replays()
            _seen.clear()
            _names.clear()
            _launches.clear()
            cupti.activity_register_callbacks(_requested, _completed)
            for kind in _kinds():
                cupti.activity_enable(kind)
        began = _clocks(cupti)
        run()
        synchronize()
        scale = _ns_per_tick(cupti, began)
        # Before CUPTI is out: this question alone brings it back.
        places = {int(cupti.get_graph_node_id(node)) & 0xFFFFFFFF: position for position, node in enumerate(nodes)}
    finally:
        out = _end(cupti, found, replays)
    if not out:
        _say_that_it_stays()
    taken = sorted(_seen, key=lambda activity: (activity.start_ns, activity.end_ns))
    _seen.clear()
    if scale == 1.0:
        return taken, places
    scaled = [replace(one, start_ns=round(one.start_ns * scale), end_ns=round(one.end_ns * scale)) for one in taken]
    return scaled, places


def _end(cupti: Any, found: bool, replays: Replays | None) -> bool:
    """Stop collecting, and take CUPTI out unless it was there before; return whether it is out."""
    import torch

    from nimble_core.torch_compat.cuda import has_context

    with collector_paused(), capturing, launching:
        try:
            for device in range(torch.cuda.device_count()):
                if has_context(device):
                    torch.cuda.synchronize(device)
            cupti.activity_flush_all(1)
            for kind in _kinds():
                cupti.activity_disable(kind)
            if found or replays is None or len(_launches) > replays.count or profiler_runs():
                return False
            take_out()
            return True
        finally:
            if replays is not None:
                replays.end()


def take_out() -> None:
    """Take CUPTI out of the process, where ``cupti-python`` can and no tool is attached.

    The caller holds ``launching`` since before whatever last used CUPTI began to end.
    """
    cupti = None if attached_tool() else _cupti()
    if cupti is not None:
        cupti.finalize()


def present() -> bool:
    """Return whether CUPTI is in this process, where it slows launches down."""
    return bool(taken()) or launches_are_slow()


def _say_that_it_stays() -> None:
    from nimble_core.tracing.provenance import warn  # which needs torch

    if _said.is_set():
        return
    _said.set()
    warn(
        "CUPTI stays in this process, since a profiler brought it in before, or CUDA graphs were launched without "
        "torch while kernels were timed: launching a CUDA graph takes 0.2 to 0.6 µs a node longer here, whoever does "
        "(docs/profiling.md says more)"
    )


def _clocks(cupti: Any) -> tuple[int, int]:
    """Read CUPTI's clock and the host's together."""
    before = time.perf_counter_ns()
    tick = int(cupti.get_timestamp())
    return tick, (before + time.perf_counter_ns()) // 2


def _ns_per_tick(cupti: Any, began: tuple[int, int]) -> float:
    """Return nanoseconds per unit of CUPTI's clock since ``began``.

    Once torch's profiler has run, CUPTI counts in its clock, the processor's cycles, for the rest of the process:
    kernels seem 2.1 times longer on a 2.1 GHz host. So the unit is measured, over 20 ms at least.
    """
    remaining_ns = 20_000_000 - (time.perf_counter_ns() - began[1])
    if remaining_ns > 0:
        time.sleep(remaining_ns / 1e9)
    ticks, now = _clocks(cupti)
    scale = (now - began[1]) / max(ticks - began[0], 1)
    return 1.0 if abs(scale - 1) < 0.01 else scale


def _activity(kind: str, record: Any, row: tuple[Any, ...]) -> Activity:
    at = _fields.get(type(record))
    if at is None:
        at = _fields[type(record)] = {name: place for place, name in enumerate(record._data.dtype.names)}
    start, end, stream = row[at["start"]], row[at["end"]], row[at["stream_id"]]
    node_id = row[at["graph_node_id"]]  # in the upper half the graph; 0 as a whole outside graphs
    node = node_id & 0xFFFFFFFF if node_id else -1
    if node_id:
        _launches.add(row[at["correlation_id"]])
    if kind != "kernel":
        return Activity(kind, kind, start, end, stream, node)
    pointer = row[at["name"]]
    name = _names.get(pointer)
    if name is None:
        name = _names[pointer] = str(record.name)
    return Activity(
        kind,
        name,
        start,
        end,
        stream,
        node,
        (row[at["grid_x"]], row[at["grid_y"]], row[at["grid_z"]]),
        (row[at["block_x"]], row[at["block_y"]], row[at["block_z"]]),
        row[at["registers_per_thread"]],
        row[at["static_shared_memory"]] + row[at["dynamic_shared_memory"]],
    )
