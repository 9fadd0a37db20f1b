"""How long it takes to prepare eager's own kernels, without a compiler and without tuning, for every model of the zoo.

    python -m benchmarks.preparation --out benchmarks/results/preparation-h200.json

Each model is prepared several times in a process of its own, after tuned eager and a first preparation of something
small have loaded what libraries load once: the first time and the median are kept, with the seconds of each step and of
Python's garbage collector. Rows that the file holds are not measured again.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from benchmarks.cuda import in_a_process, options_of_rows, rows_held, write
from benchmarks.zoo import SUITE, load, precision
from nimble_core.api.nimble import Nimble
from nimble_core.profiling.machine import environment
from nimble_core.scheduling.options import Options
from nimble_viz.collect.peers import peer

DTYPES = ("float32", "float16")
TIMES = 5
MEAN_S = 0.35
LARGE, LARGE_S = "NASNet-A large", 1.07
UNFUSED = Options(fuse="none", policy="single", tune="off")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks, print a line for each row; 1 if a target is missed or a row failed."""
    parser = options_of_rows(__doc__, SUITE)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    given = parser.parse_args(argv)
    if given.child:
        given.out.write_text(json.dumps({dtype: one_row(given.models[0], dtype) for dtype in given.dtypes}))
        return 0
    results = rows_held(given.out)
    stamp, failed = environment("cuda"), 0
    for name in given.models:
        missing = [dtype for dtype in given.dtypes if f"{name}, {dtype}" not in results["rows"]]
        try:
            found = in_a_process("benchmarks.preparation", "--models", name, "--dtypes", *missing) if missing else {}
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{name}: failed: {error.stderr.strip().splitlines()[-1]}", flush=True)
        else:
            results["rows"] |= {f"{name}, {dtype}": row for dtype, row in found.items()}
            results["summary"] = summary(results["rows"])
            write(given.out, results, stamp)
            for dtype in given.dtypes:
                print(line(f"{name}, {dtype}", results["rows"][f"{name}, {dtype}"]), flush=True)
    targets = summary(results["rows"])["targets"]
    for target, one in targets.items():
        print(f"{'met' if one['met'] else 'MISSED'}: {target}: {one['value']:.3f} s")
    return int(failed > 0 or not all(one["met"] for one in targets.values()))


def one_row(name: str, dtype: str) -> dict[str, Any]:
    """Seconds of preparing one model, several times."""
    small = nn.Linear(8, 8).to("cuda", getattr(torch, dtype)).eval()
    prepared(small, (torch.ones(8, 8, device="cuda", dtype=getattr(torch, dtype)),), {})
    with precision(dtype):
        model, args, kwargs = load(name, dtype)
        with torch.inference_mode():
            peer("eager-tuned").prepare(model, args, kwargs)(*args, **kwargs)
        runs = [prepared(model, args, kwargs) for _ in range(TIMES)]
    return {
        "first s": runs[0]["s"],
        "median s": median(run["s"] for run in runs),
        "calls": runs[0]["calls"],
        "runs": runs,
    }


def prepared(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One preparation: seconds, by step, and of the garbage collector within."""
    net = Nimble(model, UNFUSED)
    torch.cuda.synchronize()
    with collections() as collected:
        start = time.perf_counter()
        net.prepare(*args, **kwargs)
        seconds = time.perf_counter() - start
    engine = net.engines[0]
    found = {"s": seconds, "steps s": dict(engine.seconds), "collector s": sum(collected)}
    found["calls"] = engine.recorded.graph.size
    net.close()
    return found


@contextmanager
def collections() -> Iterator[list[float]]:
    """Seconds that each garbage collection inside takes."""
    found: list[float] = []
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            found.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The mean of first times, and what the largest model takes, against what is wanted of them."""
    mean = fmean(row["first s"] for row in rows.values())
    targets = {f"mean of {len(rows)} rows at most {MEAN_S} s": {"value": mean, "met": mean <= MEAN_S}}
    large = [row["first s"] for key, row in rows.items() if key.startswith(LARGE)]
    if large:
        targets[f"{LARGE} at most {LARGE_S} s"] = {"value": max(large), "met": max(large) <= LARGE_S}
    return {"rows": len(rows), "mean of medians s": fmean(row["median s"] for row in rows.values()), "targets": targets}


def line(key: str, row: dict[str, Any]) -> str:
    """One row for a terminal."""
    steps = sorted(row["runs"][0]["steps s"].items(), key=lambda one: -one[1])[:4]
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in steps)
    collector = row["runs"][0]["collector s"]
    return f"{key}: first {row['first s']:.3f} s ({parts}; collector {collector:.3f}), median {row['median s']:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
