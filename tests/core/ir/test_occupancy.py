from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.costs import Kernel
from nimble_core.ir.occupancy import Multiprocessors, call_demands, launch_of

GPU = Multiprocessors(count=132, threads=2048, registers=65536, shared_bytes=228 << 10)


def kernel(blocks: int, threads: int = 256, registers: int = 32, shared: int = 0, call: int | None = 0) -> Kernel:
    return Kernel(call, "k", (blocks, 1, 1), (threads, 1, 1), registers, shared, 1, 1000.0)


def demand(kernel: Kernel) -> float:
    return call_demands([kernel], 1, GPU)[0]


def test_each_limit_binds() -> None:
    assert demand(kernel(132 * 8)) == 1  # 2048 threads / 256
    assert demand(kernel(132, threads=32, registers=1)) == 1 / 32  # block slots
    assert demand(kernel(132, registers=128)) == 1 / 2  # 65536 registers / (128 * 256)
    assert demand(kernel(132, shared=75 << 10)) == 1 / 3  # 228 KiB / 76 KiB
    assert demand(kernel(132, shared=228 << 10)) == 1  # more than fits: one at least
    assert demand(kernel(0, threads=0)) == 0  # a copy


def test_calls_weigh_their_kernels_with_time() -> None:
    long = Kernel(0, "k", (132 * 8, 1, 1), (256, 1, 1), 32, 0, 1, 3000.0)
    short = Kernel(0, "memset", (0, 0, 0), (0, 0, 0), 0, 0, 2, 1000.0)
    assert call_demands([long, short, kernel(5, call=None)], 2, GPU) == (0.75, 0.0)


@given(st.integers(1, 5000), st.integers(1, 1024), st.integers(1, 255), st.integers(0, 227 << 10))
def test_launches_lie_within_the_gpu(blocks: int, threads: int, registers: int, shared: int) -> None:
    found = launch_of(kernel(blocks, threads, registers, shared), GPU)
    assert found is not None
    assert found.resident % GPU.count == 0
    assert 0 < found.occupancy <= 1
    assert 0 < found.demand <= 1
    assert found.waves == blocks / found.resident


def test_occupancy_falls_where_a_last_wave_is_thin() -> None:
    full, spilled = launch_of(kernel(132 * 8), GPU), launch_of(kernel(132 * 8 + 1), GPU)
    assert full is not None
    assert spilled is not None
    assert (full.waves, full.occupancy) == (1, 1)
    assert spilled.occupancy == (132 * 8 + 1) / (2 * 132 * 8)
