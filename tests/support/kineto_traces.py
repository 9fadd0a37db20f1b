"""Chrome traces as Kineto writes them, made by hand: exact times, in microseconds, of a training loop on a GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ZERO_US = 4431416465264.0
"""Where the profiler's clock stands when the loop begins: large, as it is in real traces."""

ITERATIONS = 3
_MAIN, _ENGINE = 100, 101


def event(cat: str, name: str, start: float, end: float, tid: int = _MAIN, **args: Any) -> dict[str, Any]:
    """A complete event of this category from ``start`` to ``end``."""
    shared = {"ph": "X", "cat": cat, "name": name, "pid": 42, "tid": tid}
    return {**shared, "ts": ZERO_US + start, "dur": end - start, "args": args}


def cpu_op(name: str, start: float, end: float, tid: int = _MAIN) -> dict[str, Any]:
    """An operator."""
    return event("cpu_op", name, start, end, tid, **{"External id": 1000 + int(start), "Ev Idx": 1})


def runtime(name: str, start: float, end: float, correlation: int, tid: int = _MAIN) -> dict[str, Any]:
    """A call of the CUDA runtime."""
    return event("cuda_runtime", name, start, end, tid, cbid=211, correlation=correlation)


def kernel(name: str, start: float, end: float, correlation: int, stream: int = 7, device: int = 0) -> dict[str, Any]:
    """What ran on the device; a copy if it is called so."""
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    said = {"device": device, "context": 1, "stream": stream, "correlation": correlation}
    return event(cat, name, start, end, stream, **said) | {"pid": device}


def training_loop(iterations: int = ITERATIONS) -> dict[str, Any]:
    """So many iterations of 1,000 µs each, and the beginning of one more; each does the same."""
    events: list[dict[str, Any]] = []
    for i in range(iterations + 1):
        events += _iteration(1000.0 * i, 10 * (i + 1))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "numSms": 132}],
        "cuda_driver_version": 13000,
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 42, "tid": 0, "args": {"name": "python"}}, *events],
        "traceName": "trace.json",
    }


def _iteration(at: float, first: int) -> Iterable[dict[str, Any]]:
    batch = event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 200)
    step = event("user_annotation", "Optimizer.step#SGD.step", 500, 600)
    made = [
        batch,
        # The batch goes to the device, from memory that is not pinned.
        cpu_op("aten::to", 210, 240),
        cpu_op("aten::_to_copy", 212, 238),
        cpu_op("aten::copy_", 215, 235),
        runtime("cudaMemcpyAsync", 218, 222, first),
        runtime("cudaStreamSynchronize", 222, 234, first + 5),
        kernel("Memcpy HtoD (Pageable -> Device)", 221, 231, first),
        # Forward.
        cpu_op("aten::linear", 260, 320),
        cpu_op("aten::addmm", 265, 315),
        runtime("cudaLaunchKernel", 290, 300, first + 1),
        kernel("gemm", 296, 396, first + 1),
        # Backward, on autograd's thread.
        cpu_op("autograd::engine::evaluate_function: AddmmBackward0", 400, 440, _ENGINE),
        cpu_op("AddmmBackward0", 402, 438, _ENGINE),
        cpu_op("aten::mm", 405, 435, _ENGINE),
        runtime("cudaLaunchKernel", 420, 426, first + 2, _ENGINE),
        kernel("gemm_backward", 424, 524, first + 2),
        step,
        event("gpu_user_annotation", "Optimizer.step#SGD.step", 546, 596, 7),
        cpu_op("aten::_foreach_add_", 520, 560),
        runtime("cudaLaunchKernel", 540, 546, first + 3),
        kernel("multi_tensor", 546, 596, first + 3),
        # loss.item()
        cpu_op("aten::item", 620, 700),
        cpu_op("aten::_local_scalar_dense", 622, 698),
        runtime("cudaMemcpyAsync", 630, 634, first + 4),
        runtime("cudaStreamSynchronize", 636, 690, first + 6),
        kernel("Memcpy DtoH (Device -> Pageable)", 640, 642, first + 4),
        event("cpu_instant_event", "[memory]", 620, 620),
    ]
    return [{**one, "ts": one["ts"] + at} for one in made]


def write_trace(path: Path, trace: Any) -> Path:
    """Write it as JSON, gzipped where the name ends in ``.gz``."""
    data = trace if isinstance(trace, bytes) else json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
