"""Issues a schedule's calls under a capture: on their streams, into planned memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.profiling.nvtx import call_ranges
from nimble_core.runtime.cuda.capturing import Lanes
from nimble_core.runtime.cuda.graph_nodes import CaptureProbe, linked, links_change, read_graph, zeroed_at_once
from nimble_core.runtime.cuda.memory import CudaArena
from nimble_core.runtime.device import PlacementError
from nimble_core.scheduling.verify_capture import RawGraph, launched_ahead
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.recording import Issuer, Recording
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError

__all__ = ["issue_schedule", "read_and_link"]


def issue_schedule(
    device: torch.device,
    recording: Recording,
    schedule: Schedule,
    issuer: Issuer,
    arena: CudaArena,
    streams: Sequence[torch.cuda.Stream],
    probe: CaptureProbe,
    unplaced: set[str],
) -> list[tuple[int, int]]:
    """Issue each call on its stream behind its waits; return ``(first node, next after it)`` by call.

    Args:
        device: which GPU.
        recording: of the calls.
        schedule: checked.
        issuer: runs them.
        arena: where their results go.
        streams: capturing, one for each of the schedule's.
        probe: counts nodes.
        unplaced: operators whose calls cannot be placed; one that is found is added.

    Raises:
        CaptureError: a call that cannot be issued again.
        PlacementError: results that are not where they were planned.
    """
    range_of = call_ranges(recording.program, schedule)
    producers = {producer for producer, _ in schedule.syncs}
    waits: dict[int, list[int]] = {}
    for producer, consumer in schedule.syncs:
        waits.setdefault(consumer, []).append(producer)
    events: dict[int, torch.cuda.Event] = {}
    bounds: list[tuple[int, int]] = [(0, 0)] * len(recording.program.calls)
    lanes = Lanes(device, schedule)
    nodes = probe.nodes()
    with lanes.joined(streams):
        for position, call in enumerate(schedule.order):
            stream = lanes.enter(call, streams)
            for producer in waits.get(call, ()):
                stream.wait_event(events[producer])
            for storage in arena.dead_before(position):
                issuer.release(storage)
            with _refusal_explained(recording, call), range_of(call), arena.placing(call):
                issuer.issue(call)
            if not arena.placed(call, issuer):
                # At once: what comes next may be meant for the memory in which these results are now.
                unplaced.add(recording.program.calls[call].operator)
                raise PlacementError(f"not placed as planned: {recording.program.calls[call]}")
            first, nodes = nodes, probe.nodes()
            bounds[call] = (first, nodes)
            if call in producers:
                event = torch.cuda.Event()
                event.record(stream)
                events[call] = event
    return bounds


@contextmanager
def _refusal_explained(recording: Recording, call: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, (NimbleError, torch.OutOfMemoryError)):
            raise
        raise CaptureError(
            f"a call could not be re-issued: {str(error).splitlines()[0]}",
            where=str(recording.program.calls[call]),
            fix="report this model; until then, leave that part out of the prepared module",
        ) from error


def read_and_link(
    device: torch.device,
    graph: torch.cuda.CUDAGraph,
    bounds: Sequence[tuple[int, int]],
    recording: Recording,
    untouched: Sequence[Mapping[int, Sequence[range]]],
) -> RawGraph:
    """Read a captured graph, and have kernels that may begin early launched ahead in its next instance.

    Args:
        device: which GPU.
        graph: as captured.
        bounds: of each call, its first node and the first after it.
        recording: of the calls.
        untouched: addresses that nothing touches between the beginning of a replay and a call, by call, of what lies
            together.
    """
    handle = graph.raw_cuda_graph()
    raw = read_graph(handle)
    owner: list[int | None] = [None] * len(raw.nodes)
    for call, (first, last) in enumerate(bounds):
        owner[first:last] = [call] * (last - first)
    raw = replace(raw, owner=tuple(owner))
    if links_change(raw):
        functions: dict[int, Any] = {step.call: step.func for step in recording.steps if step.call is not None}
        waiting = {call for call, func in functions.items() if isinstance(func, Relaunch) and func.waits}
        library = {call for call, func in functions.items() if getattr(func, "namespace", "") == "aten"}
        with torch.cuda.device(device):
            raw = zeroed_at_once(handle, raw, untouched)
        wanted = launched_ahead(raw, waiting, library)
        raw = linked(handle, raw, sorted(set(raw.ahead) & set(wanted)))
        with suppress(DeviceError):  # such edges are a gain, and nothing is wrong without
            raw = linked(handle, raw, wanted)
    return raw
