"""Products with a single row, written as the sums that they are.

A matrix library needs whole tiles: for one row it takes several times as long as reading the weights does. A compiler
makes one pass over the weights of a product and sum, and fuses what comes before and after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import arguments_of, drop_unused, pinned, reference_of, use_calls

__all__ = ["row_products_as_sums"]

_aten = torch.ops.aten


def row_products_as_sums(module: fx.GraphModule) -> int:
    """Replace products of a single row, 1x1 convolutions of a single pixel among them; how many."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or pinned(node):
            continue
        made = _as_sum(module.graph, node)
        if made is not None:
            made.meta["ref"] = node.meta.get("ref")
            node.replace_all_uses_with(made)
            count += 1
    drop_unused(module)
    return count


def _as_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    recorded = reference_of(node)
    if recorded is None or node.target not in (_aten.addmm.default, _aten.mm.default, _aten.convolution.default):
        return None
    if not recorded.dtype.startswith(("float", "bfloat")):  # sums of integers are of another type
        return None
    given = arguments_of(node)
    if node.target is _aten.convolution.default:
        source = reference_of(given["input"])
        single = source is not None and (source.sizes[0], *source.sizes[2:]) == (1, 1, 1)
        if not single or given["groups"] != 1 or given["transposed"] or recorded.sizes[2:] != (1, 1):
            return None
        if any(given["padding"]) or _kernel(given["weight"]) != (1, 1):
            return None
        features, channels = recorded.sizes[1], source.sizes[1]  # type: ignore[union-attr]
        with graph.inserting_before(node):
            row = _call(graph, node, _aten.reshape.default, given["input"], [1, channels])
            weight = _call(graph, node, _aten.reshape.default, given["weight"], [features, channels])
            total = _sum(graph, node, row, weight, given["bias"])
            return _call(graph, node, _aten.reshape.default, total, [1, features, 1, 1])
    if recorded.sizes[0] != 1 or given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
        return None
    row, bias = (given["mat1"], given["self"]) if node.target is _aten.addmm.default else (given["self"], None)
    with graph.inserting_before(node):
        return _sum(graph, node, row, _call(graph, node, _aten.t.default, given["mat2"]), bias)


def _sum(graph: fx.Graph, node: fx.Node, row: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """``row @ weight.T + bias`` for a row ``[1, in]`` and a weight ``[out, in]``: ``[1, out]``."""
    product = _call(graph, node, _aten.mul.Tensor, row, weight)
    total = _call(graph, node, _aten.sum.dim_IntList, product, [1])
    total = _call(graph, node, _aten.unsqueeze.default, total, 0)
    return total if bias is None else _call(graph, node, _aten.add.Tensor, total, bias)


def _call(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    use_calls(made, node)
    return made


def _kernel(weight: fx.Node) -> tuple[int, ...] | None:
    """Size of a convolution's kernel; rewrites of weights keep it."""
    while reference_of(weight) is None and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    recorded = reference_of(weight)
    return recorded.sizes[2:] if recorded else None
