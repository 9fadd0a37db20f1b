"""Draw a profiled eager iteration as a timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.collect.matched_trace import Forest, MatchedTrace
from nimble_viz.report.data import OverheadProfile
from nimble_viz.traces.events import DeviceEvent, OperatorEvent

__all__ = ["eager_timeline"]


def eager_timeline(matched: MatchedTrace, overhead: OverheadProfile) -> Timeline:
    """Draw the profiled iteration: one lane per host thread that issued operators, one per GPU stream.

    A host lane shows the operators that are calls, and the outermost operators that hold no call. What is inside either
    is left out, so spans of a lane do not overlap. Waiting for the data loader is a span too. Times count from the
    start of the iteration.
    """
    trace = matched.trace
    threads = sorted({event.thread for event in trace.operators})
    streams = sorted({kernel.stream for kernel in trace.kernels})
    hosts = [Lane(f"host thread {i}" if i else "host", "host") for i in range(len(threads))]
    lanes = (*hosts, *(Lane(f"GPU stream {stream}", "gpu") for stream in streams))
    lane_of_thread = {thread: i for i, thread in enumerate(threads)}
    lane_of_stream = {stream: len(threads) + i for i, stream in enumerate(streams)}
    spans = [
        _span(lane_of_thread[event.thread], event, trace.start_ns, call)
        for event, call in _shown(matched.forest, {event: call for call, event in matched.matches})
    ]
    spans += [
        Span(0, float(start - trace.start_ns), float(end - trace.start_ns), None, "data loader")
        for name, start, end in trace.phases
        if name == "loader" and hosts
    ]
    spans += [
        _span(lane_of_stream[kernel.stream], kernel, trace.start_ns, call)
        for kernel, call in zip(trace.kernels, matched.owners, strict=True)
    ]
    return Timeline(
        run="eager",
        source="measured",
        clock="torch.profiler",
        lanes=lanes,
        spans=tuple(sorted(spans, key=lambda span: (span.start_ns, span.lane, span.end_ns))),
        profiled_ns=overhead.profiled_ns,
        unprofiled_ns=overhead.unprofiled_ns,
        reliable=not trace.warnings,
        note="; ".join(overhead.warnings),
    )


def _shown(forest: Forest, call_of: dict[int, int]) -> Iterator[tuple[OperatorEvent, int | None]]:
    """Yield matched operators, and the outermost others that hold no matched one."""
    holds = [False] * len(forest.events)
    for event in call_of:
        while event >= 0 and not holds[event]:
            holds[event] = True
            event = forest.parents[event]
    at = 0
    while at < len(forest.events):
        if at in call_of or not holds[at]:
            yield forest.events[at], call_of.get(at)
            at = forest.ends[at]
        else:
            at += 1


def _span(lane: int, event: OperatorEvent | DeviceEvent, origin_ns: int, call: int | None) -> Span:
    # The device's clock is mapped to the host's with an error of microseconds: a kernel may seem to start too early.
    start_ns = max(0, event.start_ns - origin_ns)
    return Span(lane, float(start_ns), float(max(start_ns, event.end_ns - origin_ns)), call, event.name)
