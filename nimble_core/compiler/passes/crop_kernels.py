"""Convolutions that read only the part of a kernel that meets the image.

On an image of one pixel, padded by one, a kernel of 3x3 multiplies eight zeros for each product that counts, and
libraries compute all nine. Networks made for large images end so on small ones; wide dilations do on small maps. What
is left out would add zeros, and its gradient is zero. (If it is infinite or NaN, some library routines return NaN.)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import add_call, arguments_of, pinned, reference_of
from nimble_core.tracing.strides import laid_out, strides_of_copy

__all__ = ["crop_kernels", "used_elements"]

_aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default


def crop_kernels(module: fx.GraphModule) -> int:
    """Let convolutions and their backwards read only the part of a kernel that meets the image.

    Args:
        module: changed in place.

    Returns:
        How many calls read less.
    """
    graph, count = module.graph, 0
    parts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in (_CONVOLUTION, _BACKWARD):
            continue
        given = arguments_of(node)
        used = _used(given)
        if used is None:
            continue
        ranges = tuple((first, last) for first, last, _ in used)
        key = given["weight"], ranges
        if key not in parts:
            with graph.inserting_before(node):
                parts[key] = _part(graph, given["weight"], ranges)
        given |= {"weight": parts[key], "padding": [padding for _, _, padding in used]}
        node.args, node.kwargs = tuple(given.values()), {}
        if node.target is _BACKWARD:
            for gradient in [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]:
                _fill(graph, gradient, ranges)
        count += 1
    return count


def used_elements(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int]:
    """Return the elements of a kernel that ever meet the image, and the padding that they need, along one dimension.

    Args:
        size, kernel, stride, padding, dilation: of the convolution, along this dimension.

    Returns:
        The first element, the one behind the last, and the padding; where nothing can be left out, those of the whole.

    >>> used_elements(1, 3, 1, 1, 1), used_elements(2, 3, 2, 1, 1), used_elements(4, 3, 1, 1, 1)
    ((1, 2, 0), (1, 3, 0), (0, 3, 1))
    """

    def count(kernel: int, padding: int) -> int:
        return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

    results = count(kernel, padding)
    starts = range(-padding, -padding + results * stride, stride)
    used = [at for at in range(kernel) if any(0 <= start + at * dilation < size for start in starts)]
    if padding and used:
        first, last = used[0], used[-1] + 1
        needed = padding - first * dilation
        if needed >= 0 and count(last - first, needed) == results:
            return first, last, needed
    return 0, kernel, padding


def _used(given: dict[str, Any]) -> list[tuple[int, int, int]] | None:
    """Return ``used_elements`` of each dimension of the image; None if they are all."""
    image, kernel = reference_of(given["input"]), reference_of(given["weight"])
    if image is None or kernel is None or given["transposed"]:
        return None
    about = [given[name] for name in ("stride", "padding", "dilation")]
    sizes = image.sizes[2:], kernel.sizes[2:]
    if any(len(one) != len(sizes[0]) for one in (*sizes, *about)):
        return None
    found = [used_elements(*one) for one in zip(*sizes, *about, strict=True)]
    all_used = all((first, last) == (0, size) for (first, last, _), size in zip(found, sizes[1], strict=True))
    return None if all_used else found


def _part(graph: fx.Graph, weight: fx.Node, ranges: Sequence[tuple[int, int]]) -> fx.Node:
    """Add a view of the used part of a weight."""
    part, about = weight, reference_of(weight)
    assert about is not None
    for dim, (first, last) in enumerate(ranges, 2):
        if (first, last) != (0, about.sizes[dim]):
            part = graph.call_function(_aten.slice.Tensor, (part, dim, first, last))
            about = replace(
                about,
                offset=about.offset + first * about.strides[dim] * about.itemsize,
                sizes=(*about.sizes[:dim], last - first, *about.sizes[dim + 1 :]),
            )
            part.meta |= {"ref": about, "pinned": pinned(weight)}
    return part


def _fill(graph: fx.Graph, gradient: fx.Node, ranges: Sequence[tuple[int, int]]) -> None:
    """Put zeros around the gradient of the used part of a weight, in the strides that eager gives the whole."""
    whole = reference_of(gradient)
    assert whole is not None
    sizes = (*whole.sizes[:2], *(last - first for first, last in ranges))
    around = [(first, size - last) for (first, last), size in zip(ranges, whole.sizes[2:], strict=True)]
    with graph.inserting_after(gradient):
        filled = add_call(graph, _aten.constant_pad_nd.default, (gradient, [*chain(*reversed(around))]), (gradient,))
    with graph.inserting_after(filled):
        kept = add_call(graph, laid_out, (filled, whole.strides), (filled,))
    gradient.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not filled)
    kept.meta["pinned"] = pinned(gradient)
    part = replace(whole, sizes=sizes, strides=strides_of_copy(sizes, whole.strides))
    gradient.meta |= {"ref": part, "pinned": False}
