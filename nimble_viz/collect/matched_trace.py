"""Find the calls of a Program among the operators of one profiled iteration, and draw them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nimble_core.algorithms.alignment import align
from nimble_core.ir.program import Program
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.report.data import OverheadProfile
from nimble_viz.traces.events import DeviceEvent, HostEvent, Trace, outer_first

__all__ = ["Forest", "MatchedTrace", "eager_timeline", "match_positions"]


@dataclass(frozen=True, slots=True)
class Forest:
    """Operators nested by thread, in preorder; trees are sorted by their start.

    ``ends[i]`` is one past the last operator inside ``i``, ``parents[i]`` the operator directly around it, -1 if none.
    """

    events: tuple[HostEvent, ...]
    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def of(operators: Sequence[HostEvent]) -> Forest:
        """Nest these operators; any order."""
        trees: list[list[HostEvent]] = []
        open_until: dict[int, int] = {}
        tree_of: dict[int, list[HostEvent]] = {}
        for event in outer_first(operators):
            if event.start_ns >= open_until.get(event.thread, event.start_ns):
                trees.append([])
                tree_of[event.thread] = trees[-1]
                open_until[event.thread] = event.end_ns
            tree_of[event.thread].append(event)
        events: list[HostEvent] = []
        ends, parents = [0] * len(operators), [-1] * len(operators)
        for tree in trees:
            around: list[int] = []
            for event in tree:
                while around and events[around[-1]].end_ns <= event.start_ns:
                    ends[around.pop()] = len(events)
                if around:
                    parents[len(events)] = around[-1]
                around.append(len(events))
                events.append(event)
            for unfinished in around:
                ends[unfinished] = len(events)
        return Forest(tuple(events), tuple(ends), tuple(parents))


@dataclass(frozen=True, slots=True)
class MatchedTrace:
    """An iteration, and its operators that are calls: ``matches`` are ``(call, place in the forest)``, increasing.

    ``cuts`` end each one's host time: with the outermost operator around it that holds no later call.
    """

    program: Program
    trace: Trace
    forest: Forest
    matches: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]

    @staticmethod
    def of(program: Program, trace: Trace, matches: Sequence[tuple[int, int]] | None = None) -> MatchedTrace:
        """Match them; ``matches`` are given where they are known."""
        forest = Forest.of(trace.operators)
        known = match_positions(program, forest) if matches is None else tuple(matches)
        return MatchedTrace(program, trace, forest, known, _cuts(trace, forest, known))

    @property
    def found(self) -> frozenset[int]:
        """Calls that were matched."""
        return frozenset(call for call, _ in self.matches)

    @property
    def owners(self) -> tuple[int | None, ...]:
        """The call of each device event, in whose host time it was launched; None if its launch is unknown."""
        launched_at = {event.correlation: event.start_ns for event in self.trace.runtime}
        operator_at = {event.correlation: event.start_ns for event in self.forest.events if event.correlation}
        owners: list[int | None] = []
        for kernel in self.trace.kernels:
            at = launched_at.get(kernel.correlation, operator_at.get(kernel.linked))
            position = len(self.cuts) if at is None else bisect_right(self.cuts, at)
            owners.append(self.matches[position][0] if position < len(self.cuts) else None)
        return tuple(owners)


def match_positions(program: Program, forest: Forest) -> tuple[tuple[int, int], ...]:
    """Find each call among the operators: ``(call, position in the forest)``, both increasing.

    A Program is recorded below autograd: of ``aten::linear`` it knows only the ``aten::addmm`` inside, and nothing of
    what ``aten::addmm`` does inside. So the candidates are the outermost operators that carry the name of any call, and
    the pairs are a longest common subsequence of names, or nearly (see ``align``).
    """
    # Autograd accumulates gradients in place where no mode observes it.
    in_place = any(call.phase == "backward" for call in program.calls)

    def name_of(event: str) -> str:
        return event.rstrip("_") if in_place else event

    keys = [name_of(_event_name(call.operator)) for call in program.calls]
    wanted = set(keys)
    candidates = []
    at = 0
    while at < len(forest.events):
        if name_of(forest.events[at].name) in wanted:
            candidates.append(at)
            at = forest.ends[at]
        else:
            at += 1
    names = [name_of(forest.events[event].name) for event in candidates]
    return tuple((call, candidates[j]) for call, j in align(keys, names))


def _event_name(operator: str) -> str:
    """Return the profiler's name of an operator: ``"aten::add_"`` for ``"aten.add_.Tensor"``."""
    parts = operator.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else operator


def _cuts(trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    cuts = []
    reached = trace.start_ns
    for position, (_, event) in enumerate(matches):
        following = matches[position + 1][1] if position + 1 < len(matches) else len(forest.events)
        while (around := forest.parents[event]) >= 0 and forest.ends[around] <= following:
            event = around
        reached = min(max(reached, forest.events[event].end_ns), trace.run_end_ns)
        cuts.append(reached)
    return tuple(cuts)


def eager_timeline(matched: MatchedTrace, overhead: OverheadProfile) -> Timeline:
    """Draw the profiled iteration: one lane per host thread that issued operators, one per GPU stream.

    A host lane shows the operators that are calls, and the outermost operators that hold no call, so its spans do not
    overlap. Times count from the start of the iteration.
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


def _shown(forest: Forest, call_of: dict[int, int]) -> Iterator[tuple[HostEvent, int | None]]:
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


def _span(lane: int, event: HostEvent | DeviceEvent, origin_ns: int, call: int | None) -> Span:
    # The device's clock is mapped to the host's with an error of microseconds: a kernel may seem to start too early.
    start_ns = max(0, event.start_ns - origin_ns)
    return Span(lane, float(start_ns), float(max(start_ns, event.end_ns - origin_ns)), call, event.name)
