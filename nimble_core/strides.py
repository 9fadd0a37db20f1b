"""The same numbers in other strides: of those that address nothing (size 1), or in memory of their own."""

from __future__ import annotations

import torch

__all__ = ["laid_out", "restrided", "with_strides_of"]


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` with these strides: itself if it has them wherever they matter, else a copy."""
    sizes = tensor.shape
    if all(size == 1 or a == b for size, a, b in zip(sizes, tensor.stride(), strides, strict=True)):
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:  # expanded: one of them is all
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(sizes)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``restrided``, with these strides also where they do not matter, which fused optimizers ask for."""
    found = restrided(tensor, strides)
    # A window of its own only where there is no other way: compilers pad rows, and a window by strides then shows the
    # padding.
    return found if found.stride() == strides else found.as_strided(tensor.shape, strides)


def with_strides_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, laid out as fused optimizers need it: like the parameter."""
    return gradient if gradient.stride() == parameter.stride() else laid_out(gradient, parameter.stride())
