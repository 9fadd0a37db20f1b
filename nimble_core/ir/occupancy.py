"""How much of a GPU a kernel can fill: what decides whether two calls fit beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nimble_core.ir.costs import Kernel

__all__ = ["Launch", "Multiprocessors", "call_demands", "launch_of"]

_RESERVED_SHARED_BYTES = 1024
"""Shared memory that CUDA keeps for itself in every block (compute capability 8.0 and later)."""


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """What the multiprocessors of a GPU hold.

    Args:
        count: how many there are.
        threads: resident threads of one.
        registers: registers of one.
        shared_bytes: shared memory of one.
        blocks: resident blocks of one.
        warp: threads per warp.
    """

    count: int
    threads: int
    registers: int
    shared_bytes: int
    blocks: int = 32
    warp: int = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel's blocks lie on a GPU, if it has the GPU for itself.

    Args:
        blocks: launched.
        resident: blocks that the whole GPU holds at once.
        occupancy: threads that are resident, over the waves on average, over those that the GPU holds; 0 to 1. It
            follows from the launch alone: a counter of active warps shows at most about this.
    """

    blocks: int
    resident: int
    occupancy: float

    @property
    def waves(self) -> float:
        """How many times over the blocks fill the GPU."""
        return self.blocks / self.resident

    @property
    def demand(self) -> float:
        """Share of the GPU's resident blocks that are filled at once, over 0 to 1."""
        return min(1.0, self.waves)


def launch_of(kernel: Kernel, gpu: Multiprocessors) -> Launch | None:
    """How ``kernel``'s blocks lie on ``gpu``; None for copies and for launches without blocks.

    Source:
        CUDA C++ Programming Guide, "Hardware Multithreading": blocks are resident as far as threads, registers, shared
        memory and block slots allow.

    >>> gpu = Multiprocessors(count=100, threads=2048, registers=65536, shared_bytes=228 << 10)
    >>> found = launch_of(Kernel(0, "gemm", (250, 1, 1), (256, 1, 1), 128, 0, 1, 5000.0), gpu)
    >>> found.resident, found.waves, round(found.occupancy, 3)  # 250 blocks in two waves of at most 200
    (200, 1.25, 0.156)
    """
    threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
    blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
    if threads <= 0 or blocks <= 0:
        return None
    warps = -(-threads // gpu.warp)
    each = min(
        gpu.blocks,
        gpu.threads // (warps * gpu.warp),
        gpu.registers // max(kernel.registers * warps * gpu.warp, 1),
        gpu.shared_bytes // (kernel.shared_bytes + _RESERVED_SHARED_BYTES),
    )
    resident = gpu.count * max(each, 1)
    held = -(-blocks // resident) * gpu.count * gpu.threads
    return Launch(blocks, resident, min(1.0, blocks * warps * gpu.warp / held))


def call_demands(kernels: Iterable[Kernel], calls: int, gpu: Multiprocessors) -> tuple[float, ...]:
    """Demand of each call: of its kernels, weighted with their time; 0 where none was seen."""
    filled, total = [0.0] * calls, [0.0] * calls
    for kernel in kernels:
        if kernel.call is not None:
            launch = launch_of(kernel, gpu)
            filled[kernel.call] += launch.demand * kernel.duration_ns if launch else 0.0
            total[kernel.call] += kernel.duration_ns
    return tuple(share / time if time else 0.0 for share, time in zip(filled, total, strict=True))
