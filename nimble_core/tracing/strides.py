"""The same numbers in other strides, and copies of parts of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = [
    "copied",
    "corner",
    "dense",
    "elements_once",
    "extent",
    "laid_out",
    "reach",
    "restrided",
    "rests",
    "row_by_row",
    "share_bytes",
    "strides_of_copy",
    "widened",
    "with_strides_of",
]


def dense(sizes: Sequence[int], strides: Sequence[int], dims: Iterable[int]) -> bool:
    """Whether elements lie next to each other, the first of ``dims`` changing fastest.

    Strides of dimensions of size 1 do not matter.

    >>> dense((2, 3, 4, 5), (60, 1, 15, 3), (1, 3, 2, 0)), dense((2, 3), (1, 2), (1, 0))
    (True, False)
    """
    expected = 1
    for dim in dims:
        if sizes[dim] != 1 and strides[dim] != expected:
            return False
        expected *= sizes[dim]
    return True


def row_by_row(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie next to each other in the order of their indices: what torch calls contiguous.

    >>> row_by_row((2, 3), (3, 1)), row_by_row((2, 3), (1, 2))
    (True, False)
    """
    return dense(sizes, strides, reversed(range(len(sizes))))


def elements_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that shows each element once: an expanded dimension shows one many times."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def reach(tensor: torch.Tensor) -> int:
    """Count the elements from the first to the last in memory, both included.

    >>> reach(torch.zeros(3, 5)[:, :2]), reach(torch.zeros(3, 0))
    (12, 0)
    """
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def extent(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last in memory, both included."""
    return reach(tensor) * tensor.itemsize


def share_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory that two tensors reach over overlaps."""
    return a.data_ptr() < b.data_ptr() + extent(b) and b.data_ptr() < a.data_ptr() + extent(a)


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` with these strides: itself if it has them wherever they matter, else a copy."""
    sizes = tensor.shape
    if all(size == 1 or a == b for size, a, b in zip(sizes, tensor.stride(), strides, strict=True)):
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:  # expanded: a copy of one element is enough
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(sizes)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` with these strides, also where they do not matter, which fused optimizers ask for."""
    found = restrided(tensor, strides)
    # ``as_strided`` only where there is no other way: compilers pad rows, and such a view would show the padding.
    return found if found.stride() == strides else found.as_strided(tensor.shape, strides)


def strides_of_copy(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that ``clone`` gives a tensor with these.

    >>> strides_of_copy((2, 3), (1, 2)), strides_of_copy((2, 3), (8, 1)), strides_of_copy((2, 3), (1, 0))
    ((1, 2), (3, 1), (3, 1))
    """
    return torch.empty_strided(tuple(sizes), tuple(strides), device="meta").clone().stride()


def copied(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy ``tensor`` with these strides, which are those of a copy."""
    if tensor.stride() == strides:
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def widened(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Pad ``tensor`` with zeros to these sizes; return it as it is if it has them.

    >>> widened(torch.ones(1, 2), (2, 3))
    tensor([[1., 1., 0.],
            [0., 0., 0.]])
    """
    if tensor.shape == torch.Size(sizes):
        return tensor
    made = tensor.new_zeros(tuple(sizes))
    corner(made, tensor.shape).copy_(tensor)
    return made


def corner(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the first elements of each dimension, as many as ``sizes`` says.

    >>> corner(torch.zeros(3, 4), (2, 4)).shape
    torch.Size([2, 4])
    """
    for dim, size in enumerate(sizes):
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def rests(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return what is outside of the ``corner`` of these sizes, in parts that do not overlap.

    >>> [tuple(one.shape) for one in rests(torch.zeros(3, 4), (2, 3))]
    [(1, 4), (2, 1)]
    """
    found = []
    for dim, size in enumerate(sizes):
        if size < tensor.shape[dim]:
            found.append(tensor.narrow(dim, size, tensor.shape[dim] - size))
        tensor = tensor.narrow(dim, 0, size)
    return found


def with_strides_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Lay the gradient out like its parameter, as fused optimizers need it."""
    return gradient if gradient.stride() == parameter.stride() else laid_out(gradient, parameter.stride())
