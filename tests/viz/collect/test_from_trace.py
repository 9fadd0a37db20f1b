"""Reports of traces: real ones of this machine's profiler, hand-made ones of a GPU; text, page, file, exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nimble_core.utils.errors import InputError
from nimble_viz.analysis.phases import profiled
from nimble_viz.collect.from_trace import from_trace
from nimble_viz.render.report import Report
from tests.support.kineto_traces import training_loop, write_trace


@pytest.fixture
def gpu_report(tmp_path: Path) -> Report:
    return from_trace(write_trace(tmp_path / "loop.json.gz", training_loop()))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a training loop on this machine, as a user of torch.profiler exports it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 2, (48,)))
    with torch.profiler.profile(with_stack=True, with_modules=True) as profiler:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_trace_of_a_gpu_is_a_report(gpu_report: Report) -> None:
    assert gpu_report.model == "loop.json.gz"
    assert gpu_report.environment.device_name == "NVIDIA H200"
    assert gpu_report.sampling is not None
    assert (gpu_report.sampling.seen, gpu_report.sampling.timed, gpu_report.sampling.profiled) == (3, 0, 3)
    text = gpu_report.to_text(120, full=True)
    for part in (
        "1.00 ms one batch of the data loader",
        "host-bound: host 51.8% (518 µs), device 26.2% (262 µs), input 22.0% (220 µs)",
        "the host waits for the device 2 times in it",
        "Idle: host late, nothing queued",
        "709 µs, 70.9%",
        "Memcpy HtoD (Pageable -> Device) (copy)",
        "use pinned memory and non_blocking=True",
        "Not in this report",
        "not timed",
    ):
        assert part in " ".join(text.split()), part
    for absent in ("Streams and synchronisations", "Limits", "Preparation", "over one stream"):
        assert absent not in text


def test_a_real_trace(exported: Path) -> None:
    report = from_trace(exported)
    assert report.sampling is not None
    assert report.sampling.iteration == "one batch of the data loader"
    profile = report.overhead
    assert profile is not None
    assert (profile.matched, profile.total) == (len(report.program.calls), len(report.program.calls))
    work = sum(row.work_ns for row in profile.calls)
    assert profile.overhead_ns + work + profile.loader_ns + profile.waiting_ns + profile.remainder_ns == pytest.approx(
        profile.profiled_ns
    )
    assert [one.phase for one in profile.phases] == ["loader", "forward", "backward", "optimizer"]
    bound = report.sampling.bound
    assert bound.input_ns + bound.device_ns + bound.host_ns == pytest.approx(profile.profiled_ns)
    linear = next(call for call in report.program.calls if call.operator == "aten.linear")
    assert linear.origins[0].module == "Sequential_0.Linear_0"
    assert linear.origins[0].file.endswith("test_from_trace.py")
    assert {call.phase for call in report.program.calls} == {"forward", "backward", "optimizer"}
    assert [call.operator for call in report.program.calls].count("aten.mm") == 3
    assert profiled(report) is not None


def test_a_profiler_that_has_stopped() -> None:
    with torch.profiler.profile() as profiler:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    report = from_trace(profiler)
    assert report.model == "torch.profiler"
    assert [call.label for call in report.program.calls] == ["ones", "ones", "mm"]


def test_a_profiler_that_has_no_trace_to_give(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(2) + 1
        with pytest.raises(InputError, match="gave no trace"):
            from_trace(profiler)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(InputError, match="exported before"):
        from_trace(profiler)
    assert from_trace(tmp_path / "trace.json").program.calls
    with pytest.raises(InputError, match="gave no trace"):
        from_trace(torch.profiler.profile())


def test_a_trace_is_read_without_torch(exported: Path) -> None:
    import subprocess
    import sys

    code = (
        f"import sys, nimble_viz; nimble_viz.from_trace({str(exported)!r}).to_text(80); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
