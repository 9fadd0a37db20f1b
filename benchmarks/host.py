"""Host replay against eager: how much of the framework's share it removes.

    python -m benchmarks.host --out benchmarks/results/host.json

Timed in turn in one process: eager (``inference_mode``), a replay, and the work alone. The framework's share is what
eager takes beyond W, the work: the sum over the calls of a direct call's duration, less what a call on no elements
takes. W is taken three ways:

- ``in sequence``: the calls one after the other as in the model, so that each finds the caches as the model leaves
  them; medians over the rounds, as everything else.
- ``in replay``: the same calls where they run in the replay, timed there. What a replay still spends outside its calls
  is counted exactly so; that its calls themselves may run at another speed than eager's is not.
- ``isolated``: each call repeated on its own, its operands in cache, the shortest. No run of the model can be that fast
  where its weights exceed the cache: by this W, cache misses count as framework.

Where the share is below ``MEASURABLE`` of eager, timing noise exceeds it and nothing is said about removal. Exits with
1 if the replay is decidedly slower than eager, or removes less than ``REMOVED`` of a measurable share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from benchmarks.common import options, over, write
from examples import models
from nimble_core.autotune.capture_pipeline import capture, schedule_by
from nimble_core.ir.measurement import interleave
from nimble_core.profiling.machine import environment
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.recording import Recording, fill, flat_tensors, issuing
from nimble_core.tracing.signature import Signature
from nimble_core.utils.units import format_ns, format_percent

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
MEASURABLE = 0.05
REMOVED = 0.70


def main() -> int:
    """Measure, print a table, write the file; 1 if a target is missed."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=60, help="samples of each candidate")
    parser.add_argument("--threads", type=int, help="torch's intra-operator threads; by default torch's own choice")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    stamp = environment("cpu")
    results = []
    columns = ("eager", "replay", "W", "ratio", "share", "removed", "in replay")
    print(f"{'model':<24}" + "".join(f"{column:>12}" for column in columns))
    for name in given.models:
        result = measure(name, given.rounds)
        results.append(result)
        medians = {one: taken["median_ns"] for one, taken in result["measurements"].items()}
        ratio = result["ratios"]["single"]
        print(
            f"{name:<24}{format_ns(medians['eager']):>12}{format_ns(medians['single']):>12}"
            f"{format_ns(result['work_ns']['in sequence']):>12}{ratio['value']:>11.3f}x"
            f"{format_percent(result['share']['in sequence']):>12}"
            f"{format_percent(result['removed']['in sequence']) if result['share_is_measurable'] else '-':>12}"
            f"{format_percent(result['removed']['in replay']):>12}"
            f"  {'' if result['met'] else 'MISSED'}",
            flush=True,
        )
    write(given.out, {"results": results}, stamp)
    return 0 if all(result["met"] for result in results) else 1


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    model, args, kwargs = MODELS[name]()
    device, watch = HostDevice(), Stopwatch()
    signature = Signature(args, kwargs)
    device.warm_up(model, args, kwargs)
    recorded = record_static(device, model, signature, strict=True, step=watch)
    with watch("capture single"):
        single = capture(device, recorded, schedule_by(recorded, "single", None, 1))

    def eager() -> object:
        with torch.inference_mode():
            return model(*args, **kwargs)

    timed = _Timed(single)
    sequence = _Sequence(recorded.recording, signature.tensors)
    taken = interleave(
        {
            "eager": eager,
            "single": lambda: single.run(signature.tensors),
            "work": sequence.run,
            "timed": timed.add,
        },
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        warmup=5,
        rounds=rounds,
    )
    work = {
        "in sequence": sequence.work_ns(),
        "in replay": timed.work_ns(),
        "isolated": sequence.isolated_ns(max(rounds // 2, 5)),
    }
    for books in ("work", "timed"):  # their own wall times mean nothing: they keep books between the calls
        del taken[books]
    ratio = over(taken["single"], taken["eager"])
    slow, fast = taken["eager"].median_ns, taken["single"].median_ns
    share = {how: (slow - least) / slow for how, least in work.items()}
    removed = {how: 1 - (fast - least) / (slow - least) for how, least in work.items()}
    measurable = share["in sequence"] >= MEASURABLE
    program = recorded.recording.program
    result = {
        "model": name,
        "calls": len(program.calls),
        "host_steps": program.host_steps,
        "measurements": {one: asdict(value) for one, value in taken.items()},
        "ratios": {"single": ratio},
        "work_ns": work,
        "share": share,
        "share_is_measurable": measurable,
        "removed": removed,
        "nbytes": {"single": single.nbytes},
        "equal": _agreement(model, args, kwargs, signature, single),
        "preparation_s": dict(watch.seconds),
        "met": ratio["verdict"] != "slower" and (not measurable or removed["in sequence"] >= REMOVED),
    }
    single.close()
    return result


class _Timed:
    """The calls of a replay, timed where they run."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable
        self.taken: list[list[int]] = []

    def add(self) -> None:
        """One replay, one sample of each call more."""
        _, begins, ends = self.executable.timed_replay()
        self.taken.append([end - begin for begin, end in zip(begins, ends, strict=True)])

    def work_ns(self) -> float:
        """W from the samples taken."""
        floor = _floor_ns()
        return sum(max(median(one) - floor, 0.0) for one in zip(*self.taken, strict=True))


class _Sequence:
    """The calls of a recording, run and timed one by one."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> None:
        self.steps = recording.steps
        self.before = dict(recording.given) | dict(zip(recording.inputs, inputs, strict=True))
        self.taken: list[list[float]] = [[] for step in self.steps if step.call is not None]
        self.last = {slot: index for index, step in enumerate(self.steps) for slot in (*step.reads, *step.outputs)}

    def run(self) -> None:
        """Once through, one sample of each call more."""
        self._through(lambda call, function, first: self.taken[call].append(first))

    def work_ns(self) -> float:
        """W from the samples taken."""
        floor = _floor_ns()
        return sum(max(median(one) - floor, 0.0) for one in self.taken)

    def isolated_ns(self, repeats: int) -> float:
        """W from ``repeats`` more calls of each."""
        shortest: list[float] = []

        def again(call: int, function: Callable[[], object], first: float) -> None:
            shortest.append(min([first, *(_time(function)[1] for _ in range(repeats))]))

        self._through(again)
        floor = _floor_ns()
        return sum(max(one - floor, 0.0) for one in shortest)

    def _through(self, each: Callable[[int, Callable[[], object], float], object]) -> None:
        tensors = dict(self.before)
        with issuing("cpu"):
            for index, step in enumerate(self.steps):
                args, kwargs = fill(step.args, tensors), {key: fill(value, tensors) for key, value in step.kwargs}
                function = partial(step.func, *args, **kwargs)
                result, ns = _time(function)
                if step.call is not None:
                    each(step.call, function, ns)
                for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True):
                    if slot >= 0:
                        tensors[slot] = tensor
                del args, kwargs, function, result
                for slot in {*step.reads, *step.outputs} - {-1}:
                    if self.last[slot] == index:
                        tensors.pop(slot, None)


def _floor_ns() -> float:
    """Time a call on no elements, its timing included."""
    nothing = torch.empty(0)
    with issuing("cpu"):
        return median(_time(partial(torch.ops.aten.add.Tensor, nothing, nothing))[1] for _ in range(1000))


def _time(function: Callable[[], object]) -> tuple[Any, float]:
    start = perf_counter_ns()
    result = function()
    return result, float(perf_counter_ns() - start)


def _agreement(model: Any, args: Any, kwargs: Any, signature: Signature, executable: Any) -> float:
    """Largest difference from eager relative to its largest value; 0 means every bit."""
    with torch.no_grad():
        expected, _ = flatten(model(*args, **kwargs), what="output")
    pairs = zip(executable.run(signature.tensors), expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


if __name__ == "__main__":
    raise SystemExit(main())
