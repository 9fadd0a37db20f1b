"""How much of a GPU a kernel can fill: what decides whether two calls fit beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nimble_core.costs import Kernel

__all__ = ["Multiprocessors", "call_demands", "kernel_demand"]

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


def kernel_demand(kernel: Kernel, gpu: Multiprocessors) -> float:
    """Share of the GPU's resident blocks that ``kernel`` fills, over 0 to 1; 0 for copies, which need none.

    Source:
        CUDA C++ Programming Guide, "Hardware Multithreading": blocks are resident as far as threads, registers, shared
        memory and block slots allow.

    >>> gpu = Multiprocessors(count=100, threads=2048, registers=65536, shared_bytes=228 << 10)
    >>> kernel_demand(Kernel(0, "gemm", (100, 1, 1), (256, 1, 1), 128, 0, 1, 5000.0), gpu)
    0.5
    """
    threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
    if not threads:
        return 0.0
    warps = -(-threads // gpu.warp)
    resident = min(
        gpu.blocks,
        gpu.threads // (warps * gpu.warp),
        gpu.registers // max(kernel.registers * warps * gpu.warp, 1),
        gpu.shared_bytes // (kernel.shared_bytes + _RESERVED_SHARED_BYTES),
    )
    blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
    return min(1.0, blocks / (gpu.count * max(resident, 1)))


def call_demands(kernels: Iterable[Kernel], calls: int, gpu: Multiprocessors) -> tuple[float, ...]:
    """Demand of each call: of its kernels, weighted with their time; 0 where none was seen."""
    filled, total = [0.0] * calls, [0.0] * calls
    for kernel in kernels:
        if kernel.call is not None:
            filled[kernel.call] += kernel_demand(kernel, gpu) * kernel.duration_ns
            total[kernel.call] += kernel.duration_ns
    return tuple(share / time if time else 0.0 for share, time in zip(filled, total, strict=True))
