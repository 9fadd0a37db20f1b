"""What shape inference costs by itself, timed in a process of its own: ``shape_inference``.

An operator on meta tensors infers shapes and does no work. But torch puts Python functions in the place of most of its
own for meta tensors, a hundred times as slow as what eager runs. The child process, which is this module as a script,
takes them away again, and that is why it is one: what is left is the code that eager runs, for operators of which shape
inference is a step of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch

from nimble_core.torch_compat.members import META_REGISTRATIONS
from nimble_core.tracing.recording import Recording, Slot

__all__ = ["described", "shape_inference"]

_LIMIT_S = 120
_PYTHON_ONES = "_meta_lib_dont_use_me_use_register_meta"


def shape_inference(recording: Recording, rounds: int) -> tuple[float, int]:
    """Nanoseconds that shape inference takes in one iteration, and of how many operators that is; ``(0.0, 0)`` if none.

    Runs a child process for a few seconds. Where it fails, nothing is known.
    """
    calls = list(described(recording))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"calls": calls, "rounds": rounds}),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0, 0
    return float(found["ns"]), int(found["operators"])


def described(recording: Recording) -> Iterable[list[Any]]:
    """Torch's own operators of a recording as JSON can hold them: name, overload, arguments, keyword arguments."""
    for step in recording.steps:
        packet = getattr(step.func, "overloadpacket", None)
        if packet is None or getattr(step.func, "namespace", "") != "aten" or not recording.refs:
            continue
        try:
            args = [_encode(arg, recording) for arg in step.args]
            kwargs = {name: _encode(value, recording) for name, value in step.kwargs}
        except TypeError:
            continue
        yield [packet.__name__, step.func._overloadname, args, kwargs]  # type: ignore[attr-defined]  # what has a packet has one


def _encode(arg: Any, recording: Recording) -> Any:
    if isinstance(arg, Slot):
        ref = recording.refs[arg.index]
        return {"sizes": ref.sizes, "strides": ref.strides, "dtype": ref.dtype}
    if isinstance(arg, list | tuple):
        return [_encode(one, recording) for one in arg]
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        return {"device": "meta"}
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    raise TypeError(type(arg).__name__)


def _decode(arg: Any) -> Any:
    if isinstance(arg, list):
        return [_decode(one) for one in arg]
    if not isinstance(arg, dict):
        return arg
    if "sizes" in arg:
        dtype = getattr(torch, arg["dtype"])
        return torch.empty_strided(arg["sizes"], arg["strides"], dtype=dtype, device="meta")
    return torch.device("meta") if "device" in arg else getattr(torch, arg["dtype"])


def _run(calls: Sequence[Sequence[Any]], rounds: int) -> dict[str, float]:
    """In the child: time operators on meta tensors, and as many that do nothing, in turn."""
    getattr(META_REGISTRATIONS.require(), _PYTHON_ONES)._destroy()
    ready = []
    for name, overload, args, kwargs in calls:
        func = getattr(getattr(torch.ops.aten, name), overload)
        bound = func, _decode(args), {key: _decode(value) for key, value in kwargs.items()}
        try:
            bound[0](*bound[1], **bound[2])
        except (NotImplementedError, RuntimeError, TypeError):  # its shapes are inferred where its work is done
            continue
        ready.append(bound)
    pair = torch.empty(1, device="meta"), torch.empty(1, device="meta")
    nothing = torch.ops.aten.is_same_size.default
    samples = []
    for _ in range(rounds):
        inferred = _timed_ns(lambda: [func(*args, **kwargs) for func, args, kwargs in ready])
        idle = _timed_ns(lambda: [nothing(*pair) for _ in ready])
        samples.append(inferred - idle)
    return {"ns": max(0.0, median(samples)) if ready else 0.0, "operators": len(ready)}


def _timed_ns(run: Callable[[], object]) -> int:
    began = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - began


if __name__ == "__main__":
    _given = json.load(sys.stdin)
    with torch.no_grad():
        print(json.dumps(_run(_given["calls"], _given["rounds"])))
