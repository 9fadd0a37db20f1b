"""Reading Chrome traces: kinds of events, gaps of the profiler, files that are damaged or mean harm."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_core.utils.errors import ReportFileError
from nimble_viz.traces.chrome import read_trace
from tests.support.kineto_traces import ZERO_US, cpu_op, event, kernel, runtime, training_loop, write_trace


def read(tmp_path: Path, *events: dict[str, Any], **more: Any):
    return read_trace(write_trace(tmp_path / "trace.json", {"traceEvents": list(events), **more}))


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    found = read_trace(write_trace(tmp_path / "trace.json.gz", training_loop(1)))
    assert (found.device, found.device_name, found.settings) == (
        "cuda",
        "NVIDIA H200",
        (("cuda of the driver", "13.0"),),
    )
    assert found.warnings == ()
    gemm = next(one for one in found.kernels if one.name == "gemm")
    assert (gemm.start_ns, gemm.end_ns, gemm.stream, gemm.kind) == (296_000, 396_000, 7, "kernel")
    assert found.kernels[0].kind == "memcpy"
    launch = next(one for one in found.runtime if one.correlation == gemm.correlation)
    assert (launch.name, launch.thread) == ("cudaLaunchKernel", found.operators[0].thread)
    assert [one.name for one in found.marks[:2]] == [
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "Optimizer.step#SGD.step",
    ]


def test_frames_are_kept_apart(tmp_path: Path) -> None:
    frames = (
        event("python_function", "nn.Module: Linear_0", 5, 8),
        event("python_function", "model.py(3): forward", 0, 9),
    )
    found = read(tmp_path, cpu_op("aten::mm", 6, 7), *frames)
    assert [one.name for one in found.frames] == ["model.py(3): forward", "nn.Module: Linear_0"]
    assert [one.name for one in found.operators] == ["aten::mm"]


def test_a_kernel_without_correlation_takes_that_of_the_arrow_to_it(tmp_path: Path) -> None:
    lost = kernel("gemm", 20, 30, 0)
    del lost["args"]["correlation"]
    arrow = {"ph": "f", "id": 77, "pid": 0, "tid": 7, "ts": ZERO_US + 20, "cat": "ac2g", "name": "ac2g", "bp": "e"}
    found = read(tmp_path, cpu_op("aten::mm", 0, 9), runtime("cudaLaunchKernel", 2, 4, 77), lost, arrow)
    assert [one.correlation for one in found.kernels] == [77]
    assert [one.correlation for one in read(tmp_path, cpu_op("aten::mm", 0, 9), lost).kernels] == [0]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    other = {**cpu_op("aten::add", 0, 5), "pid": 43}
    cut = {key: value for key, value in cpu_op("aten::mm", 3, 4).items() if key != "dur"}
    found = read(
        tmp_path, cpu_op("aten::mm", 0, 2), cpu_op("aten::relu", 2, 3), other, cut,
        kernel("a", 1, 2, 1), kernel("b", 1, 2, 2), kernel("far", 1, 2, 3, device=1),
    )  # fmt: skip
    assert [one.name for one in (*found.operators, *found.kernels)] == ["aten::mm", "aten::relu", "a", "b"]
    assert found.warnings == (
        "1 of 7 events have no time or no length: left out",
        "operators of 2 processes: only process 42 (2 operators) is shown",
        "kernels on 2 GPUs: only GPU 0 (2 device events) is shown",
    )


TRACE = json.dumps(training_loop(1)).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a Chrome trace: it does not hold JSON"),
        (b"\x89PNG\r\n\x1a\n", "not a Chrome trace: it does not hold JSON"),
        (b"{}", "trace_events|traceEvents"),
        (b'{"traceEvents": []}', "holds no operators and no kernels"),
        (b'{"traceEvents": [7]}', "damaged"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": "soon", "dur": 1}]}', "damaged"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1e300, "dur": 1}]}', "holds no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": -5}]}', "holds no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": NaN, "dur": 1}]}', "does not hold JSON"),
        (b'{"traceEvents": [{"args": ' + b'{"a":' * 100_000, "does not hold JSON"),
        (TRACE[:-40], "cut short"),
        (gzip.compress(TRACE, mtime=0)[:-40], "cut short"),
        (b"\x1f\x8b not gzip", "damaged"),
    ],
)
def test_a_damaged_file_says_so_and_where(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(ReportFileError, match=says) as raised:
        read_trace(path)
    assert "broken.json" in raised.value.where
    assert raised.value.fix


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.write(b"[")
        file.truncate(2 << 30)
    with pytest.raises(ReportFileError, match="larger than 1,073,741,824 bytes"):
        read_trace(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
events = st.lists(
    st.fixed_dictionaries(
        {"ph": st.sampled_from(["X", "f", "M"]), "cat": st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "ac2g"])},
        optional=dict.fromkeys(("name", "pid", "tid", "id", "args"), values)
        | {"ts": st.floats(0, 1e6), "dur": st.floats(0, 1e6)},
    ),
    max_size=6,
)


@given(events, st.dictionaries(st.sampled_from(["deviceProperties", "cuda_driver_version", "x"]), values))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_file_holds_it_is_read_or_refused(tmp_path: Path, listed: Any, more: Any) -> None:
    path = write_trace(tmp_path / "any.json", {"traceEvents": listed, **more})
    with suppress(ReportFileError):
        found = read_trace(path)
        assert all(one.end_ns >= one.start_ns >= 0 for one in (*found.operators, *found.runtime, *found.kernels))


def test_a_report_is_no_trace_and_its_reader_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.nimble"
    path.write_bytes(gzip.compress(b'{"nimble_report": 1}'))
    with pytest.raises(ReportFileError, match=r"nimble_viz\.load"):
        read_trace(path)
