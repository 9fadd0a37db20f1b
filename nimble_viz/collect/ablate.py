"""Estimate what autograd, dispatch and allocation cost an eager run, by leaving out one at a time.

A profiler sees an operator begin and end, and nothing of what the dispatcher does in between. Here the recorded
operators run again in ways that differ in one thing, and the difference is that thing's estimate:

- autograd: the model with autograd, less the model without it;
- allocation: operators as they are, less the same operators writing into given results (``out=``);
- dispatch: as many operators that do nothing.

These are estimates, not measurements of the eager run itself: operators run back to back, with warm caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.measurement import Measurement, summarize
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_ns, format_percent

if TYPE_CHECKING:
    import torch

    from nimble_core.tracing.recording import Issuer, Recording, Step

__all__ = ["Ablation", "Estimate", "ablate", "estimates"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One source of overhead.

    Args:
        name: ``"autograd"``, ``"dispatch"``, ``"allocation"`` or ``"the rest"``.
        ns: nanoseconds of one iteration, 0 or more; None where no operator could show it.
        operators: how many of ``Ablation.operators`` the estimate covers. For others it is part of "the rest".
        basis: the difference that was taken.
    """

    name: str
    ns: float | None
    operators: int
    basis: str


@dataclass(frozen=True, slots=True)
class Ablation:
    """Host time of an eager iteration, estimated by source.

    Args:
        iteration_ns: median host time of the model as it is, with autograd where its parameters require it. On a GPU it
            ends when everything is launched; on the host it includes the operators' own computing.
        operators: operators of one iteration, views and allocations included.
        estimates: by source. With "the rest" they add up to ``iteration_ns``, unless one alone is larger.
        runs: what was timed in turn.
        device: ``"cuda"`` or ``"cpu"``.
    """

    iteration_ns: float
    operators: int
    estimates: tuple[Estimate, ...]
    runs: tuple[Measurement, ...]
    device: str

    def estimate(self, name: str) -> Estimate:
        """Return the estimate called ``name``. Raises KeyError if there is none."""
        found = next((one for one in self.estimates if one.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def __str__(self) -> str:
        head = f"Eager host time by source, ESTIMATED: {format_ns(self.iteration_ns)}, {self.operators:,} operators"
        lines = [self._line(one) for one in self.estimates]
        doubts = [f"  unstable: {run.name}: {text}" for run in self.runs for text in run.warnings]
        return "\n".join([head, *lines, *doubts])

    def _line(self, one: Estimate) -> str:
        time = "unknown" if one.ns is None else format_ns(one.ns)
        share = format_percent(one.ns / self.iteration_ns) if one.ns is not None and self.iteration_ns else ""
        some = f" ({one.operators:,} operators)" if one.operators < self.operators else ""
        return f"  {one.name:<16}{time:>10}{share:>8}  {one.basis}{some}"


def ablate(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    rounds: int = 30,
) -> Ablation:
    """Estimate what autograd, dispatch and allocation cost an eager forward of ``model``.

    The model, its buffers, inputs and random state are left as they were. Prepares nothing and captures nothing.

    Args:
        model: module or function of tensors, on one device.
        args: positional inputs.
        kwargs: keyword inputs.
        rounds: how often all variants are timed in turn.

    Raises:
        InputError: no model, no tensor among the inputs, mixed devices, or no rounds.
        CaptureError: an operator that cannot be recorded.
    """
    from nimble_core.autotune.capture_pipeline import device_for
    from nimble_core.tracing.recorded import Recorded, check_inputs, preparing, state_kept
    from nimble_core.tracing.side_effects import preserved

    if rounds < 1:
        raise InputError(f"rounds={rounds!r}: nothing would be timed", fix="30 or so")
    named = dict(kwargs or {})
    signature = check_inputs(model, args, named)
    device = device_for(signature.device)
    with preparing(model):
        device.warm_up(model, *signature.arguments())
        recording = device.record(model, signature, *signature.arguments())
        recorded = Recorded(model, signature, recording, build_graph(recording.program))
        with preserved(model, draws=()) as guard, state_kept(recorded):
            for _ in range(2):  # what timed runs write, whichever branch a second one takes, is known before
                with guard.watching():
                    model(*args, **named)
            variants, covered = _variants(model, args, named, signature.tensors, recording)
            runs = _timed(variants, device.synchronize, rounds)
    found = estimates({name: run.samples_ns for name, run in runs.items()}, covered, device.kind)
    return Ablation(runs["as it is"].median_ns, covered["operators"], found, tuple(runs.values()), device.kind)


def estimates(samples: Mapping[str, Sequence[float]], covered: Mapping[str, int], device: str) -> tuple[Estimate, ...]:
    """Take medians of the differences between variants that ran next to each other, none below 0. Pure.

    Args:
        samples: host nanoseconds of each variant, round by round, by name.
        covered: how many ``"operators"`` there are, and how many of them have an ``"out="`` form.
        device: ``"cuda"`` or ``"cpu"``.
    """
    whole = median(samples["as it is"])
    count, given = covered["operators"], covered["out="]

    def less(name: str, without: str) -> float:
        return median(a - b for a, b in zip(samples[name], samples[without], strict=True))

    parts = [
        ("autograd", less("as it is", "no autograd"), count, "the model with autograd less the model without"),
        ("dispatch", median(samples["nothing"]), count, "as many operators that do nothing: the least there can be"),
        ("allocation", less("allocating", "out="), given, "operators less the same with out="),
    ]
    found = [
        Estimate(name, max(0.0, ns) if operators or not count else None, operators, basis)
        for name, ns, operators, basis in parts
    ]
    rest = whole - sum(one.ns or 0.0 for one in found)
    what = "Python, modules, arguments, shapes, launches"
    if device != "cuda":
        what = "Python, modules, arguments, shapes, and the operators' own computing"
    return (*found, Estimate("the rest", max(0.0, rest), count, what))


def _timed(
    variants: Mapping[str, Callable[[], object]], synchronize: Callable[[], object], rounds: int
) -> dict[str, Measurement]:
    """Time each variant in turn on the host: the device is idle at its start, and not awaited at its end."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            synchronize()
            began = time.perf_counter_ns()
            run()
            samples[name].append(float(time.perf_counter_ns() - began))
    synchronize()
    return {name: summarize(name, taken, 1) for name, taken in samples.items()}


def _variants(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    recording: Recording,
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return what to time, by name, and how many operators of the recording the variants cover."""
    import torch

    from nimble_core.tracing.recording import Issuer

    issuer = Issuer(recording, [tensor.clone() for tensor in inputs])
    calls = _bound(recording, issuer)
    given = [_given(func, positional, named) for func, positional, named in calls]
    with_out = [(index, one) for index, one in enumerate(given) if one is not None]
    one = torch.empty(1)

    def run_model(mode: Callable[[], Any]) -> Callable[[], object]:
        def run() -> object:
            with mode():
                return model(*args, **kwargs)

        return run

    def run_calls(bound: Sequence[_Bound]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                for func, positional, named in bound:
                    func(*positional, **named)

        return run

    def run_nothing() -> None:
        for _ in calls:
            torch.is_same_size(one, one)

    variants: dict[str, Callable[[], object]] = {
        "as it is": run_model(nullcontext),
        "no autograd": run_model(torch.no_grad),
        "allocating": run_calls([calls[index] for index, _ in with_out]),
        "out=": run_calls([one for _, one in with_out]),
        "nothing": run_nothing,
    }
    return variants, {"operators": len(calls), "out=": len(with_out)}


_Bound = tuple[Callable[..., Any], list[Any], dict[str, Any]]


def _bound(recording: Recording, issuer: Issuer) -> list[_Bound]:
    """Return every step with its tensors, after running each once."""
    import torch

    with torch.no_grad():
        for call in range(len(recording.program.calls)):
            issuer.issue(call)
        issuer.outputs()
    steps = [step for step in recording.steps if all(issuer.tensors[slot] is not None for slot in step.reads)]
    return [_filled(step, issuer.tensors) for step in steps]


def _filled(step: Step, tensors: Any) -> _Bound:
    from nimble_core.tracing.recording import fill

    return step.func, [fill(arg, tensors) for arg in step.args], {k: fill(v, tensors) for k, v in step.kwargs}


def _given(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Bound | None:
    """Return the step with a result to write into; None if the operator has no ``out`` form of its own.

    Torch generates an ``out`` form for every other operator. Most of these allocate a result and copy it, which takes
    more time and not less. They have the tag ``generated``.
    """
    import torch

    packet = getattr(func, "overloadpacket", None)
    if packet is None or func._schema.is_mutable:  # type: ignore[attr-defined]  # what has a packet has a schema
        return None
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]  # likewise
    for overload in packet.overloads():
        other = getattr(packet, overload)
        schema = other._schema
        outs = [argument.name for argument in schema.arguments if argument.is_out]
        if len(outs) != 1 or torch.Tag.generated in other.tags:
            continue
        if [argument.name for argument in schema.arguments if not argument.is_out] != names:
            continue
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or _shares(result, args):
            return None
        try:
            other(*args, **kwargs, **{outs[0]: result})
        except (RuntimeError, TypeError):  # another overload of the same names
            continue
        return other, list(args), {**kwargs, outs[0]: result}
    return None


def _shares(result: torch.Tensor, args: Sequence[Any]) -> bool:
    from nimble_core.tracing.recording import flat_tensors

    held = {tensor.untyped_storage().data_ptr() for tensor in flat_tensors(list(args))}
    return result.untyped_storage().data_ptr() in held
