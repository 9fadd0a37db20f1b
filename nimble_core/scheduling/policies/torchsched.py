"""torchsched's stream assignment: the critical path has a stream of its own, all else goes round."""

from __future__ import annotations

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.algorithms.list_scheduling import list_order
from nimble_core.ir.call_graph import CallGraph, predecessors
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies.base import plan_streams, require_fit

__all__ = ["STREAMS", "torchsched"]

STREAMS = 8
"""Streams used where no cap says otherwise; torchsched's own default."""


def torchsched(graph: CallGraph, costs: Costs, *, max_streams: int | None = None) -> Schedule:
    """Plan the critical path back to back on stream 0, every other call on the next of the other streams in turn.

    Taken from torchsched: which calls go to which stream, in program order, and the number of streams. Not taken: it
    measures paths in calls, here they are as long as ``costs`` says (the same thing under uniform costs); it issues in
    program order, here each stream issues the call with the longest path behind it first; it waits for every
    dependency across streams, here only where streams and other waits do not imply it. Results without a kernel, which
    it keeps on their producer's stream, are no calls here.

    Args:
        graph: the hazards.
        costs: duration of each call.
        max_streams: most streams to use, at least 1; None for ``STREAMS``. A higher cap is used in full.

    Raises:
        InputError: ``max_streams`` below 1, or costs of another number of calls.

    Complexity:
        O((calls + edges) log calls), and one bitset pass where waits are made the fewest.

    Source:
        The ``torchsched`` backend of ``torch.compile`` in NVIDIA Apex (``apex.contrib.torchsched``, pull request 1886,
        2025): the ``MultiCudaStreamScheduler`` in its ``inductor/scheduler.py``, and ``num_streams`` in its config.

    >>> from nimble_core.ir.costs import uniform_costs
    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> torchsched(graph_from_edges(5, [(0, 3), (1, 3), (2, 3), (3, 4)]), uniform_costs(5), max_streams=3).stream
    (0, 1, 2, 0, 0)
    """
    require_fit(graph, costs, max_streams)
    before = predecessors(graph, meg=True)
    _, path = critical_path(before, costs.ns)
    others = (max_streams or STREAMS) - 1
    stream = [0] * graph.size
    if others:
        critical = set(path)
        beside = (call for call in range(graph.size) if call not in critical)
        for turn, call in enumerate(beside):
            stream[call] = 1 + turn % others
    order = list_order(before, stream, costs.ns)
    return plan_streams(graph, stream, policy="torchsched", order=order)
