"""Code that nobody wrapped: iterations, phases and calls, exact on hand-made traces as Kineto writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core.ir.program import Origin
from nimble_viz.collect.from_trace import observed
from nimble_viz.collect.iterations import one_iteration, profile_eager
from nimble_viz.collect.matched_trace import MatchedTrace
from nimble_viz.collect.overhead import iteration_bound, overhead_profile
from nimble_viz.report.data import Bound, CallOverhead, DeviceIdle, HostSync
from nimble_viz.traces.chrome import Recording, read_trace
from nimble_viz.traces.events import TICK, is_synchronisation
from tests.support.kineto_traces import ITERATIONS, cpu_op, event, kernel, runtime, training_loop, write_trace


def recorded(tmp_path: Path, *events: dict[str, Any]) -> Recording:
    return read_trace(write_trace(tmp_path / "trace.json", {"traceEvents": list(events)}))


@pytest.fixture
def loop(tmp_path: Path) -> MatchedTrace:
    recording = read_trace(write_trace(tmp_path / "trace.json", training_loop()))
    trace, what = one_iteration(recording)
    assert what == "one batch of the data loader"
    assert trace.iterations_ns == (1_000_000,) * ITERATIONS
    return observed(trace)


def us(*parts: float) -> tuple[float, ...]:
    return tuple(part * 1000 for part in parts)


def test_a_training_loop_by_phase(loop: MatchedTrace) -> None:
    start = loop.trace.start_ns
    assert [(name, (a - start) / 1000, (b - start) / 1000) for name, a, b in loop.trace.phases] == [
        ("loader", 0, 200),
        ("forward", 200, 210),
        ("copy", 210, 240),
        ("forward", 240, 400),
        ("backward", 400, 440),
        ("forward", 440, 500),
        ("optimizer", 500, 600),
        ("forward", 600, 1000),
    ]


def test_its_calls_and_their_overhead(loop: MatchedTrace) -> None:
    profile = overhead_profile(loop, 0.0)
    assert [(call.operator, call.phase) for call in loop.program.calls] == [
        ("aten.to", "forward"),
        ("aten.linear", "forward"),
        ("aten.mm", "backward"),
        ("aten._foreach_add_", "optimizer"),
        ("aten.item", "forward"),
    ]
    # python, dispatch, allocation, launch, GPU time, exposed; then the tail.
    assert profile.calls == tuple(
        CallOverhead(index, *us(*parts), tail_ns=1000.0 * tail)
        for index, (*parts, tail) in enumerate(
            [
                (10, 8, 0, 4, 10, 27, 6),  # the loader's 200 and the wait of 12 are none of it; busy 221–231
                (20, 30, 0, 10, 100, 56, 20),  # busy from 296
                (80, 20, 0, 6, 100, 28, 14),  # idle 396–424
                (80, 20, 0, 6, 50, 22, 14),  # idle 524–546
                (60, 10, 0, 0, 2, 46, 12),  # idle 596–640 less the waits 630–634 and 636–690, and from 690
            ]
        )
    )
    assert (profile.loader_ns, profile.waiting_ns, profile.remainder_ns) == us(200, 70, 300)
    assert profile.overhead_ns == 430_000
    assert profile.device_busy_ns == 262_000
    assert profile.idle == DeviceIdle(*us(709, 29, 0))
    assert iteration_bound(loop.trace, profile) == Bound(*us(220, 262, 518))


def test_its_synchronisations(loop: MatchedTrace) -> None:
    profile = overhead_profile(loop, 0.0)
    assert profile.host_syncs == (
        HostSync("aten::item", 1, 80_000.0, "", "forward"),
        HostSync("Memcpy HtoD (Pageable -> Device)", 1, 12_000.0, "", "copy"),
    )


_READ = [("aten::item", 0, 40), ("aten::_local_scalar_dense", 2, 38)]
_COPIED = [("aten::to", 0, 60), ("aten::_to_copy", 5, 55), ("aten::copy_", 10, 50)]
_PRINTED = [("aten::isfinite", 5, 15), ("aten::masked_select", 20, 50), ("aten::nonzero", 25, 48)]
_VALUES = [*((name, start + 100 * i + 60, end + 100 * i + 60) for i in range(9) for name, start, end in _READ)]


@pytest.mark.parametrize(
    ("line", "ops", "waits", "found"),
    [
        ("t.item()", _READ, [(10, 30)], [("aten::item", 1, 40)]),
        ("if t:", [("aten::is_nonzero", 0, 60), *_READ], [(10, 30)], [("aten::is_nonzero", 1, 60)]),
        ("t.tolist(), t.cpu(), t.cpu().numpy()", _COPIED, [(30, 45)], [("Memcpy DtoH (Device -> Pageable)", 1, 15)]),
        ("nonzero(t)", [("aten::nonzero", 0, 70)], [(10, 20), (40, 50)], [("aten::nonzero", 1, 70)]),
        ("t[mask]", [("aten::index", 0, 90), ("aten::nonzero", 5, 60)], [(10, 50)], [("aten::nonzero", 1, 55)]),
        ("[v.item() for v in t]", _VALUES, [(100 * i + 65, 100 * i + 90) for i in range(9)], [("aten::item", 9, 360)]),
        (
            "print(t), str(t)",
            [("nimble::print", 0, 1000), *_PRINTED, *_VALUES],
            [(30, 40), *((100 * i + 65, 100 * i + 90) for i in range(9))],
            [("print(tensor)", 1, 10 + 9 * 25)],
        ),
        ("print(t) of a tensor on the host", [("nimble::print", 0, 1000), *_VALUES], [], []),
    ],
)
def test_what_makes_the_host_wait_is_one_line_each(
    tmp_path: Path, line: str, ops: Any, waits: Any, found: list[tuple[str, int, int]]
) -> None:
    copies = any(name == "aten::copy_" for name, *_ in ops)
    events = [cpu_op(*one) for one in ops if one[0] != "nimble::print"]
    for _, start, end in (one for one in ops if one[0] == "nimble::print"):
        events.append(event("user_annotation", "nimble::print", start, end))
    launches = [cpu_op("aten::mm", -90, -40), runtime("cudaLaunchKernel", -80, -70, 1), kernel("mm", -75, -30, 1)]
    if copies:
        launches += [
            runtime("cudaMemcpyAsync", 20, 28, 2),
            kernel("Memcpy DtoH (Device -> Pageable)", 22, 26, 2),
        ]
    events += [runtime("cudaStreamSynchronize", start, end, 10 + i) for i, (start, end) in enumerate(waits)]
    recording = recorded(tmp_path, *events, *launches)
    trace, _ = one_iteration(recording)
    seen = observed(trace, recording.frames)
    profile = overhead_profile(seen, 0.0)
    if copies:  # a copy to pageable memory waits by itself, too
        found = [(kind, count, lasted + 8) for kind, count, lasted in found]
    assert [(one.kind, one.count, one.total_ns) for one in profile.host_syncs] == [
        (kind, count, lasted * 1000.0) for kind, count, lasted in found
    ], line


def test_what_was_dispatched_elsewhere_names_the_lines(tmp_path: Path) -> None:
    trace, _ = one_iteration(read_trace(write_trace(tmp_path / "trace.json", training_loop())))
    seen = [
        Origin("aten._to_copy.default", "", "train.py", 10),
        Origin("aten.addmm.default", "net.fc", "net.py", 3),
        Origin("aten.mm.default", "", "train.py", 12),
    ]
    found = observed(trace, seen=seen)
    places = [(call.origins[0].module, call.origins[0].file, call.origins[0].line) for call in found.program.calls]
    assert places == [("", "train.py", 10), ("net.fc", "net.py", 3), ("", "train.py", 12), ("", "", 0), ("", "", 0)]
    assert found.program.calls[1].origins[0].operator == "aten.linear"
    syncs = overhead_profile(found, 0.0).host_syncs
    assert syncs[1].source == "train.py:10"


def test_python_functions_name_modules_and_lines(tmp_path: Path) -> None:
    frames = [
        event("python_function", "train.py(5): main", 0, 100),
        event("python_function", "nn.Module: Net_0", 10, 60),
        event("python_function", "net.py(3): forward", 11, 59),
        event("python_function", "nn.Module: Linear_0", 12, 40),
        event("python_function", "torch/nn/modules/linear.py(9): forward", 13, 39),
    ]
    ops = [cpu_op("aten::linear", 15, 35), cpu_op("aten::relu", 45, 50), cpu_op("aten::sum", 70, 80)]
    recording = recorded(tmp_path, *frames, *ops)
    trace, _ = one_iteration(recording)
    calls = observed(trace, recording.frames).program.calls
    assert [(c.origins[0].module, c.origins[0].file, c.origins[0].line) for c in calls] == [
        ("Net_0.Linear_0", "net.py", 3),
        ("Net_0", "net.py", 3),
        ("", "train.py", 5),
    ]


def test_the_backward_has_the_lines_of_the_forward(tmp_path: Path) -> None:
    def arrow(ph: str, ident: int, op: dict[str, Any]) -> dict[str, Any]:
        return {key: op[key] for key in ("pid", "tid", "ts")} | {
            "ph": ph,
            "id": ident,
            "cat": "fwdbwd",
            "name": "fwdbwd",
        }

    linear, relu = cpu_op("aten::addmm", 2, 8), cpu_op("aten::relu", 10, 20)
    node = cpu_op("ReluBackward0", 32, 38, tid=9)
    recording = recorded(
        tmp_path, cpu_op("aten::linear", 0, 9), linear, relu,
        cpu_op("autograd::engine::evaluate_function: ReluBackward0", 30, 40, tid=9), node,
        cpu_op("aten::threshold_backward", 33, 36, tid=9), cpu_op("AddmmBackward0", 50, 60, tid=9),
        cpu_op("aten::mm", 51, 54, tid=9), cpu_op("aten::mm", 55, 58, tid=9), cpu_op("aten::add_", 70, 75, tid=9),
        arrow("s", 1, relu), arrow("f", 1, node), arrow("s", 2, linear),
        arrow("f", 2, cpu_op("AddmmBackward0", 50, 60, tid=9)), arrow("f", 3, node), arrow("s", 4, linear),
        event("user_annotation", TICK, -1, 0), event("user_annotation", TICK, 90, 91),
        cpu_op("autograd::engine::evaluate_function: AddmmBackward0", 49, 61, tid=9),
        cpu_op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 69, 76, tid=9),
    )  # fmt: skip
    trace, _ = one_iteration(recording, "one go")
    seen = [Origin("aten.addmm.default", "fc", "net.py", 3), Origin("aten.relu.default", "act", "net.py", 4)]
    calls = observed(trace, (), seen, recording.backward_of).program.calls
    assert [(call.label, call.module, call.origins[0].line) for call in calls] == [
        ("linear", "fc", 3),
        ("relu", "act", 4),
        ("threshold_backward", "act", 4),
        ("mm", "fc", 3),
        ("mm", "fc", 3),
        ("add_", "", 0),
    ]
    assert [call.origins[0].operator for call in calls[3:]] == ["aten.mm", "aten.mm", "aten.add_"]


def test_views_and_wrappers_are_no_calls_on_the_host(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        cpu_op("aten::t", 0, 5),
        cpu_op("autograd::engine::evaluate_function: MmBackward0", 10, 40),
        cpu_op("MmBackward0", 12, 38),
        cpu_op("aten::mm", 15, 20),
        cpu_op("aten::detach", 22, 26),
        cpu_op("detach", 23, 25),
        cpu_op("aten::reshape", 50, 60),
        cpu_op("aten::clone", 52, 58),
        cpu_op("mylib::op", 70, 80),
    )
    trace, _ = one_iteration(recording)
    assert [call.operator for call in observed(trace).program.calls] == ["aten.mm", "aten.reshape", "mylib.op"]


def test_launches_without_an_operator_are_calls_under_their_own_name(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        cpu_op("Torch-Compiled Region: 0/0", 0, 40),
        cpu_op("triton_poi_fused_relu_0", 5, 15),
        runtime("cuLaunchKernel", 8, 12, 1),
        kernel("triton_poi_fused_relu_0", 10, 20, 1),
        runtime("cudaLaunchKernel", 20, 25, 2),
        kernel("void at::native::reduce<float>", 22, 30, 2),
        runtime("cudaGraphLaunch", 50, 60, 3),
        kernel("a", 55, 60, 3),
        kernel("b", 60, 70, 3),
    )
    trace, _ = one_iteration(recording)
    found = observed(trace)
    assert [call.operator for call in found.program.calls] == [
        "triton_poi_fused_relu_0",
        "void at.native.reduce<float>",
        "cudaGraphLaunch",
    ]
    profile = overhead_profile(found, 0.0)
    assert [row.work_ns for row in profile.calls] == [10_000, 8_000, 15_000]
    assert all(found.forest.events[at].name for _, at in found.matches)


def test_iterations_are_found_by_what_tells_most(tmp_path: Path) -> None:
    def what(*events: dict[str, Any]) -> tuple[str, int, tuple[int, int]]:
        trace, found = one_iteration(recorded(tmp_path, cpu_op("aten::mm", 0, 99), *events), "one go")
        return found, len(trace.iterations_ns), (trace.start_ns // 1000, trace.end_ns // 1000)

    def marks(name: str, *starts: int) -> list[dict[str, Any]]:
        return [event("user_annotation", name.format(i), at, at + 1) for i, at in enumerate(starts)]

    steps = marks("Optimizer.step#SGD.step", 20, 50, 80)
    loads = marks("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 40, 70)
    profiler = [event("user_annotation", f"ProfilerStep#{i}", 15 + 30 * i, 45 + 30 * i) for i in range(2)]
    ticks = marks(TICK, 5, 35)
    assert what() == ("the whole recording", 1, (0, 99))
    assert what(*steps[:1]) == ("the whole recording", 1, (0, 99))
    assert what(*steps) == ("one step of the optimizer", 2, (20, 50))
    assert what(*steps, *loads) == ("one batch of the data loader", 2, (10, 40))
    assert what(*steps, *loads, *profiler) == ("one step of torch.profiler", 2, (15, 45))
    assert what(*steps, *loads, *profiler, *ticks) == ("one go", 1, (6, 35))
    run = event("user_annotation", "nimble.run", 8, 30)  # then comes what is ours; on a GPU, the wait for it
    assert what(*ticks, run) == ("one go", 1, (8, 30))
    assert what(*ticks, run, kernel("mm", 5, 7, 1)) == ("one go", 1, (8, 35))


def test_other_threads_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path, cpu_op("aten::mm", 0, 10), cpu_op("aten::mm", 12, 30), cpu_op("aten::pin_memory", 5, 8, tid=9)
    )
    trace, _ = one_iteration(recording)
    assert [one.name for one in trace.operators] == ["aten::mm", "aten::mm"]
    assert trace.warnings == ("1 operators of 1 other threads (not the loop's, not autograd's) are left out",)


def test_the_device_runs_behind_the_host(tmp_path: Path) -> None:
    """A kernel that was launched before the iteration keeps the device busy in it; one launched in it ends after it."""
    recording = recorded(
        tmp_path,
        cpu_op("aten::mm", 0, 10),
        runtime("cudaLaunchKernel", 5, 8, 1),
        kernel("before", 20, 60, 1),
        event("user_annotation", TICK, 30, 31),
        cpu_op("aten::relu", 40, 50),
        runtime("cudaLaunchKernel", 45, 48, 2),
        kernel("after", 95, 130, 2),
        event("user_annotation", TICK, 80, 81),
    )
    trace, _ = one_iteration(recording, "one go")
    found = observed(trace)
    profile = overhead_profile(found, 0.0)
    assert [(row.call, row.work_ns) for row in profile.calls] == [(0, 35_000)]
    assert (profile.profiled_ns, profile.device_busy_ns) == us(49, 29)  # from the end of one mark to the next


def test_lost_events_are_survived(tmp_path: Path) -> None:
    trace = training_loop()
    kept = [one for one in trace["traceEvents"] if one.get("name") != "gemm" and one.get("cat") != "cuda_runtime"]
    recording = read_trace(write_trace(tmp_path / "trace.json", {**trace, "traceEvents": kept}))
    cut, _ = one_iteration(recording)
    found = observed(cut)
    profile = overhead_profile(found, 0.0)
    assert found.program.calls == ()
    assert profile.device_busy_ns == 162_000
    assert profile.idle is not None
    assert profile.idle.unknown_ns > 0


# -- an eager run --------------------------------------------------------------------------------------------------


def test_real_profile_is_nested_ordered_and_within_the_iteration() -> None:
    layer = torch.nn.Linear(8, 8)
    waits: list[int] = []
    with torch.no_grad():
        trace = profile_eager(lambda: layer(torch.ones(2, 8)), device="cpu", synchronize=lambda: waits.append(1))
    assert len(waits) == 2 + 3
    names = [event.name for event in trace.operators]
    assert names.index("aten::linear") < names.index("aten::addmm")
    assert [e.start_ns for e in trace.operators] == sorted(e.start_ns for e in trace.operators)
    assert all(trace.start_ns <= e.start_ns <= e.end_ns <= trace.run_end_ns for e in trace.operators)
    assert len(trace.iterations_ns) == 3
    assert trace.length_ns == sorted(trace.iterations_ns)[1]
    assert trace.kernels == trace.runtime == ()
    assert 0 < trace.floor_ns < 1e6


def test_an_error_of_the_model_stops_the_profiler() -> None:
    def fail() -> None:
        raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        profile_eager(fail, device="cpu", synchronize=lambda: None)
    assert profile_eager(lambda: torch.ones(1), device="cpu", synchronize=lambda: None).operators


def test_kineto_is_silent_and_the_environment_as_it_was() -> None:
    code = (
        "import os, torch; from nimble_viz.collect.iterations import profile_eager; "
        "profile_eager(lambda: torch.ones(1), device='cpu', synchronize=lambda: None); "
        "assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    clean = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.gpu
def test_cuda_profile_joins_every_launch() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(2, 64, device="cuda")
    with torch.no_grad():
        trace = profile_eager(lambda: layer(x).relu(), device="cuda", synchronize=torch.cuda.synchronize)
    assert trace.warnings == ()
    assert len(trace.kernels) >= 2
    assert not any(is_synchronisation(event.name) for event in trace.runtime)
