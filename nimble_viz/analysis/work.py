"""What each call computes and moves, and how far its launch fills the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from nimble_core.ir.costs import Kernel
from nimble_core.ir.occupancy import Launch, launch_of
from nimble_core.ir.program import Call, TensorRef
from nimble_viz.report.data import ReportData

__all__ = ["CallWork", "call_bytes", "call_work", "launches", "work"]

_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})


@dataclass(frozen=True, slots=True)
class CallWork:
    """One call; None for what is not known.

    Args:
        flops: floating-point operations.
        bytes_read: of the elements that it reads, each once.
        bytes_written: likewise.
        gflops: billions of operations a second, at the call's isolated cost.
        gbytes: billions of bytes a second, likewise. Above the memory's own rate where a cache serves them.
        fill: share of the GPU's resident blocks that its kernels fill at once.
        waves: how many times over they fill it; the most of its kernels.
        occupancy: threads resident over those that the GPU holds, as its launches allow; by time over its kernels.
    """

    flops: int | None
    bytes_read: int
    bytes_written: int
    gflops: float | None
    gbytes: float | None
    fill: float | None
    waves: float | None
    occupancy: float | None

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.bytes_read + self.bytes_written


def call_bytes(call: Call) -> tuple[int, int]:
    """Count the bytes that a call reads and writes: elements once (stride 0), of a table no more than it writes."""
    written = sum(map(_nbytes, set(call.writes)))
    read = [_nbytes(ref) for ref in set(call.reads)]
    return sum(min(nbytes, written) for nbytes in read) if call.label in _LOOKUPS else sum(read), written


def launches(report: ReportData) -> list[Launch | None]:
    """Return how each of ``report.costs.kernels`` fills the GPU; None for copies, and where it is not known."""
    held = report.work.processors if report.work else None
    return [launch_of(kernel, held) if held else None for kernel in report.costs.kernels]


def call_work(report: ReportData) -> list[CallWork]:
    """Compute the work of every call of the program. O(calls + kernels)."""
    costs = report.costs
    measured = costs.source != "uniform"
    behind: dict[int, list[tuple[Kernel, Launch]]] = {}
    for kernel, launch in zip(costs.kernels, launches(report), strict=True):
        if kernel.call is not None and launch is not None:
            behind.setdefault(kernel.call, []).append((kernel, launch))
    flops = report.work.flops if report.work else (None,) * len(report.program.calls)
    rows = []
    for call, count, ns in zip(report.program.calls, flops, costs.ns, strict=True):
        read, written = call_bytes(call)
        found = behind.get(call.index, [])
        time = sum(kernel.duration_ns for kernel, _ in found)
        timed = measured and ns > 0
        rows.append(
            CallWork(
                flops=count,
                bytes_read=read,
                bytes_written=written,
                gflops=count / ns if timed and count is not None else None,
                gbytes=(read + written) / ns if timed else None,
                fill=costs.demand[call.index] if costs.demand else None,
                waves=max((launch.waves for _, launch in found), default=None),
                occupancy=sum(launch.occupancy * kernel.duration_ns for kernel, launch in found) / time
                if time
                else None,
            )
        )
    return rows


def work(report: ReportData) -> dict[str, list[Any]]:
    """Return ``call_work`` as columns; -1 stands for what is not known."""
    rows = call_work(report)
    return {
        "flops": [-1 if row.flops is None else row.flops for row in rows],
        "bytes": [row.nbytes for row in rows],
        "fill": _rounded([row.fill for row in rows]),
        "waves": _rounded([row.waves for row in rows]),
        "occupancy": _rounded([row.occupancy for row in rows]),
    }


def _rounded(values: Sequence[float | None]) -> list[float]:
    return [-1.0 if value is None else round(value, 3) for value in values]


def _nbytes(ref: TensorRef) -> int:
    return prod(size for size, stride in zip(ref.sizes, ref.strides, strict=True) if stride or not size) * ref.itemsize
