"""Opara's stream allocation and launch order: first successors stay, heavy and light calls take turns."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from nimble_core.algorithms.list_scheduling import list_order
from nimble_core.algorithms.path_cover import chains_of, fold_chains
from nimble_core.ir.call_graph import CallGraph, predecessors, successors
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule, positions
from nimble_core.scheduling.policies.base import plan_streams, require_fit

__all__ = ["opara"]


def opara(graph: CallGraph, costs: Costs, *, max_streams: int | None = None) -> Schedule:
    """Plan each call on the stream of a predecessor whose first successor it is, and mix heavy with light launches.

    Streams: a call takes over the stream of the first predecessor that has it as its first successor; a call without
    one opens a stream. So streams are paths, found greedily in one pass, where policy ``nimble`` finds the fewest.
    Chains that the graph orders anyway are then folded onto one stream, and above ``max_streams`` a chain joins the
    least loaded one; Opara itself opens a stream for each.

    Launch order: of the calls whose predecessors were launched, one that asks for little of the device and one that
    asks for much go out in turn (each time the least demanding of its half), so that they overlap rather than queue
    behind one large call. Opara mixes compute-intensive with memory-intensive operators and knows their shared memory,
    threads and registers; here a call's share of the device (``costs.demand``) stands for that, or, where it is
    unknown, its duration. Where the cap adds order, each stream issues by that rank what can start.

    Args:
        graph: the hazards. First successors are those of the minimum equivalent graph, in program order.
        costs: duration of each call, and its demand if known.
        max_streams: most streams to use, at least 1; None for no cap.

    Raises:
        InputError: ``max_streams`` below 1, or costs of another number of calls.

    Complexity:
        O((calls + edges) log calls), and O(edges * chains / word size) for the folding.

    Source:
        Chen et al., "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs", 2023, arXiv
        2312.10351: its stream allocation and its resource-aware operator launch order.

    >>> from nimble_core.ir.costs import uniform_costs
    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> plan = opara(graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]), uniform_costs(5))
    >>> plan.stream, plan.syncs
    ((0, 0, 1, 0, 0), ((0, 2), (2, 3)))
    """
    require_fit(graph, costs, max_streams)
    before, after = predecessors(graph, meg=True), successors(graph, meg=True)
    partner = [-1] * graph.size
    for call, sources in enumerate(before):
        for source in sources:
            if after[source][0] == call:
                partner[source] = call
                break
    stream = fold_chains(before, chains_of(partner), cap=max_streams, ns=costs.ns)
    order = _launch_order(before, after, costs.demand or costs.ns)
    plan = plan_streams(graph, stream, policy="opara", order=order)
    if not plan.added_order:
        return plan
    # Unrelated calls share a stream: it must not wait at a call that is launched early but can only start late.
    again = list_order(before, stream, costs.ns, rank=positions(order))
    return plan_streams(graph, stream, policy="opara", order=again)


def _launch_order(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], demand: Sequence[float]
) -> list[int]:
    """Return a topological order that takes light and heavy ready calls in turn, the least demanding of each first."""
    median = sorted(demand)[len(demand) // 2] if demand else 0.0
    missing = [len(sources) for sources in before]
    light: list[tuple[float, int]] = []
    heavy: list[tuple[float, int]] = []
    ready = [call for call, count in enumerate(missing) if not count]
    order: list[int] = []
    turn, other = light, heavy
    while ready or light or heavy:
        for call in ready:
            heapq.heappush(light if demand[call] <= median else heavy, (demand[call], call))
        _, launched = heapq.heappop(turn or other)
        order.append(launched)
        turn, other = other, turn
        ready = []
        for call in after[launched]:
            missing[call] -= 1
            if not missing[call]:
                ready.append(call)
    return order
