"""Do tensors share memory? Compared element by element: interleaved windows of one tensor do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from nimble_core.tracing.strides import extent
from nimble_core.utils.errors import InputError

__all__ = ["Apart", "share_memory"]

Steps = tuple[tuple[int, int], ...]
"""Positions ``Σ i·step`` with ``0 ≤ i < count``: ``(step, count)`` each, steps positive, the largest first; bytes."""


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two dense tensors have a byte in common.

    >>> rows = torch.zeros(4, 6)
    >>> share_memory(rows[:3], rows[1:]), share_memory(rows[:, :3], rows[:, 3:]), share_memory(rows, rows.t())
    (True, False, True)
    """
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    return _meet(other.data_ptr() - one.data_ptr(), _steps(one), _steps(other))


def _steps(tensor: torch.Tensor) -> Steps:
    size = tensor.itemsize
    steps = ((step * size, count) for step, count in zip(tensor.stride(), tensor.shape, strict=True))
    return (*sorted((one for one in steps if one[0] and one[1] > 1), reverse=True), (1, size))


@lru_cache(maxsize=4096)
def _meet(distance: int, one: Steps, other: Steps) -> bool:
    """Whether positions of ``one`` are among those of ``other``, which begin ``distance`` bytes later.

    The largest step is settled first: it leaves few distances that the smaller ones can make up for.
    """
    if not -_reach(other) <= distance <= _reach(one):
        return False
    if not one and not other:
        return True
    step = max(steps[0][0] for steps in (one, other) if steps)
    count, inner = (one[0][1], one[1:]) if one and one[0][0] == step else (1, one)
    others, beside = (other[0][1], other[1:]) if other and other[0][0] == step else (1, other)
    least = max(1 - others, -((_reach(inner) - distance) // step))
    most = min(count - 1, (distance + _reach(beside)) // step)
    return any(_meet(distance - step * ahead, inner, beside) for ahead in range(least, most + 1))


def _reach(steps: Steps) -> int:
    return sum(step * (count - 1) for step, count in steps)


class Apart:
    """Refuses inputs that share memory with one that the replay writes.

    Recorded calls are ordered, and their memory is planned, for inputs that do not.

    Args:
        tensors: inputs as they were at preparation.
        written: positions of those that are written.
        names: what users call the inputs.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], written: Sequence[int], names: Sequence[str]) -> None:
        self._written, self._names = tuple(written), tuple(names)
        self._usual = [(tensor.stride(), extent(tensor)) for tensor in tensors]

    def require(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise InputError that names two inputs, of which one is written, that share memory. O(n log n)."""
        spans = [
            (start := tensor.data_ptr(), start + (nbytes if tensor.stride() == strides else extent(tensor)))
            for tensor, (strides, nbytes) in zip(tensors, self._usual, strict=True)
        ]
        before = 0
        for start, end in sorted(spans):
            if start < before:  # where any two meet, two that are next to each other do
                return self._require_each(tensors, spans)
            before = end
        return None

    def _require_each(self, tensors: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> None:
        for written in self._written:
            start, end = spans[written]
            for at, (begins, ends) in enumerate(spans):
                if at != written and begins < end and start < ends and share_memory(tensors[written], tensors[at]):
                    raise InputError(
                        f"{self._names[written]}, which the model writes in place, shares memory with "
                        f"{self._names[at]}: prepared for inputs that do not",
                        fix=f"pass a clone of one of them: {self._names[at]}.clone()",
                    )
