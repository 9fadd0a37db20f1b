"""Shape, strides and memory of tensors around a run: inputs have to keep theirs, and to share none that is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nimble_core.tracing.operator_traits import Shown, shown_by
from nimble_core.tracing.side_effects import Change, Changes
from nimble_core.tracing.strides import extent
from nimble_core.utils.errors import InputError, NotStaticError

__all__ = ["Apart", "KeptWindows", "require_same_windows", "windows_of"]


def windows_of(tensors: Sequence[torch.Tensor]) -> list[Shown]:
    """Return the window that each tensor shows now, for ``require_same_windows``."""
    return [shown_by(tensor) for tensor in tensors]


def require_same_windows(before: Sequence[Shown], tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise NotStaticError if a tensor shows another window than before: ``x.t_()`` changes the caller's tensor."""
    for was, tensor, name in zip(before, tensors, names, strict=True):
        if shown_by(tensor) != was:
            raise NotStaticError(
                f"the forward changes the shape or the memory of {name} in place, which a replay would not",
                where=name,
                fix="use the form that returns a new tensor: x.t() instead of x.t_(), x.squeeze() instead of "
                "x.squeeze_(); to replace values, x.copy_(...)",
            )


class KeptWindows:
    """Windows of tensors as they are now, to be given back to tensors that a run gives other ones."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._before = [(name, tensor, tensor.detach()) for name, tensor in tensors]

    def restore(self) -> Changes:
        """Give tensors their windows back; returns what was changed, by ``<name>.data``."""
        moved: Changes = {}
        for name, tensor, alias in self._before:
            if shown_by(tensor) != shown_by(alias):
                path = f"{name}.data"
                moved[path] = Change(alias, tensor.detach(), path, name.rpartition(".")[2])
        for _, tensor, alias in self._before:
            if shown_by(tensor) != shown_by(alias):
                tensor.data = alias
        return moved


class Apart:
    """Refuses inputs that share memory with one that the replay writes.

    Recorded calls are ordered, and their memory is planned, for inputs that do not. Interleaved windows of one tensor
    count as sharing it.
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
                return self._require_each(spans)
            before = end
        return None

    def _require_each(self, spans: Sequence[tuple[int, int]]) -> None:
        for written in self._written:
            start, end = spans[written]
            for at, (begins, ends) in enumerate(spans):
                if at != written and begins < end and start < ends:
                    raise InputError(
                        f"{self._names[written]}, which the model writes in place, shares memory with "
                        f"{self._names[at]}: prepared for inputs that do not",
                        fix=f"pass a clone of one of them: {self._names[at]}.clone()",
                    )
