"""Does a run write what eager writes? Parameters, running statistics and optimizer state, judged by their updates.

A run that updates nothing leaves parameters that are nearly right, so what is compared is how far each tensor moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.bounds import BOUNDS, Verdict, allowed_noise, working_precision
from nimble_core.validation.distances import finite, numbers
from nimble_core.validation.equality import storable

__all__ = ["Update", "wrong_updates"]

_FLIPS = 4


@dataclass(frozen=True, slots=True)
class Update:
    """One floating-point tensor of the state, before and after one run from the same state on the same inputs.

    Args:
        name: what messages call it (``"conv.weight"``, ``"exp_avg of conv.weight"``).
        before: before the run.
        after: after the run that is judged.
        eager: after eager's.
        perturbed: after eager's with its results perturbed; counts for nothing if it is not finite.
        jumps: whether an element's update can jump when a gradient's rounding changes: a parameter whose optimizer
            divides gradients by their size (Adam and its like).
    """

    name: str
    before: torch.Tensor
    after: torch.Tensor
    eager: torch.Tensor
    perturbed: torch.Tensor
    jumps: bool = False


class _Measured(NamedTuple):
    """Numbers about an update: ``e`` is eager's, ``p`` the perturbed one, ``d`` the one that is judged."""

    size: float  # ‖e‖
    greatest: float  # max |e|
    changed: float  # elements of e that are not 0
    noise: float  # ‖p - e‖
    perturbed: float  # ‖p‖
    along: float  # ⟨e, p⟩
    error: float  # ‖d - e‖
    updated: float  # whether d is not 0
    stored: float  # ‖after‖, of eager


def wrong_updates(name: str, updates: Sequence[Update], *, lowest: str = "") -> EqualityCheck | None:
    """Say how a run's updates differ from eager's; None if they do not.

    With ``d = after - before`` of the judged run, ``e`` of eager's and ``p`` of the perturbed one, ``n`` elements::

        ‖d - e‖ <= tolerance ‖e‖ + ulp ‖after‖ + allowed_noise(‖p - e‖) + 2 max|e| √flips

    - ``tolerance``: of the lowest precision at work, from ``BOUNDS``.
    - ``ulp``: what is stored is rounded to the tensor's own type, which may be coarse beside the update.
    - ``allowed_noise``: what rounding may change. Adam's first update is ``lr g / (|g| + eps)``, ± lr whatever the size
      of ``g``: where ``g`` is rounding only it has either sign, in the perturbed step too. So a convolution's bias
      before BatchNorm may move by ``lr`` anywhere; but no further: where updates jump, ``2 max|e| √n`` bounds all terms
      but ``ulp``.
    - ``flips`` (only where ``jumps``): ``min(4, n // 16)`` elements may have the other sign. About ``n u`` of ``n``
      gradients are as small as rounding ``u``, a few of a large model's in all: too few for one perturbed step to show
      where. Less than a quarter of the elements can hide in it, so it never hides a tensor that was not updated.

    A tensor that did not change at all is wrong if the angle between ``e`` and ``p`` is less than 60 degrees: then the
    update is no matter of rounding, however large the bound (in half precision ``‖p - e‖`` alone can be half of
    ``‖e‖``). Updates of eager's that are not finite are not judged.

    Args:
        name: of what is judged.
        updates: the state; may be empty.
        lowest: the lowest precision that the model computes in.

    Returns:
        A check that does not pass: ``relative_error`` and ``tolerance`` are of the tensor that uses up most of its
        bound, relative to ``‖e‖``; ``input_effect`` is its update by its bound.
    """
    read = iter(numbers(list(chain(*map(_measures, updates)))))
    measured = [_Measured(*islice(read, len(_Measured._fields))) for _ in updates]
    pairs = [(one, found) for one, found in zip(updates, measured, strict=True) if math.isfinite(found.size)]
    verdicts = [_verdict(one, found, lowest) for one, found in pairs]
    missing = [one.name for one, found in pairs if not found.updated and _certain(found, one.eager.numel())]
    wrong = [one for one in verdicts if not one.right]
    if not wrong and not missing:
        return None
    worst = max(verdicts, key=lambda one: one.margin)
    scale = worst.effect or 1.0
    if missing:
        reason = f"{_listed(missing)} not updated"
    else:
        parts = f"{worst.error / scale:.1e}, at most {worst.bound / scale:.1e} would pass"
        more = f" ({len(wrong)} of {len(verdicts)} tensors differ)" if len(wrong) > 1 else ""
        reason = f"the update of {worst.name} differs from eager's by {parts}{more}"
    return EqualityCheck(
        name,
        storable(worst.error / scale),
        storable(worst.bound / scale),
        storable(worst.effect / (worst.bound or scale)),
        False,
        reason,
    )


def _measures(update: Update) -> list[torch.Tensor]:
    """Return the numbers of ``_Measured``, in its order, as scalars on the update's device."""
    before, after, eager, moved = (
        one.detach().double() for one in (update.before, update.after, update.eager, update.perturbed)
    )
    d, e, p = after - before, eager - before, moved - before
    along = torch.vdot(e.flatten(), p.flatten())
    of_eager = [e.norm(), e.abs().max(), e.count_nonzero()]
    return [*of_eager, (p - e).norm(), p.norm(), along, (d - e).norm(), d.any(), eager.norm()]


def _verdict(update: Update, found: _Measured, lowest: str) -> Verdict:
    count, precision = update.eager.numel(), working_precision([update.eager], lowest)
    stored = torch.finfo(update.eager.dtype).eps * found.stored
    bound = BOUNDS[precision].tolerance * found.size + stored
    if math.isfinite(found.noise):
        bound += allowed_noise(found.noise, count, found.size, precision)
    if update.jumps:
        flips = min(_FLIPS, count // 16)
        bound = min(bound + 2 * found.greatest * math.sqrt(flips), stored + 2 * found.greatest * math.sqrt(count))
    return Verdict(finite(found.error), bound, found.size, name=update.name)


def _certain(found: _Measured, count: int) -> bool:
    """Tell whether an update is no matter of rounding, nor of the chance of a few elements."""
    return found.changed >= min(4, count) and found.along > 0.5 * found.size * found.perturbed > 0


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'was' if len(names) == 1 else 'were'}"
