"""Gradients that autograd has found, as its accumulation would give them: dense, and each in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nimble_core.tracing.operator_traits import overlaps_itself, storage_address
from nimble_core.tracing.strides import share_bytes, with_strides_of
from nimble_core.utils.errors import InputError

__all__ = ["gradients_of", "require_no_tensor_hooks"]


def gradients_of(
    outputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor] | None,
    sources: Mapping[str, torch.Tensor],
    others: Iterable[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Differentiate ``outputs``; return gradients of those ``sources`` that they depend on, by name.

    Args:
        outputs: tensors with a history.
        given: gradients of these; None for one number.
        sources: leaves.
        others: tensors whose memory a gradient may not share.

    Raises:
        InputError: a gradient is sparse: how much memory it takes depends on data.
    """
    found = torch.autograd.grad(outputs, list(sources.values()), given, allow_unused=True)
    made = {name: one for name, one in zip(sources, found, strict=True) if one is not None}
    for name, one in made.items():
        if one.layout is not torch.strided:
            raise InputError(
                "a gradient is sparse: only dense ones can be replayed",
                where=name,
                fix="make the embedding with sparse=False",
            )
    own = _in_own_memory(list(made.values()), [sources[name] for name in made], others)
    return dict(zip(made, own, strict=True))


def require_no_tensor_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError for a hook that waits for the gradient of one of these tensors: a whole step calls none."""
    for name, one in named:
        if one.requires_grad and (one._backward_hooks or one._post_accumulate_grad_hooks):
            raise InputError(
                f"{name} has a hook that waits for its gradient, which a whole step does not call",
                fix="remove it, or train in place of the model: prepare(x, training=True), which calls it",
            )


def _in_own_memory(
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
