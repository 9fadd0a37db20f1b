"""A Report's timelines as the tracks, slices and flows that trace viewers draw, as Chrome trace events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nimble_core.ir.program import Call
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import context, label_call, label_run, source_of, visible
from nimble_viz.analysis.phases import PHASES, span_phases
from nimble_viz.analysis.timeline import distorted
from nimble_viz.report.data import ReportData

__all__ = ["Argument", "Flow", "Process", "Slice", "Trace", "Track", "chrome_json", "make_trace"]

Value = str | int | float | bool | tuple[int, ...]
Argument = tuple[str, Value]


@dataclass(frozen=True, slots=True)
class Process:
    """One run: a group of tracks with a time axis that starts at 0; ``labels``: how it was measured."""

    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Track:
    """One row of a process; two slices on it are apart or one holds the other. ``whole``: that of the whole run."""

    process: int
    name: str
    lane: int | None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time, in whole ns since the run began; ``category``: phase, ``"host"`` or ``"run"``."""

    track: int
    start_ns: int
    end_ns: int
    name: str
    category: str
    arguments: tuple[Argument, ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """A wait between streams, or a launch from host to device: slices of one process, the target starts later."""

    source: int
    target: int
    kind: Literal["wait", "launch"]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace viewer shows; processes are eager first, slices by track, then by start, outer before inner."""

    title: str
    processes: tuple[Process, ...]
    tracks: tuple[Track, ...]
    slices: tuple[Slice, ...]
    flows: tuple[Flow, ...]
    arguments: tuple[Argument, ...] = ()


def make_trace(report: ReportData) -> Trace:
    """Make a Trace of the report's timelines; without timelines it has no processes.

    Each span of a timeline is one slice. Spans that overlap on a lane are nested where the lane is a host thread (they
    are a call stack there) and put on a further row where it is a device stream or a worker. Times keep the origin of
    their timeline; one with times before 0 is shifted as a whole. Flows are the waits of the run's schedule, from the
    producer's last slice to the consumer's first, and in eager runs launches; a flow whose target does not start after
    its source (clocks that disagree) is left out, because viewers bind arrows in the order of time.

    Complexity: O(n (log n + r)) for n spans on at most r rows per lane.
    """
    processes: list[Process] = []
    tracks: list[Track] = []
    slices: list[Slice] = []
    flows: list[Flow] = []
    for line in sorted(report.timelines, key=lambda line: line.run != "eager"):
        _add_run(report, line, len(processes), tracks, slices, flows)
        processes.append(Process(visible(label_run(report, line.run)), tuple(_run_labels(report, line))))
    where = report.environment
    stamp = (("model", report.model), ("context", context(report)), ("torch", where.torch), ("date", where.date))
    return Trace(
        title=visible(f"{report.model}: {context(report)}"),
        processes=tuple(processes),
        tracks=tuple(tracks),
        slices=tuple(slices),
        flows=tuple(flows),
        arguments=tuple((name, visible(value)) for name, value in stamp),
    )


def _add_run(
    report: ReportData, line: Timeline, process: int, tracks: list[Track], slices: list[Slice], flows: list[Flow]
) -> None:
    """Append the tracks, slices and flows of one timeline."""
    shift = -min(0.0, min((span.start_ns for span in line.spans), default=0.0))
    times = [(round(span.start_ns + shift), round(span.end_ns + shift)) for span in line.spans]

    def add_track(name: str, lane: int | None, members: Iterable[Slice]) -> None:
        taken = {track.name for track in tracks if track.process == process}
        name = visible(name)
        tracks.append(Track(process, name if name not in taken else f"{name} [{len(tracks)}]", lane, not taken))
        slices.extend(members)

    whole = Slice(len(tracks), 0, max((end for _, end in times), default=0), visible(line.run), "run")
    add_track("run", None, [whole])
    for row, stretches in enumerate(_rows(_phase_stretches(report, line, shift), nested=False)):
        marks = [Slice(len(tracks), start, end, PHASES[at], PHASES[at]) for start, end, at in stretches]
        add_track(f"phases ({row + 1})" if row else "phases", None, marks)

    calls = report.eager_calls if line.run == "eager" else report.program.calls
    arguments = [_call_arguments(call) for call in calls]
    phase_of = span_phases(report, line)
    by_lane: list[list[tuple[int, int, int]]] = [[] for _ in line.lanes]
    for index, (span, (start, end)) in enumerate(zip(line.spans, times, strict=True)):
        by_lane[span.lane].append((start, end, index))
    slice_of = [-1] * len(line.spans)
    for number, lane in enumerate(line.lanes):
        for row, members in enumerate(_rows(by_lane[number], nested=lane.kind == "host") or [[]]):
            made: list[Slice] = []
            for start, end, index in members:
                span = line.spans[index]
                phase = calls[span.call].phase if span.call is not None else "host"
                category = PHASES[phase_of[index]] if phase_of[index] >= 0 else phase
                known = arguments[span.call] if span.call is not None else ()
                slice_of[index] = len(slices) + len(made)
                if line.streams:
                    known = (*known, ("device_stream", line.streams[index]))
                made.append(Slice(len(tracks), start, end, visible(span.name), category, known))
            add_track(f"{lane.name} ({row + 1})" if row else lane.name, number, made)
    flows.extend(_flows(report, line, slices, slice_of))


def _rows(members: Sequence[tuple[int, int, int]], *, nested: bool) -> list[list[tuple[int, int, int]]]:
    """Split ``(start, end, index)`` over rows, so that on each they are apart (or ``nested``).

    Each goes to the first row where it fits; rows are sorted by start, outer before inner.

    >>> _rows([(0, 9, 0), (2, 5, 1), (4, 12, 2)], nested=True)
    [[(0, 9, 0), (2, 5, 1)], [(4, 12, 2)]]
    >>> _rows([(0, 9, 0), (2, 5, 1), (5, 12, 2)], nested=False)
    [[(0, 9, 0)], [(2, 5, 1), (5, 12, 2)]]
    """
    rows: list[list[tuple[int, int, int]]] = []
    around: list[list[int]] = []
    for member in sorted(members, key=lambda one: (one[0], -one[1], one[2])):
        start, end, _ = member
        for row, ends in zip(rows, around, strict=True):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nested and end <= ends[-1]):
                row.append(member)
                ends.append(end)
                break
        else:
            rows.append([member])
            around.append([end])
    return rows


def _flows(report: ReportData, line: Timeline, slices: Sequence[Slice], slice_of: Sequence[int]) -> Iterator[Flow]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    launched: list[tuple[int, int]] = []
    host: dict[int, int] = {}
    for index, span in enumerate(line.spans):
        if span.call is None:
            continue
        if line.lanes[span.lane].kind == "host":
            host.setdefault(span.call, slice_of[index])
            continue
        at = slice_of[index]
        first.setdefault(span.call, at)
        if span.call not in last or slices[at].end_ns >= slices[last[span.call]].end_ns:
            last[span.call] = at
        launched.append((span.call, at))
    plan = report.schedule(line.run)
    waits = [(last[u], first[v]) for u, v in plan.syncs if u in last and v in first] if plan else []
    launches = [(host[call], at) for call, at in launched if call in host] if line.run == "eager" else []
    kinds: tuple[tuple[Literal["wait", "launch"], list[tuple[int, int]]], ...] = (("wait", waits), ("launch", launches))
    for kind, pairs in kinds:
        for source, target in pairs:
            if slices[source].start_ns < slices[target].start_ns:
                yield Flow(source, target, kind)


def _phase_stretches(report: ReportData, line: Timeline, shift: float) -> list[tuple[int, int, int]]:
    """Return ``(start, end, index into PHASES)`` of a profiled eager step."""
    if line.run != "eager" or report.overhead is None:
        return []
    return [
        (max(0, round(start + shift)), max(0, round(end + shift)), PHASES.index(one.phase))
        for one in report.overhead.phases
        for start, end in one.spans
    ]


def _run_labels(report: ReportData, line: Timeline) -> Iterator[str]:
    yield visible(f"{line.source}, {line.clock}")
    if line.profiled_ns:
        yield f"profiled {format_ns(line.profiled_ns)}"
    if line.unprofiled_ns:
        yield f"unprofiled {format_ns(line.unprofiled_ns)}"
    if distorted(report, line):
        yield "DISTORTED by the profiler"
    if not line.reliable:
        yield "UNRELIABLE"
    if line.note:
        yield visible(line.note)


def _call_arguments(call: Call) -> tuple[Argument, ...]:
    found: list[Argument] = [("call", call.index), ("label", visible(label_call(call)))]
    found.append(("operator", visible(call.operator)))
    if call.module:
        found.append(("module", visible(call.module)))
    if source_of(call):
        found.append(("source", visible(source_of(call))))
    found.append(("phase", call.phase))
    found.append(("bytes_read", sum(ref.nbytes for ref in call.reads)))
    found.append(("bytes_written", sum(ref.nbytes for ref in call.writes)))
    if call.eager:
        found.append(("eager_calls", call.eager))
    return tuple(found)


# Chrome trace-event JSON.


def chrome_json(trace: Trace) -> str:
    """Return the trace as one JSON object, which chrome://tracing and ui.perfetto.dev open; ASCII, no NaN.

    Source: "Trace Event Format", the Chromium project.
    """
    told = {"traceEvents": list(_chrome_events(trace)), "displayTimeUnit": "ns", "otherData": dict(trace.arguments)}
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield metadata, slices by track, then flows.

    ``pid`` is the process and ``tid`` the track, both from 1.

    ``ts`` and ``dur`` are microseconds, of which every reader gets the whole nanoseconds back. A flow starts and ends
    with the start of the slices that it joins.
    """
    for index, process in enumerate(trace.processes):
        for name, value in (
            ("process_name", {"name": process.name}),
            ("process_labels", {"labels": ", ".join(process.labels)}),
            ("process_sort_index", {"sort_index": index}),
        ):
            yield {"ph": "M", "name": name, "pid": index + 1, "args": value}
    for index, track in enumerate(trace.tracks):
        place = {"pid": track.process + 1, "tid": index + 1}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": index}}
    for one in trace.slices:
        yield {
            "ph": "X",
            "name": one.name,
            "cat": one.category,
            **_place(trace, one.track),
            "ts": _microseconds(one.start_ns),
            "dur": _microseconds(one.end_ns - one.start_ns),
            "args": dict(one.arguments),
        }
    for index, flow in enumerate(trace.flows):
        for phase, at in (("s", flow.source), ("f", flow.target)):
            one = trace.slices[at]
            event = {"ph": phase, "id": index + 1, "name": flow.kind, "cat": flow.kind, **_place(trace, one.track)}
            yield event | {"ts": _microseconds(one.start_ns)} | ({"bp": "e"} if phase == "f" else {})


def _place(trace: Trace, track: int) -> dict[str, int]:
    return {"pid": trace.tracks[track].process + 1, "tid": track + 1}


def _microseconds(ns: int) -> int | float:
    """Return microseconds that give ``ns`` again when multiplied by 1000 and truncated.

    >>> _microseconds(12_000), _microseconds(1_500)
    (12, 1.5)
    """
    whole, rest = divmod(ns, 1000)
    if not rest:
        return whole
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)
