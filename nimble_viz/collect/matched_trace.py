"""Find the calls of a Program among the operators of one profiled iteration. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from nimble_core.algorithms.alignment import align
from nimble_core.ir.program import Program
from nimble_viz.traces.events import OperatorEvent, Trace, outer_first

__all__ = ["Forest", "MatchedTrace", "match_positions"]


@dataclass(frozen=True, slots=True)
class Forest:
    """Operators nested by thread, in preorder; trees are sorted by their start.

    ``ends[i]`` is one past the last operator inside ``i``, ``parents[i]`` the operator directly around it, -1 if none.
    """

    events: tuple[OperatorEvent, ...]
    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def of(operators: Sequence[OperatorEvent]) -> Forest:
        """Nest these operators; any order."""
        trees: list[list[OperatorEvent]] = []
        open_until: dict[int, int] = {}
        tree_of: dict[int, list[OperatorEvent]] = {}
        for event in outer_first(operators):
            if event.start_ns >= open_until.get(event.thread, event.start_ns):
                trees.append([])
                tree_of[event.thread] = trees[-1]
                open_until[event.thread] = event.end_ns
            tree_of[event.thread].append(event)
        events: list[OperatorEvent] = []
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
    """A profiled iteration, and which of its operators are calls.

    Args:
        program: the calls.
        trace: the iteration.
        forest: its operators, nested.
        matches: ``(call, position in the forest)``, both increasing.
        cuts: end of each matched call's host time: that of the outermost operator around it that holds no later call.
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
