"""Our own policy: list schedules for calls that slow each other down, chosen by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nimble_core.algorithms.critical_path import earliest_times, longest_behind
from nimble_core.algorithms.list_scheduling import run_order
from nimble_core.ir.call_graph import CallGraph, predecessors, successors
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import TIE
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies.base import require_fit
from nimble_core.scheduling.policies.critical_path import critical_path
from nimble_core.scheduling.policies.nimble import nimble
from nimble_core.scheduling.policies.single import single
from nimble_core.scheduling.simulator import H200, DeviceModel, simulate

__all__ = ["STREAMS", "contention"]

STREAMS = 32
"""Streams used at most where no cap says otherwise."""

_CAPS = (4, 3, 2)
_ROUNDS = 2
"""List schedules for each cap. More rounds or other caps won less than 0.01% in simulation, geometric mean of 16 models
measured on an H200."""
_HOPELESS = 1.05
"""A cap whose first list schedule takes this many times as long as the best plan gets no second one."""
_LISTED_CALLS = 100_000
"""Calls in all list schedules of one graph together: bounds them where one takes long."""
_SLACK = 0.02
"""Paths shorter than the longest by no more than this share are urgent too. It won 8% on NASNet-A large and 3% on
Inception-v3 (H200, float16); with 10% nothing is left of that."""


def contention(
    graph: CallGraph, costs: Costs, *, max_streams: int | None = None, device: DeviceModel = H200
) -> Schedule:
    """Plan for a device on which calls that run side by side slow each other down, and waits across streams cost.

    Candidates are the plans of ``single``, ``nimble`` and ``critical_path``, and list schedules for several numbers of
    streams: fewer streams can mean fewer waits and less company. Each list schedule is made again from the durations
    that its calls had when simulated on ``device``: what others slow down has become longer, hence more urgent. The
    candidate that simulates fastest wins. Of those within 1% of it, which simulation cannot tell apart, one stream is
    taken, or else the one that adds least order. So on ``device`` the plan never simulates more than 2% slower than
    those of the three policies under the same cap. Calls are issued as they start in simulation, in runs between
    waits; those on the longest paths are launched with priority, which the simulation knows nothing of.

    Args:
        graph: the hazards.
        costs: duration of each call, and its demand where known. Where they were never measured (source ``"uniform"``)
            there is nothing to weigh: the streams are those of ``nimble``.
        max_streams: most streams to use, at least 1; None for ``STREAMS``.
        device: what to plan for.

    Raises:
        InputError: ``max_streams`` below 1, or costs of another number of calls.

    Complexity:
        That of the three policies, and up to eight list schedules, each simulated; fewer above 12,500 calls.

    Source:
        Ours; the list schedules are those of ``critical_path``.

    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> graph = graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)])
    >>> contention(graph, Costs((9e3, 9e3, 8e3, 1e3, 1e3), "given")).stream
    (0, 0, 1, 1, 1)
    >>> contention(graph, Costs((9e3, 1e3, 1e3, 1e3, 1e3), "given")).stream
    (0, 0, 0, 0, 0)
    """
    require_fit(graph, costs, max_streams)
    cap = STREAMS if max_streams is None else max_streams
    if costs.source == "uniform":
        return replace(nimble(graph, costs, max_streams=cap), policy="contention")
    trial = _Trial(graph, costs, device)
    alone, *others = (trial.run(policy(graph, costs, max_streams=cap)) for policy in (single, nimble, critical_path))
    found = [alone, *others]
    found += trial.list_schedules(cap, min(result.length_ns for result in found))
    fastest = min(result.length_ns for result in found)
    close = [result for result in found if result.length_ns <= fastest * TIE]
    best = alone if alone in close else min(close, key=_freedom)
    plan = replace(best.plan, policy="contention")
    if plan.streams == 1:
        return plan
    order = tuple(run_order(best.started, plan.stream, plan.syncs))
    return replace(plan, order=order, priority=_urgent(graph, costs.ns))


def _urgent(graph: CallGraph, ns: Sequence[float]) -> tuple[int, ...]:
    """Launch priority 1 for the calls of the longest paths, those of nearly that length included."""
    start, _ = earliest_times(predecessors(graph, meg=True), ns)
    behind = longest_behind(successors(graph, meg=True), ns)
    enough = (1 - _SLACK) * max(behind, default=0.0)
    return tuple(int(begin + left >= enough) for begin, left in zip(start, behind, strict=True))


@dataclass(frozen=True, slots=True)
class _Result:
    """A plan as it ran in simulation: the duration of each call, and the calls in the order in which they started."""

    plan: Schedule
    ns: tuple[float, ...]
    started: tuple[int, ...]
    length_ns: float


def _freedom(result: _Result) -> tuple[int, float, int]:
    return len(result.plan.added_order), result.length_ns, result.plan.streams


@dataclass(frozen=True, slots=True)
class _Trial:
    """What plans are made for and tried on."""

    graph: CallGraph
    costs: Costs
    device: DeviceModel

    def run(self, plan: Schedule) -> _Result:
        """Simulate a plan."""
        timeline = simulate(self.graph, plan, self.costs, self.device)
        ns = {span.call: span.end_ns - span.start_ns for span in timeline.spans if span.call is not None}
        return _Result(plan, tuple(ns[call] for call in range(self.graph.size)), tuple(ns), timeline.length_ns)

    def list_schedules(self, cap: int, fastest_ns: float) -> list[_Result]:
        """Try list schedules for several numbers of streams, each made again from the durations that it had."""
        found = []
        left = _LISTED_CALLS // max(self.graph.size, 1)
        for streams in (cap, *(fewer for fewer in _CAPS if fewer < cap)):
            ns: Sequence[float] = self.costs.ns
            for _ in range(min(_ROUNDS, left)):
                listed = self.list_schedule(streams, ns)
                left -= 1
                if listed.length_ns > _HOPELESS * fastest_ns:
                    break
                found.append(listed)
                fastest_ns = min(fastest_ns, listed.length_ns)
                ns = listed.ns
        return found

    def list_schedule(self, streams: int, ns: Sequence[float]) -> _Result:
        """Plan and simulate calls that take ``ns`` each, and after it the device's gap."""
        device = self.device
        slowed = replace(self.costs, ns=tuple(each + device.gap_ns for each in ns))
        sync_ns = max(device.sync_ns - device.gap_ns, 0.0)
        return self.run(critical_path(self.graph, slowed, max_streams=streams, sync_cost_ns=sync_ns))
