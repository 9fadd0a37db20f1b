"""What rounding alone does to a training step: eager's results are moved at random by about their last place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import Mode, pytree
from nimble_core.tracing.recording import flat_tensors
from nimble_core.validation.bounds import BOUNDS, product_precision

__all__ = ["perturbed"]

_PRODUCTS = ("convolution", "mm", "attention")
_COPIES = ("aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
_CENTRED = ("batch_norm", "group_norm", "instance_norm")


@contextmanager
def perturbed(seed: int = 0) -> Iterator[None]:
    """Move each floating-point result of a call inside, forward and backward, by about its last place.

    What comes out differs from a plain run by what rounding may do, and by what the device leaves to chance: the scale
    on which gradients and updates can be compared, also of those that are zero in exact arithmetic. It is the random
    rounding of Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point
    arithmetic", 1997), for whole operators.

    What subtracts a channel's mean (BatchNorm) is also shifted by the mean's own rounding, alike in all that share the
    mean: a sum over the channel consists of that. Other zeros and infinities stay, and what is at most 1 stays so (a
    saturated sigmoid is a probability still). Views, copies and what is written in place are not moved. Results of
    products are moved by the last place of TF32 where it is allowed. The model's own random numbers are those of a
    plain run.

    Args:
        seed: of the moves.
    """
    with _Perturbed(seed):
        yield


class _Perturbed(Mode):
    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _rounds(func, args, kwargs):
            return result
        product, centred = (any(word in func._schema.name for word in words) for words in (_PRODUCTS, _CENTRED))
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, product, centred), result)

    def _moved(self, tensor: torch.Tensor, product: bool, centred: bool) -> torch.Tensor:
        size = _perturbation(tensor, product)
        if not size or tensor.layout is not torch.strided or tensor.is_meta:
            return tensor  # on meta, which holds no numbers, transforms ask for shapes
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
        moves = torch.empty_like(tensor, dtype=wide).uniform_(-size, size, generator=self._generators[device])
        plain = tensor.to(wide)
        moved = torch.addcmul(plain, plain, moves)
        if centred and tensor.dim() > 1:
            most = BOUNDS[_name(wide)].perturbation
            shared = moved.new_empty(tensor.shape[:2] + (1,) * (tensor.dim() - 2))[:1]
            shared.uniform_(-most, most, generator=self._generators[device])
            moved += shared * moved.square().mean().sqrt()
        moved = torch.where(plain.isinf(), plain, moved)  # masked logits: no NaN
        return torch.where(plain.abs() <= 1, moved.clamp(-1, 1), moved).to(tensor.dtype)


def _perturbation(tensor: torch.Tensor, product: bool) -> float:
    """Return by how much to move a result, relative to each element; 0 if not at all."""
    if not tensor.is_floating_point():
        return 0.0
    name = _name(tensor.dtype)
    if product and name == "float32":
        name = product_precision(tensor.device.type)
    return BOUNDS[name].perturbation if name in BOUNDS else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether ``func`` computes new floating-point numbers from others."""
    schema = func._schema
    if (
        schema.name in _COPIES
        or schema.name.endswith("_like")
        or any(one.alias_info is not None for one in schema.returns)
    ):
        return False
    return any(tensor.is_floating_point() for tensor in flat_tensors([*args, *kwargs.values()]))
