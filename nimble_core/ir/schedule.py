"""The Schedule: which call runs on which stream, in what order, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Schedule", "SyncCounts", "positions", "stream_neighbours"]


@dataclass(frozen=True, slots=True)
class SyncCounts:
    """Cross-stream waits, counted four ways (fork from and join to the capture stream apart).

    Args:
        full: edges of the full hazard DAG whose ends are on different streams (what waiting on every hazard costs).
        meg: edges of the minimum equivalent graph whose ends are on different streams.
        planned: waits in the schedule.
        emitted: pairs of calls on different streams that an edge of the captured graph joins, read back; None where
            there is no graph to read, as for the rest.
        forks: nodes that wait for no call: the streams that start at once, the capture stream included.
        joins: nodes that nothing waits for: the streams that the end of the graph joins.
        inside: edges between nodes of one call: what the call itself orders.
        ahead: kernels that may be launched before what they wait for has ended, and then wait by themselves.
    """

    full: int
    meg: int
    planned: int
    emitted: int | None = None
    forks: int | None = None
    joins: int | None = None
    inside: int | None = None
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan for one CallGraph. Plain integers: only a device turns a 2 into a stream.

    Args:
        policy: name of the policy that made it.
        stream: stream of each call, by call index; 0-based, no gaps.
        order: call indices in the order they are issued: a topological order of the graph.
        syncs: ``(producer, consumer)`` pairs on different streams: the consumer's stream waits for the producer.
        priority: launch priority of each call (0 normal, higher sooner); empty means all 0.
        added_order: ``(earlier, later)`` neighbours on one stream, and ends of waits, that the graph does not order:
            concurrency given up, because streams were capped, to reuse memory, or by the policy's choice. Empty for
            uncapped ``nimble``.
        maximum_concurrency: promise: independent calls never share a stream.
        minimum_syncs: promise: ``len(syncs) == |E'| - |M|``.
        meg_edges: |E'|, edges of the minimum equivalent graph (0 where the policy did not need it).
        matched: |M|, size of the maximum matching (0 likewise).
        counts: syncs, counted four ways.
    """

    policy: str
    stream: tuple[int, ...]
    order: tuple[int, ...]
    syncs: tuple[tuple[int, int], ...]
    priority: tuple[int, ...] = ()
    added_order: tuple[tuple[int, int], ...] = ()
    maximum_concurrency: bool = False
    minimum_syncs: bool = False
    meg_edges: int = 0
    matched: int = 0
    counts: SyncCounts = SyncCounts(0, 0, 0)

    @property
    def streams(self) -> int:
        """Number of streams used."""
        return max(self.stream, default=-1) + 1


def positions(order: Sequence[int]) -> list[int]:
    """Where each call stands in an issue order.

    >>> positions([2, 0, 1])
    [1, 2, 0]
    """
    position = [0] * len(order)
    for at, call in enumerate(order):
        position[call] = at
    return position


def stream_neighbours(stream: Sequence[int], order: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of calls that follow each other on one stream, in issue order of the later one."""
    last: dict[int, int] = {}
    pairs = []
    for call in order:
        lane = stream[call]
        if lane in last:
            pairs.append((last[lane], call))
        last[lane] = call
    return pairs
