"""How far tensors are apart, for many of them at once: the host waits for a device once, not once for each number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Gap", "all_finite", "comparable", "finite", "gaps", "numbers"]


@dataclass(frozen=True, slots=True)
class Gap:
    """What lies between two tensors, or the size of one.

    Args:
        norm: Euclidean, in float64; of integers the share of elements that differ (of one alone: 1).
        peak: the greatest element; of integers the same as ``norm``.
    """

    norm: float
    peak: float


def gaps(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor] | None = None) -> list[Gap]:
    """Pair by pair, of tensors of the same shapes; without ``other`` how large each of ``one`` is.

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


def finite(value: float) -> float:
    """What is not a finite number counts as inf."""
    return value if math.isfinite(value) else math.inf


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Values of tensors of one element each, whatever device they are on: each device is waited for once."""
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
    """Whether no element of any of them is infinite or no number."""
    import torch

    return all(numbers([torch.isfinite(comparable(tensor.detach())).all() for tensor in tensors]))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; float8 in float32, which holds each of its numbers: torch compares and fills few of those types."""
    import torch

    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
