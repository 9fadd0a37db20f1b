"""Independent gradients of one call as calls of their own, so that the backward waits for one only.

Autograd asks one operator for all gradients of a layer. A call runs on one stream, so the layer before would wait for
the gradients of weights too, which nobody reads until the optimizer does. Split is what separate kernels compute:

- ``convolution_backward``: input and weight have routines of their own; the bias is a sum of the output's gradient.
- ``native_layer_norm_backward``, ``_fused_rms_norm_backward``: rows for the input, columns for weight and bias.

Operators that share work between their gradients stay whole: batch and group norm, attentions, recurrent layers, PReLU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import add_call, arguments_of, pinned, reference_of

__all__ = ["split_backward"]

_aten = torch.ops.aten
_CONVOLUTION, _BIAS = _aten.convolution_backward.default, 2
_APART: dict[Any, tuple[tuple[int, ...], ...]] = {
    _CONVOLUTION: ((0,), (1,), (_BIAS,)),
    _aten.native_layer_norm_backward.default: ((0,), (1, 2)),
    _aten._fused_rms_norm_backward.default: ((0,), (1,)),
}
"""Results of an operator, by place, in groups that need nothing of each other; what others wait for comes first."""


def split_backward(module: fx.GraphModule) -> int:
    """Compute gradients that need nothing of each other in separate calls.

    Each new call stands where the old one stood, for the same eager calls, and makes the same values in the same
    layout, to the bit but for the bias of a convolution. So it may read and make memory that is written in place
    later, as parameters and clipped gradients are. Gradients that nobody reads are not computed.

    Args:
        module: changed in place.

    Returns:
        How many calls were split.
    """
    count = 0
    for node in list(module.graph.nodes):
        parts = _parts(node)
        if len(parts) > 1:
            _split(module.graph, node, parts)
            count += 1
    return count


def _parts(node: fx.Node) -> list[list[fx.Node]]:
    """Group results that are read and need nothing of each other; no groups if a node stays as it is."""
    if node.target not in _APART:
        return []
    computed = [place for place, wanted in enumerate(arguments_of(node)["output_mask"]) if wanted]
    if any(user.target is not operator.getitem or user.args[1] not in computed for user in node.users):
        return []
    groups = ([user for user in node.users if user.args[1] in places] for places in _APART[node.target])
    return [group for group in groups if group]


def _split(graph: fx.Graph, node: fx.Node, parts: Sequence[Sequence[fx.Node]]) -> None:
    given = arguments_of(node)
    with graph.inserting_before(node):
        for items in parts:
            if node.target is _CONVOLUTION and items[0].args[1] == _BIAS:
                _sum_for_bias(graph, given["grad_output"], items)
                continue
            read = {item.args[1] for item in items}
            given["output_mask"] = [place in read for place in range(len(given["output_mask"]))]
            made = add_call(graph, node.target, tuple(given.values()), (node,))
            made.meta["pinned"] = any(pinned(item) for item in items)
            for item in items:
                item.args = (made, item.args[1])
    graph.erase_node(node)


def _sum_for_bias(graph: fx.Graph, gradient: fx.Node, items: Sequence[fx.Node]) -> None:
    """Compute the gradient of a convolution's bias as the sum that it is."""
    recorded = reference_of(gradient)
    assert recorded is not None
    total = add_call(graph, _aten.sum.dim_IntList, (gradient, [0, *range(2, len(recorded.sizes))]), items)
    total.meta["pinned"] = any(pinned(item) for item in items)
    for item in items:
        item.replace_all_uses_with(total)
        graph.erase_node(item)
