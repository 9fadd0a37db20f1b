"""What made the host wait for the device during a profiled iteration. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

from nimble_core.ir.program import Program
from nimble_viz.analysis.intervals import covers, union
from nimble_viz.analysis.labels import source_of
from nimble_viz.collect.matched_trace import Forest, MatchedTrace
from nimble_viz.report.data import HostSync, Stage
from nimble_viz.traces.events import PRINT, HostEvent, Trace, is_launch, is_synchronisation

__all__ = ["blocking_copies", "host_syncs"]

_HOST_READS = ("aten::item", "aten::_local_scalar_dense")
_PRINTING = "print(tensor)"
# What these return depends on values, so the host has to look at them.
_DATA_DEPENDENT = (
    "aten::nonzero", "aten::unique", "aten::_unique", "aten::masked_select", "aten::repeat_interleave",
    "aten::is_nonzero", "aten::equal", "aten::bincount",
)  # fmt: skip


def host_syncs(matched: MatchedTrace) -> tuple[HostSync, ...]:
    """Return host synchronisations by kind and place, the longest first; the place is the call's around or before."""
    program, trace, forest, matches = matched.program, matched.trace, matched.forest, matched.matches
    starts = [forest.events[event].start_ns for _, event in matches]
    phases = sorted(trace.phases, key=lambda one: one[1])
    sums: dict[tuple[str, str, Stage | Literal[""]], list[int]] = defaultdict(list)
    for start, end, kind in _waits(trace, forest):
        before = bisect_right(starts, start) - 1
        place = ""
        if before >= 0:
            call, operator = matches[before]
            place = _place(program, call, within=start < forest.events[operator].end_ns)
        at = bisect_right(phases, start, key=lambda one: one[1]) - 1
        phase: Stage | Literal[""] = phases[at][0] if at >= 0 and start < phases[at][2] else ""
        sums[kind, place, phase].append(end - start)
    rows = [HostSync(kind, len(ns), float(sum(ns)), place, phase) for (kind, place, phase), ns in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind, row.source)))


def _waits(trace: Trace, forest: Forest) -> Iterator[tuple[int, int, str]]:
    """Yield ``(start, end, kind)`` of what made the host wait.

    A host read (``.item()``), an operator whose result has a size that depends on data (``nonzero``), a tensor that is
    printed (it is read value by value), and a copy that the host waits for count once, whatever the runtime does
    inside. A copy is named after itself (``"Memcpy DtoH (Device -> Pageable)"``).
    """
    reads = list(_reads(trace, forest))
    yield from ((start, start + lasted, _PRINTING if kind == PRINT else kind) for start, _, lasted, kind in reads)
    inside = union((start, end) for start, end, _, _ in reads)
    copies, blocking = _copies(trace, forest), blocking_copies(trace)
    waited_in: dict[int, list[HostEvent]] = defaultdict(list)
    for event in _runtime_waits(trace):
        if covers(inside, event.start_ns):
            continue
        copy = bisect_right(copies, event.start_ns, key=lambda one: one[0]) - 1
        if copy >= 0 and event.start_ns < copies[copy][1]:
            waited_in[copy].append(event)
        else:
            yield event.start_ns, event.end_ns, blocking.get(event.correlation, event.name)
    for copy, own in waited_in.items():
        yield own[0].start_ns, own[0].start_ns + sum(one.end_ns - one.start_ns for one in own), copies[copy][2]


def _reads(trace: Trace, forest: Forest) -> Iterator[tuple[int, int, int, str]]:
    """Yield ``(start, end, waited, kind)`` of operators in which the host waited: not where the value was there.

    On the host these are reads of values, which would wait on a GPU; not the optimizer's, which read host counters.
    """
    names: tuple[str, ...] = _HOST_READS
    if trace.device == "cpu":
        waited = sorted((start, end) for start, end, _ in _outermost(forest, names))
        counters = sorted((start, end) for name, start, end in trace.phases if name == "optimizer")
    else:
        names, counters = (*names, *_DATA_DEPENDENT), []
        waited = [(event.start_ns, event.end_ns) for event in _runtime_waits(trace)]
    for start, end, kind in _outermost(forest, (PRINT, *names)):
        inside = waited[bisect_left(waited, (start, 0)) : bisect_left(waited, (end, 0))]
        lasted = [until - since for since, until in inside]
        if lasted and not covers(counters, start):  # all of a read is a wait; of printing, the rest makes text
            yield start, end, sum(lasted) if kind == PRINT else end - start, kind


def _runtime_waits(trace: Trace) -> list[HostEvent]:
    """Return calls of the runtime in which the host waits, sorted."""
    blocking = blocking_copies(trace)
    waits = (event for event in trace.runtime if is_synchronisation(event.name) or event.correlation in blocking)
    return sorted(waits, key=lambda event: event.start_ns)


def _outermost(forest: Forest, names: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield ``(start, end, name)`` of the outermost operators whose name begins so."""
    until = -1
    for at, event in enumerate(forest.events):
        if at >= until and event.name.startswith(names):
            until = forest.ends[at]
            yield event.start_ns, event.end_ns, event.name


def blocking_copies(trace: Trace) -> dict[int, str]:
    """Return correlation and kind of copies to host memory that is not pinned, which wait by themselves."""
    return {
        kernel.correlation: kernel.name
        for kernel in trace.kernels
        if kernel.kind == "memcpy" and kernel.correlation and "DtoH" in kernel.name and "Pageable" in kernel.name
    }


def _copies(trace: Trace, forest: Forest) -> list[tuple[int, int, str]]:
    """Return ``(start, end, kind)`` of operators that copy between host and device, sorted, not nested."""
    issued = sorted(
        (event.start_ns, event.correlation) for event in trace.runtime if event.correlation and is_launch(event.name)
    )
    kind_of = {kernel.correlation: kernel.name for kernel in trace.kernels if kernel.kind == "memcpy"}
    found: list[tuple[int, int, str]] = []
    for event in forest.events:
        if event.name == "aten::copy_":
            inside = issued[bisect_left(issued, (event.start_ns, 0)) : bisect_left(issued, (event.end_ns, 0))]
            kinds = (kind_of.get(correlation, "") for _, correlation in inside)
            kind = next((kind for kind in kinds if "HtoD" in kind or "DtoH" in kind), "")
            if kind:
                found.append((event.start_ns, event.end_ns, kind))
    return sorted(found)


def _place(program: Program, call: int, within: bool) -> str:
    """Return the line of ``call``, or ``"after FILE:LINE"``, the last known of its phase up to it; empty if none."""
    calls, place = program.calls, source_of(program.calls[call])
    if within and place:
        return place
    before = takewhile(lambda one: one.phase == calls[call].phase, reversed(calls[: call + 1]))
    return next((f"after {place}" for place in map(source_of, before) if place), "")
