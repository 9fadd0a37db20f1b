"""One launch of a captured graph against several: the same calls, cut where ``nimble_core.launches`` would.

    python -m benchmarks.launches --out benchmarks/results/launches-h200.json

Eager's kernels of each model under one plan of several streams, replayed one at a time on an idle GPU, whole and in
every way to launch it, in turn; and what a launch takes of the host. Rows that the file holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cuda import figures, write
from benchmarks.zoo import load, precision
from nimble_core.devices.cuda import CudaExecutable
from nimble_core.host_info import environment
from nimble_core.launches import ways_to_launch
from nimble_core.measurement import interleave, ratio
from nimble_core.nimble import Nimble
from nimble_core.options import Options

MODELS = ("NASNet-A mobile", "NASNet-A large", "HRNet-W18", "DARTS", "AmoebaNet-A", "GoogLeNet", "Inception-v3")
PLAN = Options(fuse="none", policy="contention", tune="fast")
ROUNDS = 101
LAUNCHES = 50


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, and print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for each model")
    given = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    stamp = environment("cuda")
    for name in given.models:
        key = f"{name}, {given.dtype}"
        if key not in results["models"]:
            with precision(given.dtype):
                results["models"][key] = one_model(name, given.dtype, given.seconds)
            write(given.out, results, stamp)
        print(line(key, results["models"][key]), flush=True)


def one_model(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Times of whole and divided replays, and of their launches, in µs."""
    model, args, kwargs = load(name, dtype)
    net = Nimble(model, PLAN).prepare(*args, **kwargs)
    engine = net.engines[0]
    executable = engine.executable
    assert isinstance(executable, CudaExecutable)
    ways = ways_to_launch(engine.recorded.graph, engine.schedule)
    with ExitStack() as stack:
        runs: dict[str, Callable[[], object]] = {"whole": executable.replay}
        runs |= {str(one): stack.enter_context(executable.launched_in(one)) for one in ways}
        times = interleave(
            runs,
            clock_ns=time.perf_counter_ns,
            synchronize=torch.cuda.synchronize,
            rounds=ROUNDS,
            budget_s=seconds,
            rehearse=True,
        )
        launched = {one: launch_us(run) for one, run in runs.items()}
    found = {
        "calls": engine.recorded.graph.size,
        "nodes": len(executable.raw.nodes),
        "streams": engine.schedule.streams,
        "times": {one: figures(taken) for one, taken in times.items()},
        "host us": launched,
        "over whole": {
            one: {"value": found.value, "low": found.low, "high": found.high}
            for one, taken in times.items()
            if one != "whole" and (found := ratio(taken, times["whole"]))
        },
    }
    net.close()
    return found


def launch_us(run: Callable[[], object]) -> float:
    """What launching takes of the host, the GPU being idle: median."""
    taken = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return median(taken) / 1e3


def line(key: str, row: dict[str, Any]) -> str:
    """One model for a terminal."""
    head = f"{key}: {row['calls']} calls, {row['nodes']} nodes, {row['streams']} streams; "
    whole = f"whole {row['times']['whole']['median us']:.0f} µs, launched in {row['host us']['whole']:.0f} µs"
    if not row["over whole"]:
        return f"{head}{whole}; nowhere to cut"
    best = max(row["over whole"], key=lambda one: row["over whole"][one]["value"])
    return f"{head}{whole}; launched at {best}: {row['over whole'][best]['value']:.2f}x"


if __name__ == "__main__":
    main()
