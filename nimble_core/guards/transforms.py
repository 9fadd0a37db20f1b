"""Is a call made under a transform: one of ``torch.func``, or forward-mode AD? A replay computes values alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

__all__ = ["transform_of", "transforming"]

# Private names of torch: without them nothing is noticed.
_of_functions: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_wrapped: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False
)
_forward_ad = vars(forward_ad)


def transforming() -> bool:
    """Whether a transform is under way, on these inputs or others. Asked on each call: 0.1 µs."""
    return _of_functions() or _forward_ad.get("_current_level", -1) >= 0


def transform_of(tensors: Sequence[torch.Tensor], *, linked: bool) -> str:
    """Which transform that is under way a call with these inputs is part of, in words; empty if of none.

    One that joins autograd's graph (``linked``) is part of those of ``torch.func`` whatever its inputs.
    """
    if any(map(_wrapped, tensors)) or (linked and _of_functions()):
        return "torch.func (vmap, grad, jvp, …)"
    if _forward_ad.get("_current_level", -1) >= 0 and any(map(_dual, tensors)):
        return "forward-mode AD"
    return ""


def _dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None
