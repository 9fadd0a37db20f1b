"""A Report's timelines as Chrome trace events: the tracks, slices and flows that trace viewers draw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nimble_core.ir.program import Call
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import context, label_call, label_run, source_of, visible
from nimble_viz.analysis.phases import PHASES, span_phases
from nimble_viz.analysis.timeline import distorted
from nimble_viz.report.data import ReportData

__all__ = ["chrome_json", "trace_events"]

Event = dict[str, Any]


def chrome_json(report: ReportData) -> str:
    """Return ``trace_events`` as one JSON object, which chrome://tracing and ui.perfetto.dev open; ASCII, no NaN.

    Source: "Trace Event Format", the Chromium project.
    """
    where = report.environment
    stamp = (("model", report.model), ("context", context(report)), ("torch", where.torch), ("date", where.date))
    other = {name: visible(value) for name, value in stamp}
    told = {"traceEvents": trace_events(report), "displayTimeUnit": "ns", "otherData": other}
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def trace_events(report: ReportData) -> list[Event]:
    """Return metadata of processes and tracks, slices by track, then flows; none without timelines.

    A process (``pid``, from 1) is one run, eager first, with a time axis that starts at 0; a track (``tid``, from 1) is
    one of its rows. Each span of a timeline is one slice. Spans that overlap on a lane are nested where the lane is a
    host thread (they are a call stack there) and put on a further row where it is a device stream or a worker. Times
    keep the origin of their timeline; one with times before 0 is shifted as a whole. Flows are the waits of the run's
    schedule, from the producer's last slice to the consumer's first, and in eager runs launches; they start and end
    with the start of the slices that they join. A flow whose target does not start after its source (clocks that
    disagree) is left out, because viewers bind arrows in the order of time.

    ``ts`` and ``dur`` are microseconds, of which every reader gets the whole nanoseconds back.

    Complexity: O(n (log n + r)) for n spans on at most r rows per lane.
    """
    processes: list[Event] = []
    tracks: list[Event] = []
    slices: list[Event] = []
    flows: list[Event] = []
    for index, line in enumerate(sorted(report.timelines, key=lambda line: line.run != "eager")):
        for name, value in (
            ("process_name", {"name": visible(label_run(report, line.run))}),
            ("process_labels", {"labels": ", ".join(_run_labels(report, line))}),
            ("process_sort_index", {"sort_index": index}),
        ):
            processes.append({"ph": "M", "name": name, "pid": index + 1, "args": value})
        _add_run(report, line, index + 1, tracks, slices, flows)
    return [*processes, *tracks, *slices, *flows]


def _add_run(
    report: ReportData, line: Timeline, process: int, tracks: list[Event], slices: list[Event], flows: list[Event]
) -> None:
    """Append the tracks, slices and flows of one timeline."""
    shift = -min(0.0, min((span.start_ns for span in line.spans), default=0.0))
    times = [(round(span.start_ns + shift), round(span.end_ns + shift)) for span in line.spans]
    taken: set[str] = set()

    def add_track(name: str, members: Iterable[tuple[str, str, tuple[int, int], Event]]) -> None:
        """Add a track with slices: name, category (a phase, ``"host"`` or ``"run"``), start and end, arguments."""
        number, name = len(tracks) // 2, visible(name)
        name = name if name not in taken else f"{name} [{number}]"
        taken.add(name)
        place = {"pid": process, "tid": number + 1}
        tracks.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        tracks.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
        for said, category, (start, end), arguments in members:
            lasts = {"ts": _microseconds(start), "dur": _microseconds(end - start)}
            slices.append({"ph": "X", "name": visible(said), "cat": category, **place, **lasts, "args": arguments})

    add_track("run", [(line.run, "run", (0, max((end for _, end in times), default=0)), {})])
    for row, stretches in enumerate(_rows(_phase_stretches(report, line, shift), nested=False)):
        marks = [(PHASES[at], PHASES[at], (start, end), Event()) for start, end, at in stretches]
        add_track(f"phases ({row + 1})" if row else "phases", marks)

    calls = report.eager_calls if line.run == "eager" else report.program.calls
    known, phase_of = [_call_arguments(call) for call in calls], span_phases(report, line)
    by_lane: list[list[tuple[int, int, int]]] = [[] for _ in line.lanes]
    for index, (span, (start, end)) in enumerate(zip(line.spans, times, strict=True)):
        by_lane[span.lane].append((start, end, index))
    slice_of = [-1] * len(line.spans)
    for number, lane in enumerate(line.lanes):
        for row, spans in enumerate(_rows(by_lane[number], nested=lane.kind == "host") or [[]]):
            made = []
            for at, (_, _, index) in enumerate(spans, len(slices)):
                span, slice_of[index] = line.spans[index], at
                phase = calls[span.call].phase if span.call is not None else "host"
                category = PHASES[phase_of[index]] if phase_of[index] >= 0 else phase
                stream = {"device_stream": line.streams[index]} if line.streams else {}
                arguments = known[span.call] | stream if span.call is not None else stream
                made.append((span.name, category, times[index], arguments))
            add_track(f"{lane.name} ({row + 1})" if row else lane.name, made)
    for number, (kind, source, target) in enumerate(_flows(report, line, times), len(flows) // 2 + 1):
        for side, index in (("s", source), ("f", target)):
            one = slices[slice_of[index]]
            event = {"ph": side, "id": number, "name": kind, "cat": kind, "pid": process, "tid": one["tid"]}
            flows.append(event | {"ts": one["ts"]} | ({"bp": "e"} if side == "f" else {}))


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


def _flows(report: ReportData, line: Timeline, times: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield ``"wait"`` or ``"launch"``, and the spans that it joins."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    host: dict[int, int] = {}
    launched: list[tuple[int, int]] = []
    for index, span in enumerate(line.spans):
        if span.call is None:
            continue
        if line.lanes[span.lane].kind == "host":
            host.setdefault(span.call, index)
            continue
        first.setdefault(span.call, index)
        if span.call not in last or times[index][1] >= times[last[span.call]][1]:
            last[span.call] = index
        launched.append((span.call, index))
    plan = report.schedule(line.run)
    found = [("wait", last[u], first[v]) for u, v in plan.syncs if u in last and v in first] if plan else []
    if line.run == "eager":
        found += [("launch", host[call], at) for call, at in launched if call in host]
    yield from (one for one in found if times[one[1]][0] < times[one[2]][0])


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


def _call_arguments(call: Call) -> Event:
    found: Event = {"call": call.index, "label": visible(label_call(call)), "operator": visible(call.operator)}
    if call.module:
        found["module"] = visible(call.module)
    if source_of(call):
        found["source"] = visible(source_of(call))
    found |= {
        "phase": call.phase,
        "bytes_read": sum(ref.nbytes for ref in call.reads),
        "bytes_written": sum(ref.nbytes for ref in call.writes),
    }
    return found | {"eager_calls": call.eager} if call.eager else found


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
