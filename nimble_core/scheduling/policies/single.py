"""Everything on one stream, in program order: the candidate that a multi-stream plan has to beat."""

from __future__ import annotations

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies.base import plan_streams

__all__ = ["single"]


def single(graph: CallGraph, costs: Costs, *, max_streams: int | None = None) -> Schedule:
    """Plan all calls on one stream in program order; nothing ever waits for another stream.

    Args:
        graph: the hazards.
        costs: not looked at.
        max_streams: not looked at: one stream fits any cap.

    Complexity:
        O(calls + edges).

    >>> from nimble_core.ir.costs import uniform_costs
    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> plan = single(graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]), uniform_costs(5))
    >>> plan.streams, plan.syncs, plan.added_order
    (1, (), ((1, 2),))
    """
    return plan_streams(graph, [0] * graph.size, policy="single")
