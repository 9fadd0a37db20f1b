"""Products with a single row, written as the sums that they are.

A matrix library needs whole tiles: for one row it takes several times as long as reading the weights does. A compiler
makes one pass over the weights of a product and sum, and fuses what comes before and after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import (
    arguments_of,
    drop_unused,
    pinned,
    recorded_ancestor,
    reference_of,
    use_calls,
)

__all__ = ["row_products_as_sums"]

_aten = torch.ops.aten


def row_products_as_sums(module: fx.GraphModule) -> int:
    """Replace products of one row, and 1x1 convolutions of one pixel, and return how many."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or pinned(node):
            continue
        with module.graph.inserting_before(node):
            made = _pixel_as_sum(node) if node.target is _aten.convolution.default else _row_as_sum(node)
        if made is not None:
            made.meta["ref"] = reference_of(node)
            node.replace_all_uses_with(made)
            count += 1
    drop_unused(module)
    return count


def _row_as_sum(node: fx.Node) -> fx.Node | None:
    """Write a product of a single row as a sum; None if it is none."""
    if node.target not in (_aten.addmm.default, _aten.mm.default) or not _is_floating(node):
        return None
    given, recorded = arguments_of(node), reference_of(node)
    if recorded is None or recorded.sizes[0] != 1 or given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
        return None
    row, bias = (given["mat1"], given["self"]) if node.target is _aten.addmm.default else (given["self"], None)
    return _sum(node, row, _call(node, _aten.t.default, given["mat2"]), bias)


def _pixel_as_sum(node: fx.Node) -> fx.Node | None:
    """Write a 1x1 convolution of a single pixel as a sum; None if it is none."""
    given = arguments_of(node)
    source, weight, made = (reference_of(one) for one in (given["input"], recorded_ancestor(given["weight"]), node))
    if source is None or weight is None or made is None or not _is_floating(node):
        return None
    if given["groups"] != 1 or given["transposed"] or any(given["padding"]):
        return None
    if (source.sizes[0], *source.sizes[2:]) != (1, 1, 1) or weight.sizes[2:] != (1, 1):
        return None
    features, channels = made.sizes[1], source.sizes[1]
    row = _call(node, _aten.reshape.default, given["input"], [1, channels])
    columns = _call(node, _aten.reshape.default, given["weight"], [features, channels])
    return _call(node, _aten.reshape.default, _sum(node, row, columns, given["bias"]), [1, features, 1, 1])


def _is_floating(node: fx.Node) -> bool:
    """Whether a result is of a floating type: sums of integers are of another type than their products."""
    recorded = reference_of(node)
    return recorded is not None and recorded.dtype.startswith(("float", "bfloat"))


def _sum(node: fx.Node, row: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """``row @ weight.T + bias`` for a row ``[1, in]`` and a weight ``[out, in]``: ``[1, out]``."""
    product = _call(node, _aten.mul.Tensor, row, weight)
    total = _call(node, _aten.sum.dim_IntList, product, [1])
    total = _call(node, _aten.unsqueeze.default, total, 0)
    return total if bias is None else _call(node, _aten.add.Tensor, total, bias)


def _call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call that stands for what ``node`` does."""
    made = node.graph.call_function(target, args)
    use_calls(made, node)
    return made
