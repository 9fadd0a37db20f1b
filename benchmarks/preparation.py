"""How long preparing takes, cold and warm, beside ``torch.compile``.

    python -m benchmarks.preparation --out benchmarks/results/preparation-host.json
    python -m benchmarks.preparation --device cuda --out benchmarks/results/preparation-h200.json

Each way and each start is a process of its own. *Cold* finds empty caches: ours, Inductor's and Triton's. *Warm* is the
next process, which finds what the first has kept. What is timed begins when model and inputs lie on the device and
eager has run once, and ends with outputs: of the first call of ours, of the third of ``torch.compile``, whose first
compiles and whose second records (on CUDA in mode ``reduce-overhead``). *Ours first* ends where
``prepare(..., background=True)`` returns; *ours compiled* is ``fuse="inductor"``. On the host torch has one thread.
The file's other rows are kept, with their dates.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas
import torch
from torch import nn

from benchmarks.common import held, in_process, markdown, options, write
from benchmarks.models import ROWS, Inference, Inputs, load
from nimble_core import Nimble, Options
from nimble_core.profiling.machine import environment
from nimble_core.torch_compat.compiler import COUNTERS

STARTS = ("cold", "warm")
WAYS = {
    "cpu": ("ours", "ours compiled", "ours first", "torch.compile"),
    "cuda": ("ours", "ours first", "torch.compile"),
}
DEFAULT_ROWS = {
    "cpu": "mlp branches resnet50 bert llama-decode",
    "cuda": "resnet50 bert googlenet nasnet-mobile llama-decode densenet161 mobilenet efficientnet segformer swin-t "
    "gpt2 vit-tf32",
}
CACHES = ("NIMBLE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main() -> None:
    """Measure rows one after the other, and print a line for each process."""
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", default="", help="names, separated by spaces (default: five on the host, 12 on CUDA)")
    parser.add_argument("--rounds", type=int, default=1, help="cold and warm starts of each (default: 1)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        row, way = given.child.split("/")
        print(json.dumps(measured(row, way, given.device)))
        return
    stamp, rows = environment(given.device), (given.rows or DEFAULT_ROWS[given.device]).split()
    taken = [one for one in held(given.out).get("samples", ()) if one["row"] not in rows]
    for row in rows:
        for way in WAYS[given.device]:
            for _ in range(given.rounds):
                taken += [{**one, "date": stamp.date} for one in both_starts(row, way, given.device)]
        write(given.out, {"samples": taken}, stamp)
    print(table(taken))


def both_starts(row: str, way: str, device: str) -> list[dict[str, Any]]:
    """Run two processes one after the other, with caches that only they share."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        own = {name: f"{folder}/{name}" for name in CACHES} | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})
        for start in STARTS:
            try:
                sample = in_process("benchmarks.preparation", "--device", device, "--child", f"{row}/{way}", **own)
            except RuntimeError as error:
                sample = {"error": str(error)[:300]}
            found.append({"row": row, "way": way, "start": start, **sample})
            print(json.dumps(found[-1]), flush=True)
    return found


def measured(row: str, way: str, device: str) -> dict[str, Any]:
    """Prepare once, in this process."""
    model, (args, kwargs) = case(row, device)
    wanted = Options(fuse="inductor") if way == "ours compiled" else Options()
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.no_grad():
        model(*args, **kwargs)
        settle()
        wall, cpu = time.perf_counter(), cpu_s()
        if way == "torch.compile":
            compiled = torch.compile(model, mode="reduce-overhead" if device == "cuda" else None)
            for _ in range(3):
                compiled(*args, **kwargs)
            found = {}
        else:
            net = Nimble(model, wanted).prepare(*args, background=way == "ours first", **kwargs)
            if way != "ours first":
                net(*args, **kwargs)
            (engine,) = net.engines
            kept = any("by an earlier process" in note for note in engine.notes)
            found = {"phases": dict(engine.seconds), "chosen": engine.schedule.policy, "recalled": kept}
        settle()
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}
    compiler = COUNTERS.require()["inductor"] if "torch._dynamo" in sys.modules else {}
    return {**seconds, **found, "compiler_cache": {name: compiler[name] for name in compiler if "cache" in name}}


def case(row: str, device: str) -> tuple[nn.Module, Inputs]:
    """Model and inputs of a row; on the host in float32, and a decode step of a small model."""
    torch.manual_seed(0)
    if row == "mlp":
        layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(*layers).eval().to(device), ((torch.randn(8, 256, device=device),), {})
    if row == "branches":
        from examples.models import branches

        wide, args, kwargs = branches(blocks=16, paths=8)
        return wide.to(device), (tuple(one.to(device) for one in args), kwargs)
    known = ROWS[row] if device == "cuda" else replace(ROWS[row], dtype="float32")
    given = load(known, device, tiny=device == "cpu" and row == "llama-decode")
    assert isinstance(given, Inference)
    return given.model, given.fresh()


def cpu_s() -> float:
    """CPU time of this process and of those that it has waited for, seconds."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


def table(taken: Sequence[dict[str, Any]]) -> str:
    """Medians of wall and CPU time by row, way and start, as a Markdown table, with ratios to ``torch.compile``."""
    ways = list(dict.fromkeys(one["way"] for one in taken))
    right = [one for one in taken if "error" not in one]
    samples = pandas.DataFrame(right, columns=["row", "start", "way", "wall_s", "cpu_s"])
    medians = samples.groupby(["row", "start", "way"], sort=False)[["wall_s", "cpu_s"]].median().unstack("way")
    rows = []
    for (row, start), seconds in medians.iterrows():
        wall, cpu = (seconds[name].reindex(ways) for name in ("wall_s", "cpu_s"))
        over = cpu / cpu.get("torch.compile", float("nan"))
        rows.append([row, start, *(f"{wall[way]:.1f} s, {cpu[way]:.1f} s CPU ({over[way]:.2f}x)" for way in ways)])
    return markdown(["row", "start", *ways], rows)


if __name__ == "__main__":
    main()
