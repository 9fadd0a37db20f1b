"""Work of calls: bytes counted once, rates at isolated costs, launches that fill the GPU or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from nimble_core.ir.program import Access, Call, TensorRef
from nimble_viz.analysis.work import call_bytes, call_work, launches, work
from tests.support.sample_reports import CASES, sample_report
from tests.support.strategies import windows


def call(*accesses: Access) -> Call:
    return Call(0, "aten.add.Tensor", (), accesses)


@given(windows(), windows(1))
def test_bytes_are_at_most_those_of_all_windows_and_no_window_counts_twice(first: TensorRef, second: TensorRef) -> None:
    read, written = call_bytes(call(Access(first, False), Access(first, False), Access(second, True)))
    assert 0 <= read <= first.nbytes
    assert written <= second.nbytes
    assert (read == 0) == (first.nbytes == 0)


def test_what_a_stride_of_zero_repeats_is_read_once() -> None:
    ref = TensorRef(0, 0, (64, 8), (0, 1), "float32", 4)
    assert call_bytes(call(Access(ref, False))) == (32, 0)


def test_a_lookup_reads_the_rows_that_it_writes() -> None:
    table, rows = TensorRef(0, 0, (30_000, 64), (64, 1), "float32", 4), TensorRef(1, 0, (8,), (1,), "int64", 8)
    out = TensorRef(2, 0, (8, 64), (64, 1), "float32", 4)
    found = replace(
        call(Access(table, False), Access(rows, False), Access(out, True)), operator="aten.embedding.default"
    )
    assert call_bytes(found) == (8 * 64 * 4 + 8 * 8, 8 * 64 * 4)


def test_launches_of_a_gpu_that_is_known() -> None:
    report = sample_report(6)
    found = launches(report)[0]
    assert found is not None
    # 64 blocks of 256 threads with 40 registers each: 6 fit by registers, on 132 multiprocessors.
    assert (found.blocks, found.resident) == (64, 6 * 132)
    row = call_work(report)[0]
    assert row.waves == pytest.approx(64 / 792)
    assert row.occupancy == pytest.approx(64 * 256 / (132 * 2048))


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert launches(replace(sample_report(6), work=None)) == [None] * 6
    for row in call_work(replace(sample_report(6, device="cpu"), work=None)):
        assert (row.flops, row.gflops, row.fill, row.waves, row.occupancy) == (None,) * 5
        assert row.nbytes > 0
    assert call_work(CASES["empty"]()) == []
    columns = work(replace(sample_report(6, device="cpu"), work=None))
    assert {columns[name][0] for name in ("flops", "fill", "waves", "occupancy")} == {-1}
