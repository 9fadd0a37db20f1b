"""Host replay against eager: how much of the framework's share it removes.

    python -m benchmarks.host --out benchmarks/results/host.json

Timed in turn in one process: eager (``inference_mode``), a replay, and the work alone. The framework's share is what
eager takes beyond W, the work: the calls one after the other as in the model, so that each finds the caches as the
model leaves them; medians over the rounds, each less what a call on no elements takes.

Where the share is below ``MEASURABLE`` of eager, timing noise exceeds it and nothing is said about removal. Exits with
1 if the replay is decidedly slower than eager, or removes less than ``REMOVED`` of a measurable share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from nimble_core.tracing.recording import Recording, fill, flat_tensors, issuing
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
        gone = f"{removed} of it removed" if found["share is measurable"] else "too little to tell what is removed"
        print(f"{name:24}eager {eager}, replay {replay}, {found['replay over eager']['value']:.3f}x;", end=" ")
        print(f"framework's share {share}, {gone}{'' if found['met'] else '  MISSED'}", flush=True)
    write(given.out, {"models": results}, stamp)
    return int(not all(found["met"] for found in results.values()))


def measure(model: Any, args: Any, kwargs: Any, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    device, recorded = recorded_on(model, args, kwargs)
    replay = capture(device, recorded, schedule_by(recorded, "single", None, 1))
    inputs = recorded.signature.tensors

    def eager() -> object:
        with torch.inference_mode():
            return model(*args, **kwargs)

    work = _Sequence(recorded.recording, inputs)
    ways = {"eager": eager, "replay": lambda: replay.run(inputs), "work": work.run}
    clock, wait = device.clock_ns, device.synchronize
    taken = interleave(ways, clock_ns=clock, synchronize=wait, warmup=5, rounds=rounds)
    ratio, work_ns = over(taken["replay"], taken["eager"]), work.ns()  # its wall time counts what keeps its books too
    slow, fast = taken["eager"].median_ns, taken["replay"].median_ns
    share, removed = 1 - work_ns / slow, 1 - (fast - work_ns) / (slow - work_ns)
    with torch.no_grad():
        expected, _ = flatten(model(*args, **kwargs), what="output")
    result = {
        "calls": recorded.graph.size,
        "eager": figures(taken["eager"]),
        "replay": figures(taken["replay"]),
        "replay over eager": ratio,
        "work us": work_ns / 1e3,
        "share": share,
        "share is measurable": share >= MEASURABLE,
        "removed": removed,
        "error": relative_error(replay.run(inputs), expected),
        "met": ratio["verdict"] != "slower" and (share < MEASURABLE or removed >= REMOVED),
    }
    replay.close()
    return result


class _Sequence:
    """The calls of a recording, run and timed one by one."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> None:
        self.steps = recording.steps
        self.before = dict(recording.given) | dict(zip(recording.inputs, inputs, strict=True))
        self.taken: list[list[int]] = [[] for step in self.steps if step.call is not None]
        self.last = {slot: index for index, step in enumerate(self.steps) for slot in (*step.reads, *step.outputs)}

    def run(self) -> None:
        """Once through, one sample of each call more."""
        tensors = dict(self.before)
        with issuing("cpu"):
            for index, step in enumerate(self.steps):
                args, kwargs = fill(step.args, tensors), {key: fill(value, tensors) for key, value in step.kwargs}
                result, ns = _timed(partial(step.func, *args, **kwargs))
                if step.call is not None:
                    self.taken[step.call].append(ns)
                for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True):
                    if slot >= 0:
                        tensors[slot] = tensor
                del args, kwargs, result
                for slot in {*step.reads, *step.outputs} - {-1}:
                    if self.last[slot] == index:
                        tensors.pop(slot, None)

    def ns(self) -> float:
        """W from the samples taken."""
        nothing = torch.empty(0)
        with issuing("cpu"):
            none = median(_timed(partial(torch.ops.aten.add.Tensor, nothing, nothing))[1] for _ in range(1000))
        return sum(max(median(one) - none, 0.0) for one in self.taken)


def _timed(function: Callable[[], object]) -> tuple[Any, int]:
    start = perf_counter_ns()
    result = function()
    return result, perf_counter_ns() - start


if __name__ == "__main__":
    raise SystemExit(main())
