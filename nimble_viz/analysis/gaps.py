"""Where a replay's streams stood still: which call waited for which, how long, and why."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.intervals import covered, union
from nimble_viz.analysis.labels import label_call, share_rows
from nimble_viz.analysis.limit import chain_that_ran, ends
from nimble_viz.report.data import ReportData

__all__ = ["CAUSES", "PARTS", "Gap", "gaps", "longest_gaps", "lost", "replay_gaps", "stream_times"]

CAUSES = (
    ("launch", "launch gap", "nothing was left to wait for, and the call had not begun"),
    ("wait", "wait on another stream", "while other calls were ready, but queued behind calls of their streams"),
    ("unready", "nothing ready", "every call left needed the result of one that was running"),
)
"""Why a stream stood still before a call: key, name, meaning."""

PARTS = (
    ("busy", "busy", "a kernel of the stream was running"),
    *CAUSES,
    ("begun", "not begun", "before the stream's first call, which had to wait for none"),
    ("ended", "nothing left", "the stream's last call had ended"),
)
"""What the time of a stream is made of: key, name, meaning."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stream stood still before a kernel; nanoseconds. The causes add up to ``end_ns - start_ns``.

    Args:
        lane: the stream.
        call: whose kernel began late; None for one of no call.
        awaited: the call that ended last of those that ``call`` had to wait for; ``call`` itself between two of its
            kernels; None where ``call`` is.
        start_ns: when the stream fell idle, the start of the replay before its first call.
        end_ns: when the kernel began.
        launch_ns: after all had ended that it had to wait for.
        wait_ns: before that, while some call was ready that had to queue on its stream.
        unready_ns: before that, while none was.
    """

    lane: int
    call: int | None
    awaited: int | None
    start_ns: float
    end_ns: float
    launch_ns: float
    wait_ns: float
    unready_ns: float


_Interval = tuple[float, float]


def gaps(graph: CallGraph, plan: Schedule, line: Timeline) -> list[Gap]:
    """List every gap in which a stream idled before one of its kernels, in order of their ends.

    Before a stream's first call is a gap only if that had to wait for a call. One that was not seen running (it
    launched nothing) ended when all that it waits for had. O(edges + n log n) for n spans.
    """
    if not line.spans:
        return []
    zero = min(span.start_ns for span in line.spans)
    ready, held = _moments(graph, plan, line, zero)
    seen = {span.call for span in line.spans if span.call is not None}
    queued = union((ready[call][0], held[call][0]) for call in seen)
    starts = [start for start, _ in queued]
    reached: dict[int, float] = {}
    begun: set[int] = set()
    found = []
    for span in line.spans:
        first, since = span.lane not in reached, reached.get(span.lane, zero)
        reached[span.lane] = max(since, span.end_ns)
        until, awaited = since, span.call
        if span.call is not None and span.call not in begun:
            begun.add(span.call)
            until, awaited = held[span.call]
        if span.start_ns <= since or (first and awaited is None):
            continue
        until = min(max(until, since), span.start_ns)
        wait_ns = _overlap(queued, starts, since, until)
        unready_ns = until - since - wait_ns
        found.append(
            Gap(span.lane, span.call, awaited, since, span.start_ns, span.start_ns - until, wait_ns, unready_ns)
        )
    return found


def replay_gaps(report: ReportData, line: Timeline) -> list[Gap]:
    """Return ``gaps`` of a timeline; none of an eager run, or where kernels are missing."""
    plan = report.schedule(line.run)
    return gaps(report.graph, plan, line) if plan is not None and line.reliable else []


def stream_times(found: Sequence[Gap], line: Timeline) -> list[dict[str, float]]:
    """Sum what each lane's time was spent on (``PARTS``, ns, together the length of the replay), given ``gaps``."""
    length, zero = line.length_ns, min((span.start_ns for span in line.spans), default=0.0)
    made = []
    for lane in range(len(line.lanes)):
        spans = [(span.start_ns, span.end_ns) for span in line.spans if span.lane == lane]
        first, last = min(spans, default=(zero, zero))[0], max((end for _, end in spans), default=zero)
        own = [gap for gap in found if gap.lane == lane]
        spent = {cause: sum(getattr(gap, f"{cause}_ns") for gap in own) for cause, _, _ in CAUSES}
        waited = any(gap.start_ns == zero and gap.end_ns == first for gap in own)
        begun = 0.0 if waited else first - zero
        made.append({"busy": covered(spans), **spent, "begun": begun, "ended": zero + length - last})
    return made


