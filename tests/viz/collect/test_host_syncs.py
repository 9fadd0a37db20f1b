"""What made the host wait: each wait once, by kind and place."""

from __future__ import annotations

from dataclasses import replace

from nimble_core.ir.program import Call, Program
from nimble_viz.report.data import HostSync
from nimble_viz.traces.events import DeviceEvent, HostEvent, Trace, outer_first
from tests.support.eager_traces import CUDA, TWO, op, program_of, split


def test_what_has_no_line_comes_after_the_last_that_is_known_in_its_phase() -> None:
    trace = replace(CUDA, operators=outer_first([*CUDA.operators, op("item", 120, 150)]), device="cpu", runtime=())
    known = program_of("addmm", lines=True).calls[0]
    for phase, source in (("forward", "after model.py:1"), ("backward", "")):
        calls = (known, Call(1, "aten.relu.default", (), (), phase=phase))
        (sync,) = split(Program(calls, (), (), ()), trace, 0.0).host_syncs
        assert (sync.kind, sync.source) == ("aten::item", source)


def test_on_the_host_the_optimizer_reads_counters() -> None:
    reads = [op("item", 120, 125), op("item", 130, 140), op("item", 150, 155)]
    phases = (("forward", 0, 126), ("optimizer", 126, 145), ("forward", 145, 200))
    trace = replace(
        CUDA, operators=outer_first([*CUDA.operators, *reads]), device="cpu", runtime=(), kernels=(), phases=phases
    )
    (sync,) = split(TWO, trace, 0.0).host_syncs
    assert (sync.kind, sync.count, sync.total_ns) == ("aten::item", 2, 10.0)


def waiting(*names: tuple[str, int, int], launch: int, wait: int, copy: str = "") -> list[HostSync]:
    """Synchronisations of a run of nested operators with one launch and one wait for the stream after it."""
    trace = Trace(
        "cuda", 0, 100, 100, outer_first([op(*one) for one in names]),
        runtime=(
            HostEvent("cudaMemcpyAsync", launch, launch + 2, 1, 7),
            HostEvent("cudaStreamSynchronize", wait, wait + 20, 1, 8),
        ),
        kernels=(DeviceEvent(copy, "memcpy", launch + 5, launch + 9, 7, 7),) if copy else (),
    )  # fmt: skip
    return list(split(program_of("_to_copy"), trace, 0.0).host_syncs)


def test_a_blocking_copy_is_named_after_the_copy() -> None:
    copy = "Memcpy DtoH (Device -> Pinned)"
    nested = ("to", 10, 60), ("_to_copy", 12, 58), ("copy_", 20, 55)
    assert waiting(*nested, launch=25, wait=30, copy=copy) == [HostSync(copy, 1, 20.0, "")]
    within = "Memcpy DtoD (Device -> Device)"
    assert waiting(*nested, launch=25, wait=30, copy=within) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]
    assert waiting(*nested, launch=25, wait=30) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]
    assert waiting(*nested, launch=25, wait=70, copy=copy) == [HostSync("cudaStreamSynchronize", 1, 20.0, "")]
