"""Are a replay's outputs eager's outputs? Judged by the table of bounds; a check that shows nothing is void.

Outputs of other kernels are held against float64: a replay is right if it is as close to that as eager is, up to a
small factor. Gradients need more. One that is zero in exact arithmetic (of a convolution's bias before BatchNorm, of
the keys' bias in attention) consists of rounding only, and a branch that rounding decides (ReLU, max pooling) moves a
gradient by orders of magnitude more than rounding itself. So eager runs once more with its results perturbed, and a
replay may be off by as much as that moves a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.bounds import BOUNDS, PEAK, Verdict, allowed_error, allowed_noise, working_precision
from nimble_core.validation.distances import (
    Gap,
    all_finite,
    comparable,
    gaps,
    infinities,
    numbers,
    relative_error,
    same_shapes,
    without,
)

if TYPE_CHECKING:
    import torch

__all__ = ["DROWNED", "check_equality", "storable"]

Run = tuple[int, "Sequence[torch.Tensor]"]
"""Which case, and outputs for it."""

DROWNED = "void: eager's outputs move by only"
"""How the reason of a check begins that says that inputs matter too little for its tolerance."""


def check_equality(
    name: str,
    replay: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    cases: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    *,
    references: Sequence[Sequence[torch.Tensor] | None] | None = None,
    lowest: str = "",
    perturbed: Sequence[Sequence[torch.Tensor]] | None = None,
    names: Sequence[str] = (),
    slack: float = 1.0,
) -> EqualityCheck:
    """Run ``replay`` twice on every case and judge its outputs.

    Outputs are compared with eager's, by ``BOUNDS``; with ``perturbed`` outputs (of a training step) by what the
    perturbation did to eager's; with ``references`` by eager's own error against float64, unless eager has no digit of
    an output right. Single elements have bounds of their own: a few stale ones among millions are nothing to a norm.

    Of the outputs at least one has to move between inputs by ten times its bound, or ten times what the replay is off
    there. Of a training step only the first counts: its loss, which hardly moves, would answer for gradients that
    rounding drowns.

    Where eager is infinite, a replay has to be as infinite; what is compared is the rest. NaN makes the check void.

    Args:
        name: of what is judged.
        replay: from input tensors to output tensors.
        cases: ``(inputs, eager outputs)`` pairs, two at least, on different inputs.
        references: for each case the outputs in float64. Not used if one is None, not finite, or of another shape.
        lowest: the lowest precision that the model computes in (``lowest_precision``); empty: that of its outputs.
        perturbed: for each case eager's outputs with its results perturbed, in place of ``references``. Not used if not
            finite, or of another shape.
        names: what messages call the outputs (``"gradient of conv.weight"``); none by default.
        slack: how many times what is allowed an output may be off.
    """
    eager = [outputs for _, outputs in cases]
    runs: list[Run] = []
    for case, (inputs, _) in [*enumerate(cases), *enumerate(cases)]:
        # Clones: a model that writes its inputs must not spoil the case for the next replay.
        runs.append((case, replay([tensor.clone() for tensor in inputs])))
    # Compared after the last run: an output overwritten by a later run shows.
    precision = working_precision(eager[0], lowest)
    infinite = [infinities(outputs) for outputs in eager]
    reason = _incomparable(runs, eager, infinite, precision)
    if reason:
        error = max(relative_error(out, eager[case]) for case, out in runs)
        return EqualityCheck(name, storable(error), BOUNDS[precision].tolerance, 0.0, False, reason)
    truth, moved = (_usable(others, eager, infinite) for others in (references, perturbed))
    runs = [(case, without(infinite[case], out)) for case, out in runs]
    eager = [without(where, out) for where, out in zip(infinite, eager, strict=True)]
    verdicts = _verdicts(runs, eager, truth, moved, precision, slack)
    if names:
        verdicts = [replace(one, name=name) for one, name in zip(verdicts, names, strict=True)]
    error = max(relative_error(out, eager[case]) for case, out in runs)
    return _check_of(name, verdicts, None if moved else error)


def storable(value: float) -> float:
    """Return a number that every file format can hold."""
    return value if math.isfinite(value) else 1e300


def _check_of(name: str, verdicts: Sequence[Verdict], error: float | None) -> EqualityCheck:
    """Sum up verdicts on all outputs; ``error`` is the worst against eager, None for a training step."""
    by_truth = [one for one in verdicts if one.own_error is not None]
    shown = max(by_truth or verdicts, key=lambda one: one.margin)
    meaningful = any(one.telling or (one.followed and error is not None) for one in verdicts)
    reason = _reason(verdicts, meaningful)
    return EqualityCheck(
        name,
        storable(shown.error if error is None else error),
        storable(shown.bound),
        storable(max(one.effect for one in verdicts)),
        not reason,
        reason,
        eager_error=storable(shown.own_error or 0.0),
        reference_error=storable(shown.error) if by_truth else 0.0,
        reference="float64" if by_truth else "eager",
    )


def _incomparable(
    runs: Sequence[Run],
    eager: Sequence[Sequence[torch.Tensor]],
    infinite: Sequence[Sequence[torch.Tensor] | None],
    precision: str,
) -> str:
    """Say why numbers are not even looked at; empty if they are."""
    if not all_finite(one for where, out in zip(infinite, eager, strict=True) for one in without(where, out)):
        return "void: eager's own outputs are not finite"
    if not any(tensor.numel() for tensor in eager[0]):
        return "void: there are no outputs to compare"
    if not all(same_shapes(out, eager[case]) for case, out in runs):
        return "outputs differ from eager's in number or shape"
    if not all(_equal_at(infinite[case], out, eager[case]) for case, out in runs):
        # In so small a range rounding may decide what overflows.
        void = "void: " if precision.startswith(("float16", "float8")) else ""
        return f"{void}outputs differ from eager's in which numbers are infinite"
    return ""


def _equal_at(where: Sequence[torch.Tensor] | None, out: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> bool:
    pairs = zip(where or (), map(comparable, out), map(comparable, eager), strict=False)
    return all(numbers([((a == b) | ~at).all() for at, a, b in pairs]))


def _usable(
    others: Sequence[Sequence[torch.Tensor] | None] | None,
    eager: Sequence[Sequence[torch.Tensor]],
    infinite: Sequence[Sequence[torch.Tensor] | None],
) -> list[Sequence[torch.Tensor]] | None:
    """Return outputs of another run for every case, without what is infinite in eager; None if they cannot be used."""
    found = [one for one in others or () if one is not None]
    if len(found) != len(eager) or not all(map(same_shapes, found, eager)):
        return None
    found = [without(where, out) for where, out in zip(infinite, found, strict=True)]
    return found if all_finite(one for out in found for one in out) else None


def _verdicts(
    runs: Sequence[Run],
    eager: Sequence[Sequence[torch.Tensor]],
    truth: Sequence[Sequence[torch.Tensor]] | None,
    moved: Sequence[Sequence[torch.Tensor]] | None,
    precision: str,
    slack: float,
) -> list[Verdict]:
    """Judge each output."""
    scales = [gaps(outputs) for outputs in eager]
    if moved is not None:
        # One scale for all cases: the norm of what is rounding only says little in any one of them.
        scales = [_greatest(scales)] * len(scales)
    effects = [gap.norm for gap in _apart([(0, eager[1])], eager, scales)]
    errors = _apart(runs, eager, scales)
    noises = [Gap(0.0, 0.0)] * len(errors) if moved is None else _apart([*enumerate(moved)], eager, scales)
    by_eager = []
    for tensor, scale, effect, error, noise in zip(eager[0], scales[0], effects, errors, noises, strict=True):
        # A gradient that is zero in both cases has to be zero.
        floor = slack * BOUNDS[precision].tolerance if moved is None or scale.norm else 0.0
        allowed = partial(allowed_noise, count=tensor.numel(), size=1.0, precision=precision)
        by_eager.append(_verdict(error, _bounds(noise, allowed, floor), effect))
    if truth is None:
        return by_eager
    scales = [gaps(outputs) for outputs in truth]
    errors, own_errors = _apart(runs, truth, scales), _apart([*enumerate(eager)], truth, scales)
    by_truth = []
    for tensor, effect, error, own in zip(eager[0], effects, errors, own_errors, strict=True):
        allowed = partial(allowed_error, count=tensor.numel())
        bounds = _bounds(own, allowed, BOUNDS[precision].floor)
        by_truth.append(_verdict(error, Gap(slack * bounds.norm, slack * bounds.peak), effect, own))
    pairs = zip(by_eager, by_truth, strict=True)
    return [one if one.telling and one.right and not other.telling else other for one, other in pairs]


def _bounds(known: Gap, allowed: Callable[[float], float], floor: float) -> Gap:
    """Return how far an output may be off where an honest one is off by ``known``."""
    return Gap(max(allowed(known.norm), floor), max(allowed(known.peak), floor))


def _greatest(measured: Iterable[Sequence[Gap]]) -> list[Gap]:
    """Return the greatest norm and peak of each output."""
    return [Gap(max(gap.norm for gap in one), max(gap.peak for gap in one)) for one in zip(*measured, strict=True)]


def _apart(runs: Sequence[Run], target: Sequence[Sequence[torch.Tensor]], scales: Sequence[Sequence[Gap]]) -> list[Gap]:
    """Return how far each output is off in its worst run, relative to the scales of the run's case."""
    measured = []
    for case, out in runs:
        pairs = zip(gaps(target[case], out), scales[case], strict=True)
        measured.append([Gap(gap.norm / (size.norm or 1.0), gap.peak / (size.peak or 1.0)) for gap, size in pairs])
    return _greatest(measured)