def lost(times: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Say what the time of all streams together was spent on (``share_rows``)."""
    return share_rows((name, sum(one[key] for one in times), meaning) for key, name, meaning in PARTS)


def longest_gaps(report: ReportData, line: Timeline, found: Sequence[Gap], most: int) -> list[dict[str, Any]]:
    """List the gaps that delayed the replay most, as text: who waited for whom, how long, and why.

    Those before (and inside) calls of the chain that ran longest: a call off it may begin later and nothing is lost.
    ``delay`` is what a faster launch or another order could save: since the call's data was ready, or since its kernel
    before. What its stream idled before that is no delay.
    """
    plan = report.schedule(line.run)
    if plan is None or not found:
        return []
    calls, zero = report.program.calls, min(span.start_ns for span in line.spans)
    chain = set(chain_that_ran(report.graph, plan, line))
    ready, _ = _moments(report.graph, plan, line, zero)
    delays = [
        (
            gap.end_ns - (gap.start_ns if gap.awaited == gap.call else max(gap.start_ns, ready[gap.call][0])),
            gap.call,
            gap,
        )
        for gap in found
        if gap.call is not None and gap.call in chain
    ]
    rows = []
    for delay, call, gap in sorted(delays, key=lambda one: (-one[0], one[2].end_ns, one[1]))[:most]:
        if delay <= 0:
            break
        rows.append(
            {
                "call": call,
                "awaited": gap.awaited,
                "label": label_call(calls[call]),
                "lane": line.lanes[gap.lane].name,
                "after": _after(report, line, gap),
                "ns": gap.end_ns - gap.start_ns,
                "text": format_ns(gap.end_ns - gap.start_ns),
                "delay": format_ns(delay),
                "delay_ns": delay,
                "why": _why(gap),
            }
        )
    return rows


def _after(report: ReportData, line: Timeline, gap: Gap) -> str:
    if gap.awaited is None:
        return "nothing"
    if gap.awaited == gap.call:
        return "its own kernel before"
    lane = next((line.lanes[span.lane].name for span in line.spans if span.call == gap.awaited), "")
    return f"{gap.awaited} {label_call(report.program.calls[gap.awaited])} on {lane}"


def _why(gap: Gap) -> str:
    parts = [(getattr(gap, f"{key}_ns"), name) for key, name, _ in CAUSES]
    told = sorted((part for part in parts if part[0] > 0), reverse=True)
    if len(told) == 1:
        return told[0][1]
    return ", ".join(f"{name} {format_ns(ns)}" for ns, name in told)


_Moment = tuple[float, int | None]
"""When, and the call whose end that was."""


def _moments(graph: CallGraph, plan: Schedule, line: Timeline, zero: float) -> tuple[list[_Moment], list[_Moment]]:
    """Return for each call when its data was ready, and when everything it waits for had ended."""
    end = ends(line)
    before = predecessors(graph, meg=True)
    ordered: list[list[int]] = [[] for _ in before]
    for producer, consumer in (*plan.syncs, *stream_neighbours(plan.stream, plan.order)):
        ordered[consumer].append(producer)
    ready: list[_Moment] = [(zero, None)] * graph.size
    held, done = list(ready), list(ready)
    for call in plan.order:
        ready[call] = _latest([done[one] for one in before[call]], zero)
        held[call] = _latest([ready[call], *(done[one] for one in ordered[call])], zero)
        done[call] = (end[call], call) if call in end else held[call]
    return ready, held


def _latest(moments: Sequence[_Moment], zero: float) -> _Moment:
    return max(moments, key=lambda one: one[0], default=(zero, None))


def _overlap(merged: Sequence[_Interval], starts: Sequence[float], since: float, until: float) -> float:
    """Measure how much of ``since`` to ``until`` the intervals cover."""
    at, covered = max(bisect_right(starts, since) - 1, 0), 0.0
    while at < len(merged) and merged[at][0] < until:
        covered += max(0.0, min(merged[at][1], until) - max(merged[at][0], since))
        at += 1
    return covered
