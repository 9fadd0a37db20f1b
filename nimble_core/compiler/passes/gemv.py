"""Products with a single row, written as the sums that they are where that is faster.

A matrix library needs whole tiles: of a small weight it makes little use of the device. A compiler makes one pass over
the weights of a product and sum, and fuses what comes before and after. Large weights a library often reads faster: a
product of those is a sum only where that was measured.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.inductor import compile_graph
from nimble_core.compiler.passes.decisions import Decisions, example
from nimble_core.compiler.to_fx import (
    arguments_of,
    drop_unused,
    graph_module,
    pinned,
    recorded_ancestor,
    reference_of,
    use_calls,
)
from nimble_core.runtime.device import Timed

__all__ = ["row_products_as_sums"]

_aten = torch.ops.aten
_SUM = "sum over one row"
_SMALL_NBYTES = 2 << 20
"""A weight up to here is read within the time of a launch or two, which fusing saves: nothing is measured."""
_COLD_NBYTES = 128 << 20
"""More than a device's cache holds: weights are timed as a model reads them, from memory."""


def row_products_as_sums(module: fx.GraphModule, device: torch.device, decisions: Decisions) -> int:
    """Replace products of one row, and 1x1 convolutions of one pixel, where their weights are small or it is faster.

    Args:
        module: changed in place, for a compiler.
        device: where it runs; on the host large weights are left to libraries.
        decisions: times products of large weights.

    Returns:
        How many were replaced.
    """
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or pinned(node):
            continue
        with module.graph.inserting_before(node):
            convolves = node.target is _aten.convolution.default
            made = _pixel_as_sum(node, device, decisions) if convolves else _row_as_sum(node, device, decisions)
        if made is not None:
            made.meta["ref"] = reference_of(node)
            node.replace_all_uses_with(made)
            count += 1
    drop_unused(module)
    return count


def _faster(node: fx.Node, width: int, depth: int, device: torch.device, decisions: Decisions) -> bool:
    """Whether the sum takes less time than a library's product with a weight ``[width, depth]``."""
    recorded = reference_of(node)
    assert recorded is not None
    dtype = getattr(torch, recorded.dtype)
    nbytes = width * depth * dtype.itemsize
    if nbytes <= _SMALL_NBYTES:
        return True

    def alternatives() -> list[Timed]:
        row = example((1, depth), dtype, device)
        weights = cycle([example((width, depth), dtype, device) for _ in range(1 + _COLD_NBYTES // nbytes)])
        graph = fx.Graph()
        inputs = graph.placeholder("row"), graph.placeholder("weight")
        product = graph.call_function(_aten.mul.Tensor, inputs)
        graph.output((graph.call_function(_aten.sum.dim_IntList, (product, [1])),))
        summed = compile_graph(graph_module(torch.nn.Module(), graph), [row, next(weights)])
        return [lambda: torch.mm(row, next(weights).t()), lambda: summed(row, next(weights))]

    key = (_SUM, width, depth, recorded.dtype)
    return decisions.take(node, _SUM, wanted=device.type == "cuda" and decisions.second_is_faster(key, alternatives))


def _row_as_sum(node: fx.Node, device: torch.device, decisions: Decisions) -> fx.Node | None:
    """Write a product of a single row as a sum; None if it is none, or slower."""
    if node.target not in (_aten.addmm.default, _aten.mm.default) or not _is_floating(node):
        return None
    given, recorded = arguments_of(node), reference_of(node)
    if recorded is None or recorded.sizes[0] != 1 or given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
        return None
    row, bias = (given["mat1"], given["self"]) if node.target is _aten.addmm.default else (given["self"], None)
    read = reference_of(row)
    if read is None or not _faster(node, recorded.sizes[1], read.sizes[1], device, decisions):
        return None
    return _sum(node, row, _call(node, _aten.t.default, given["mat2"]), bias)


def _pixel_as_sum(node: fx.Node, device: torch.device, decisions: Decisions) -> fx.Node | None:
    """Write a 1x1 convolution of a single pixel as a sum; None if it is none, or slower."""
    given = arguments_of(node)
    source, weight, made = (reference_of(one) for one in (given["input"], recorded_ancestor(given["weight"]), node))
    if source is None or weight is None or made is None or not _is_floating(node):
        return None
    if given["groups"] != 1 or given["transposed"] or any(given["padding"]):
        return None
    if (source.sizes[0], *source.sizes[2:]) != (1, 1, 1) or weight.sizes[2:] != (1, 1):
        return None
    features, channels = made.sizes[1], source.sizes[1]
    if not _faster(node, features, channels, device, decisions):
        return None
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
