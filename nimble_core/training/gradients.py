"""Gradients that autograd has found, as its accumulation would give them: dense, and each in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nimble_core.tracing.operator_traits import overlaps_itself, storage_address
from nimble_core.tracing.strides import share_bytes, with_strides_of
from nimble_core.utils.errors import InputError

__all__ = ["in_own_memory", "require_dense", "require_no_tensor_hooks"]


def require_dense(found: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    """Raise InputError for a gradient that is sparse: how much memory it takes depends on data."""
    for one, name in zip(found, names, strict=True):
        if one is not None and one.layout is not torch.strided:
            raise InputError(
                "a gradient is sparse: only dense ones can be replayed",
                where=name,
                fix="make the embedding with sparse=False",
            )


def require_no_tensor_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError for a hook that waits for the gradient of one of these tensors: a whole step calls none."""
    for name, one in named:
        if one.requires_grad and (one._backward_hooks or one._post_accumulate_grad_hooks):
            raise InputError(
                f"{name} has a hook that waits for its gradient, which a whole step does not call",
                fix="remove it, or train in place of the model: prepare(x, training=True), which calls it",
            )


def in_own_memory(
    found: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], others: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Lay gradients out like what they belong to, and copy those that share bytes with each other or with ``others``.

    Gradients are written in place, by users and by some optimizers, and fused optimizers take their layout to be the
    parameter's.
    """
    beside: dict[int, list[torch.Tensor]] = {}
    for one in others:
        beside.setdefault(storage_address(one), []).append(one)
    made = []
    for one, source in zip(found, sources, strict=True):
        if not overlaps_itself(source):
            one = with_strides_of(source, one)
        sharing = beside.setdefault(storage_address(one), [])
        if overlaps_itself(one) or any(share_bytes(one, other) for other in sharing):
            one = one.clone()
        beside.setdefault(storage_address(one), []).append(one)
        made.append(one)
    return made
