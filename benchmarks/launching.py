"""What launching a graph takes of the host: before anything was measured, after we have, and after torch's profiler.

    python -m benchmarks.launching --out benchmarks/results/launching-h200.json

Eager's kernels of each model, on one stream and on several, in a process of its own: what a profiler leaves behind is
there until the process ends (docs/profiling.md). Each launch finds the GPU idle; the wait for it is timed as well. Rows
that the file holds are not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.cuda import fill_rows, options_of_rows
from benchmarks.zoo import load, precision
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import device_for, observe
from nimble_core.runtime.cuda.device import CudaExecutable
from nimble_core.scheduling.options import Options

MODELS = ("ResNet-50", "GoogLeNet", "BERT-base 128", "NASNet-A mobile", "NASNet-A large", "HRNet-W18")
POLICIES = ("single", "contention")
LAUNCHES = 100
BEFORE, OURS, PROFILER = "before", "after ours", "after torch.profiler"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, and print a line for each row."""
    parser = options_of_rows(__doc__, MODELS)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    given = parser.parse_args(argv)
    if given.child:
        given.out.write_text(json.dumps(one_row(given.models[0], given.dtype, given.policies[0])))
        return
    wanted = {
        f"{name}, {given.dtype}, {policy}": ("--models", name, "--dtype", given.dtype, "--policies", policy)
        for name in given.models
        for policy in given.policies
    }
    fill_rows(given.out, "benchmarks.launching", wanted, line)


def one_row(name: str, dtype: str, policy: str) -> dict[str, Any]:
    """Times in µs, in the order in which they were taken."""
    with precision(dtype):
        model, args, kwargs = load(name, dtype)
        net = Nimble(model, Options(fuse="none", policy=policy, tune="off")).prepare(*args, **kwargs)
        engine = net.engines[0]
        executable = engine.executable
        assert isinstance(executable, CudaExecutable)
        taken = {BEFORE: launches(executable.replay)}
        observe(device_for(engine.signature.device), engine.recorded, executable, seconds=0.2)
        taken[OURS] = launches(executable.replay)
        with torch.profiler.profile():
            executable.replay()
            torch.cuda.synchronize()
        taken[PROFILER] = launches(executable.replay)
        net.close()
    return {"nodes": len(executable.raw.nodes), "streams": engine.schedule.streams, "times": taken}


def launches(run: Callable[[], object]) -> dict[str, float]:
    """Medians of what one launch takes of the host, and until the GPU is done with it."""
    launched, done = [], []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        launched.append(time.perf_counter_ns() - start)
        torch.cuda.synchronize()
        done.append(time.perf_counter_ns() - start)
    return {"launch us": median(launched) / 1e3, "replay us": median(done) / 1e3}


def line(key: str, row: dict[str, Any]) -> str:
    """One row for a terminal."""
    said = ", ".join(
        f"{when} {taken['launch us']:.0f} µs of {taken['replay us']:.0f}" for when, taken in row["times"].items()
    )
    return f"{key}: {row['nodes']} nodes on {row['streams']} streams; launched {said}"


if __name__ == "__main__":
    main()
