"""Host replay against eager: how much of the framework's share it removes.

    python -m benchmarks.host --out benchmarks/results/host.json

Timed in turn in one process: eager (``inference_mode``), a replay, and a replay that times its calls. The framework's
share is what eager takes beyond W, the work: the sum over the calls of their medians where they run in the replay, each
less what a call on no elements takes. Where it is below ``MEASURABLE`` of eager, noise exceeds it. Exits with 1 if the
replay is decidedly slower than eager, or removes less than ``REMOVED`` of a measurable share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from benchmarks.common import figures, options, over, write
from benchmarks.policies import recorded_on
from examples import models
from nimble_core.autotune.capture_pipeline import capture, schedule_by
from nimble_core.ir.measurement import interleave
from nimble_core.profiling.machine import environment
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording import issuing
from nimble_core.utils.units import format_ns, format_percent
from nimble_core.validation.distances import relative_error

MODELS: dict[str, Callable[[], models.Example]] = {
    "bert-small, length 16": partial(models.bert_small, length=16),
    "bert-small": models.bert_small,
    "bert-base, 4 layers": partial(models.bert, layers=4),
    "bert-base": models.bert,
    "clip": models.clip,
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "inception-like": models.inception_like,
}
MEASURABLE, REMOVED = 0.05, 0.70


def main() -> int:
    """Measure, print a line for each model, write the file; 1 if a target is missed."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=60, help="samples of each candidate")
    given = parser.parse_args()
    stamp, results = environment("cpu"), dict[str, Any]()
    for name in given.models:
        results[name] = found = measure(*MODELS[name](), given.rounds)
        eager, replay = (format_ns(found[one]["median us"] * 1e3) for one in ("eager", "replay"))
        share, removed = (format_percent(found[one]) for one in ("share", "removed"))
        print(f"{name:24}eager {eager}, replay {replay}, {found['replay over eager']['value']:.3f}x;", end=" ")
        print(f"framework's share {share}, removed {removed}{'' if found['met'] else '  MISSED'}", flush=True)
    write(given.out, {"models": results}, stamp)
    return int(not all(found["met"] for found in results.values()))


def measure(model: Any, args: Any, kwargs: Any, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    device, recorded = recorded_on(model, args, kwargs)
    replay: Any = capture(device, recorded, schedule_by(recorded, "single", None, 1))
    inputs, calls = recorded.signature.tensors, list[list[int]]()

    def eager() -> object:
        with torch.inference_mode():
            return model(*args, **kwargs)

    def timed() -> None:  # its own time counts what keeps its books too
        _, begins, ends = replay.timed_replay()
        calls.append([end - begin for begin, end in zip(begins, ends, strict=True)])

    ways = {"eager": eager, "replay": lambda: replay.run(inputs), "timed": timed}
    clock, wait = device.clock_ns, device.synchronize
    taken = interleave(ways, clock_ns=clock, synchronize=wait, warmup=5, rounds=rounds)
    least = _nothing_ns()
    work_ns = sum(max(median(one) - least, 0.0) for one in zip(*calls, strict=True))
    ratio, slow, fast = over(taken["replay"], taken["eager"]), taken["eager"].median_ns, taken["replay"].median_ns
    share, removed = 1 - work_ns / slow, 1 - (fast - work_ns) / (slow - work_ns)
    with torch.no_grad():
        expected, _ = flatten(model(*args, **kwargs), what="output")
    error = relative_error(replay.run(inputs), expected)
    replay.close()
    return {
        **{name: figures(taken[name]) for name in ("eager", "replay")},
        "replay over eager": ratio,
        "work us": work_ns / 1e3,
        "share": share,
        "removed": removed,
        "error": error,
        "met": ratio["verdict"] != "slower" and (share < MEASURABLE or removed >= REMOVED),
    }


def _nothing_ns() -> float:
    """Time a call on no elements, its timing included."""
    samples, nothing = list[int](), torch.empty(0)
    with issuing("cpu"):
        for _ in range(1000):
            start = perf_counter_ns()
            torch.ops.aten.add.Tensor(nothing, nothing)
            samples.append(perf_counter_ns() - start)
    return median(samples)


if __name__ == "__main__":
    raise SystemExit(main())
