"""Shape, strides and memory of tensors around a run: inputs have to keep theirs, other tensors get them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nimble_core.tracing.operator_traits import Shown, shown_by
from nimble_core.tracing.side_effects import Change, Changes
from nimble_core.utils.errors import NotStaticError

__all__ = ["KeptWindows", "require_same_windows", "windows_of"]


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
    """Windows of tensors as they are now, to be given back to tensors that a run gives other ones.

    Args:
        tensors: with their names.
    """

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