def _verdict(error: Gap, bounds: Gap, effect: float, own: Gap | None = None) -> Verdict:
    """Judge an output by its norm, or by its single elements where only they are wrong."""
    by_norm = Verdict(error.norm, bounds.norm, effect, own.norm if own else None)
    by_peak = Verdict(error.peak, PEAK * bounds.peak, effect, own.peak if own else None, peak=True)
    return by_peak if by_norm.right and not by_peak.right else by_norm


def _reason(verdicts: Sequence[Verdict], meaningful: bool) -> str:
    """Say why a check does not pass; empty if it does."""
    worst = max(verdicts, key=lambda one: one.margin)
    subject = f"{worst.name} differs" if worst.name else "outputs differ"
    where = " at one element" if worst.peak else ""
    if not worst.right and worst.own_error is None:
        return f"{subject} from eager's{where} by {worst.error:.1e}, tolerance {worst.bound:.0e}"
    if not worst.right:
        own = f"eager's by {worst.own_error:.1e}"
        return f"{subject} from float64's{where} by {worst.error:.1e}, {own}: at most {worst.bound:.1e} would pass"
    if meaningful:
        return ""
    most = max(verdicts, key=lambda one: one.effect)
    return f"{DROWNED} {most.effect:.1e} between inputs, too little for tolerance {most.bound:.0e}"
