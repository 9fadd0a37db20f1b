"""The Schedule: which call runs on which stream, in what order, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule", "SyncCounts"]


@dataclass(frozen=True, slots=True)
class SyncCounts:
    """Cross-stream waits, counted four ways (fork from and join to the capture stream apart).

    Args:
        full: edges of the full hazard DAG whose ends are on different streams (what waiting on every hazard costs).
        meg: edges of the minimum equivalent graph whose ends are on different streams.
        planned: waits in the schedule.
        emitted: cross-stream edges read back from the captured graph; None where there is no graph to read.
    """

    full: int
    meg: int
    planned: int
    emitted: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan for one CallGraph. Plain integers: only a device turns a 2 into a stream.

    Args:
        policy: name of the policy that made it.
        stream: stream of each call, by call index; 0-based, no gaps.
        order: call indices in the order they are issued: a topological order of the graph.
        syncs: ``(producer, consumer)`` pairs on different streams: the consumer's stream waits for the producer.
        priority: launch priority of each call (0 normal, higher sooner); empty means all 0.
        added_order: ``(earlier, later)`` neighbours on one stream that the graph does not order: concurrency given
            up, because streams were capped or by the policy's choice. Empty for uncapped ``nimble``.
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
