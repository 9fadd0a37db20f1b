"""What preparing takes with Inductor, beside torch.compile: with empty compile caches, and in a second process.

    python -m benchmarks.compiling --out benchmarks/results/compiling-h200.json

Each way has compile caches of its own, empty at first, and two processes, one after the other: what the second finds is
what the first has left. A process loads model and compiler, and runs tuned eager; then the seconds from the model to
its first finished result are taken. Ours is there as one plan of compiled kernels (``fuse="inductor"``, not tuned) and
as by default, where several ways are tried and timed and the second process finds the choice. What the file holds is
not measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.cuda import in_a_process, options_of_rows, rows_held, write
from benchmarks.zoo import load, precision
from nimble_core.api.nimble import Nimble
from nimble_core.profiling.machine import environment
from nimble_core.scheduling.options import Options
from nimble_viz.collect.peers import peer

MODELS = ("ResNet-50", "GoogLeNet", "MobileNetV2", "BERT-base 128", "ViT-B/16", "T5-small 128+32", "NASNet-A mobile")
OURS = {"ours, not tuned": Options(fuse="inductor", tune="off"), "ours": Options()}
PEERS = ("compile:reduce-overhead", "compile:reduce-overhead+freezing")
WAYS = (*OURS, *PEERS)
FACTOR = 1.10


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file lacks, print a line for each row; 1 if a row failed or the target is missed."""
    parser = options_of_rows(__doc__, MODELS)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    given = parser.parse_args(argv)
    if given.child:
        given.out.write_text(json.dumps({"s": seconds(given.models[0], given.dtype, given.ways[0])}))
        return 0
    results = rows_held(given.out)
    stamp, failed = environment("cuda"), 0
    for name in given.models:
        key = f"{name}, {given.dtype}"
        row = results["rows"].setdefault(key, {})
        try:
            for way in given.ways:
                if way not in row:
                    row[way] = first_and_second(name, given.dtype, way)
                    results["summary"] = summary(results["rows"])
                    write(given.out, results, stamp)
            print(line(key, row), flush=True)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{key}: failed: {error.stderr.strip().splitlines()[-1]}", flush=True)
    found = summary(results["rows"])
    for said, ratio in found["ratios"].items():
        print(f"{said}: {ratio:.2f}x")
    return int(failed > 0 or not found["met"])


def first_and_second(name: str, dtype: str, way: str) -> dict[str, float]:
    """Seconds of two processes that share caches which were empty before."""
    with tempfile.TemporaryDirectory() as caches:
        variables = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "NIMBLE_CACHE_DIR": f"{caches}/choices"}
        options = ("--models", name, "--dtype", dtype, "--ways", way)
        first, second = (in_a_process("benchmarks.compiling", *options, variables=variables)["s"] for _ in range(2))
    return {"first s": first, "second s": second}


def seconds(name: str, dtype: str, way: str) -> float:
    """From the model to the first finished result."""
    import_module("torch._inductor.compile_fx")  # loading the compiler is nobody's preparation
    with precision(dtype), torch.inference_mode():
        model, args, kwargs = load(name, dtype)
        peer("eager-tuned").prepare(model, args, kwargs)(*args, **kwargs)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run: Callable[..., object]
        if way in OURS:
            run = Nimble(model, OURS[way]).prepare(*args, **kwargs)
        else:
            run = peer(way).prepare(model, args, kwargs)
        run(*args, **kwargs)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def summary(rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Geometric means of ours over each peer's, and whether ours, not tuned, takes what is wanted at most."""
    ratios = {}
    for when in ("first s", "second s"):
        for way in OURS:
            for other in PEERS:
                both = [row for row in rows.values() if way in row and other in row]
                if both:
                    said = f"{way} over {other}, {when.split()[0]} process"
                    ratios[said] = geometric_mean([row[way][when] / row[other][when] for row in both])
    wanted = ratios.get(f"ours, not tuned over {PEERS[-1]}, first process", 0.0)
    return {"rows": len(rows), "ratios": ratios, "wanted at most": FACTOR, "met": 0 < wanted <= FACTOR}


def line(key: str, row: dict[str, dict[str, float]]) -> str:
    """One row for a terminal."""
    both = (f"{way} {one['first s']:.1f} s, then {one['second s']:.1f}" for way, one in row.items())
    return f"{key}: {', '.join(both)}"


if __name__ == "__main__":
    sys.exit(main())
