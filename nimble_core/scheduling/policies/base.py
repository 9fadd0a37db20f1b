"""The protocol of a policy, and what all policies share: from streams to a complete Schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from nimble_core.algorithms.reachability import predecessor_lists, unconnected
from nimble_core.algorithms.transitive_reduction import transitive_reduction
from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule, SyncCounts, positions, stream_neighbours
from nimble_core.utils.errors import InputError

__all__ = ["Policy", "plan_streams", "require_fit"]


class Policy(Protocol):
    """A pure function from a graph and its costs to a schedule."""

    def __call__(self, graph: CallGraph, costs: Costs, *, max_streams: int | None = None) -> Schedule:
        """Plan ``graph`` on at most ``max_streams`` streams (None: no cap)."""
        ...


def require_fit(graph: CallGraph, costs: Costs, max_streams: int | None) -> None:
    """Raise InputError for ``max_streams`` below 1, or costs of another number of calls than the graph has."""
    if max_streams is not None and max_streams < 1:
        raise InputError(f"max_streams={max_streams} leaves no stream to run on", fix="at least 1, or None")
    if len(costs.ns) != graph.size:
        raise InputError(f"costs of {len(costs.ns)} calls for a graph of {graph.size}", fix="costs of the same program")


def plan_streams(
    graph: CallGraph,
    stream: Sequence[int],
    *,
    policy: str,
    matched: int | None = None,
    order: Sequence[int] | None = None,
    extra: Iterable[tuple[int, int]] = (),
) -> Schedule:
    """Make the schedule that runs each call on its given stream with the fewest waits.

    The waits are the cross-stream edges of the transitive reduction of hazards, stream order and extra order together.

    Args:
        graph: the hazards.
        stream: stream of each call, 0-based, no gaps.
        policy: name to be written into the schedule.
        order: call indices as they are issued, topological; program order if None.
        matched: size of the maximum matching that the streams were made from. With it, a plan that adds no order
            promises maximum concurrency and minimum syncs.
        extra: ``(earlier, later)`` calls to be ordered besides, such as users of memory and those who reuse it.

    Raises:
        InputError: not one stream per call, not each call once in ``order``, or ``extra`` contradicts the order.

    >>> from nimble_core.ir.call_graph import graph_from_edges
    >>> plan_streams(graph_from_edges(3, [(0, 1), (0, 2)]), [0, 0, 1], policy="mine").syncs
    ((0, 2),)
    """
    order = range(graph.size) if order is None else order
    extra = sorted(set(extra))
    _require_consistent(graph.size, stream, order, extra)
    # Edges must lead from lower to higher numbers: places in the issue order are such numbers, calls may not be.
    place = positions(order)
    hazards = predecessor_lists(graph.size, graph.meg)
    neighbours = stream_neighbours(stream, order)
    added = unconnected(hazards, [*neighbours, *extra])
    needed: Sequence[tuple[int, int]] = graph.meg
    if added:
        pairs = [(place[u], place[v]) for u, v in (*graph.meg, *added)]
        reduced = transitive_reduction(predecessor_lists(graph.size, pairs))
        needed = sorted((order[u], order[v]) for u, v in reduced)
    syncs = tuple((u, v) for u, v in needed if stream[u] != stream[v])
    full, reduced_count = (sum(stream[u] != stream[v] for u, v in edges) for edges in (graph.edges, graph.meg))
    if extra:
        # Extra order that the rest implies needs no wait, and is no longer told apart.
        added = unconnected(hazards, [*neighbours, *syncs])
    promised = matched is not None and not added
    return Schedule(
        policy=policy,
        stream=tuple(stream),
        order=tuple(order),
        syncs=syncs,
        added_order=tuple(added),
        maximum_concurrency=promised,
        minimum_syncs=promised,
        meg_edges=len(graph.meg) if matched is not None else 0,
        matched=matched or 0,
        counts=SyncCounts(full=full, meg=reduced_count, planned=len(syncs)),
    )


def _require_consistent(
    size: int, stream: Sequence[int], order: Sequence[int], extra: Iterable[tuple[int, int]]
) -> None:
    if len(stream) != size:
        raise InputError(f"{len(stream)} streams were given for {size} calls", fix="one stream per call")
    if sorted(order) != list(range(size)):
        raise InputError(f"the order does not hold each of {size} calls once", fix="call indices, each once")
    place = positions(order)
    for u, v in extra:
        if not (0 <= u < size and 0 <= v < size and place[u] < place[v]):
            raise InputError(
                f"the extra order {u} -> {v} contradicts the issue order", fix="issue the earlier one first"
            )
