"""Does a forward leave each input's shape, strides and memory as they are? A replay changes none of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nimble_core.tracing.operator_traits import Shown, shown_by
from nimble_core.utils.errors import NotStaticError

__all__ = ["require_same_windows", "windows_of"]


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
