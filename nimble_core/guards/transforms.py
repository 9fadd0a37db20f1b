"""Is a call made under a transform: one of ``torch.func``, or forward-mode AD? A replay computes values alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from nimble_core.torch_compat.autograd import forward_ad_level, transforms_active, wrapped

__all__ = ["transform_of", "transforming"]


def transforming() -> bool:
    """Whether a transform is under way, on these inputs or others. Asked on each call: 0.1 µs."""
    return transforms_active() or forward_ad_level() >= 0


def transform_of(tensors: Sequence[torch.Tensor], *, linked: bool) -> str:
    """Which transform that is under way a call with these inputs is part of, in words; empty if of none.

    One that joins autograd's graph (``linked``) is part of those of ``torch.func`` whatever its inputs.
    """
    if any(map(wrapped, tensors)) or (linked and transforms_active()):
        return "torch.func (vmap, grad, jvp, …)"
    if forward_ad_level() >= 0 and any(map(_dual, tensors)):
        return "forward-mode AD"
    return ""


def _dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None
