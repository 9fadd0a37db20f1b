"""What each call costs on its own, and from where we know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Costs", "Kernel", "limit_ns", "uniform_costs"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One node of a captured graph, seen running.

    Args:
        call: index of the call that added it, None if unknown.
        name: demangled where possible; ``"memcpy"`` and ``"memset"`` for those nodes.
        grid: blocks per dimension.
        block: threads per dimension.
        registers: per thread.
        shared_bytes: static and dynamic shared memory per block.
        node: graph node id (low 32 bits), -1 if unknown.
        duration_ns: median over the observed replays.
    """

    call: int | None
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    node: int
    duration_ns: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Isolated duration of every call.

    Args:
        ns: nanoseconds by call index.
        source: where they come from, in words.
        spread_ns: interquartile range by call index; empty if unknown.
        kernels: the kernels behind the calls; empty off CUDA.
        observed: how many replays were observed.
        expected: nodes expected per replay (0 if unknown) and
        seen: nodes seen per replay: where they differ, the numbers are unreliable.
        demand: share of the device that each call's kernels can fill at once, over 0 to 1, by call index; empty if
            unknown. Calls whose shares add up to 1 or less fit beside each other.
    """

    ns: tuple[float, ...]
    source: str
    spread_ns: tuple[float, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    observed: int = 0
    expected: int = 0
    seen: int = 0
    demand: tuple[float, ...] = ()

    @property
    def reliable(self) -> bool:
        """Whether every expected node was seen."""
        return self.expected == self.seen

    @property
    def total_ns(self) -> float:
        """Sum over the calls: what one stream needs at least."""
        return float(sum(self.ns))


def limit_ns(costs: Costs, critical_path_ns: float) -> float:
    """Bound the time of every schedule from below: the longer of critical path and work shared by all processors.

    Args:
        costs: isolated time of each call, and its demand: a call that fills a third of the device for 3 µs needs the
            whole of it for 1 µs. Where demand is unknown, only the critical path counts.
        critical_path_ns: length of the longest path of isolated calls.

    Source:
        R. L. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the two lower bounds of a makespan.

    >>> limit_ns(Costs((3000.0, 3000.0), "given", demand=(1.0, 0.5)), 3000.0)
    4500.0
    """
    work = sum(ns * share for ns, share in zip(costs.ns, costs.demand, strict=True)) if costs.demand else 0.0
    return max(critical_path_ns, work)


def uniform_costs(calls: int | Sequence[object]) -> Costs:
    """Give each of ``calls`` calls the same cost: for graphs that were never measured."""
    count = calls if isinstance(calls, int) else len(calls)
    return Costs(ns=(1.0,) * count, source="uniform")
