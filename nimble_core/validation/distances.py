"""How far tensors are apart, for many of them at once: the host waits for a device once, not once for each number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "Gap",
    "all_finite",
    "comparable",
    "finite",
    "gaps",
    "infinities",
    "numbers",
    "relative_error",
    "same_shapes",
    "without",
]


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance of two tensors, or the size of one.

    Args:
        norm: Euclidean, in float64; of integers the share of elements that differ (of one alone: 1).
        peak: the greatest element; of integers the same as ``norm``.
    """

    norm: float
    peak: float


def gaps(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor] | None = None) -> list[Gap]:
    """Return the distances of pairs of tensors of the same shapes; without ``other`` the size of each of ``one``.

    What is not a finite number counts as inf, what has no elements as 0.

    >>> import torch
    >>> gaps([torch.tensor([3.0, 4.0]), torch.tensor([1, 2])], [torch.zeros(2), torch.tensor([1, 3])])
    [Gap(norm=5.0, peak=4.0), Gap(norm=0.5, peak=0.5)]
    """
    import torch

    found: list[torch.Tensor] = []
    for at, tensor in enumerate(one):
        a, b = tensor.detach(), None if other is None else other[at].detach()
        if not a.numel():
            share = torch.zeros((), dtype=torch.float64)
            found += [share, share]
        elif not (a.is_floating_point() or a.is_complex()):
            share = torch.ones((), dtype=torch.float64) if b is None else (a != b).double().mean()
            found += [share, share]
        else:
            wide = torch.complex128 if a.is_complex() else torch.float64
            gap = a.to(wide) if b is None else a.to(wide) - b.to(wide)
            found += [gap.norm(), gap.abs().max()]
    read = list(map(finite, numbers(found)))
    return [Gap(norm, peak) for norm, peak in zip(read[::2], read[1::2], strict=True)]


def relative_error(out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the worst ``‖out - reference‖ / ‖reference‖`` of the tensors, in float64; inf if one is not finite.

    Of integer and boolean tensors it is the share of elements that differ. Another number or shape of tensors is inf.
    """
    if not same_shapes(out, reference):
        return math.inf
    pairs = zip(gaps(reference, out), gaps(reference), strict=True)
    return max((finite(apart.norm / (size.norm or 1.0)) for apart, size in pairs), default=0.0)


def same_shapes(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Tell whether both are as many tensors of the same shapes."""
    return [a.shape for a in one] == [b.shape for b in other]


def finite(value: float) -> float:
    """Return ``value``, or inf if it is not a finite number."""
    return value if math.isfinite(value) else math.inf


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of one-element tensors on any devices; each device is waited for once."""
    import torch

    places: dict[torch.device, list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault(scalar.device, []).append(place)
    found = [0.0] * len(scalars)
    for own in places.values():
        values = torch.stack([scalars[place].reshape(()).to(torch.float64) for place in own])
        for place, value in zip(own, values.tolist(), strict=True):
            found[place] = value
    return found


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether every element of every tensor is a finite number."""
    import torch

    return all(numbers([torch.isfinite(comparable(tensor.detach())).all() for tensor in tensors]))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, float8 as float32, which holds each of its numbers: torch compares few of those types."""
    import torch

    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def infinities(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return where each output is infinite; None if nowhere.

    Masked logits are, and so is what pads the sums that attention saves. Infinite complex numbers are not looked for:
    they make checks void.
    """
    import torch

    if all_finite(outputs):
        return None
    return [torch.zeros_like(one, dtype=torch.bool) if one.is_complex() else comparable(one).isinf() for one in outputs]


def without(where: Sequence[torch.Tensor] | None, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return ``outputs`` with zeros ``where`` others are infinite."""
    if where is None:
        return outputs
    return [comparable(one).masked_fill(at, 0) for at, one in zip(where, outputs, strict=True)]
