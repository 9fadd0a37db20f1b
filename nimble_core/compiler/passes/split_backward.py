"""Gradients that one call computes independently, as calls of their own: the rest of the backward waits for one only.

Autograd asks one operator for all gradients of a layer. A call runs on one stream, so the layer before waits for the
gradients of weights too, which nobody reads until the optimizer does. Split is what separate kernels compute anyway:

- ``convolution_backward``: input and weight have routines of their own. The bias is a sum of the output's gradient,
  which is what ATen computes where a library offers nothing for it, cuDNN among them. oneDNN sums while it computes
  the weight's gradient, in another order; asked for the bias alone, it computes both.
- ``native_layer_norm_backward``, ``_fused_rms_norm_backward``: rows for the input, columns for weight and bias.

Left whole is what shares its work, or is not one call to begin with:

- batch norm, ``native_group_norm_backward``: the sums behind the weight's gradient are what the input's is made of.
- attentions: one pass over the probabilities gives query, key and value; their masks only leave out what is stored.
- recurrent layers of libraries: the pass for weights reads what the pass for data leaves behind.
- PReLU, weight norm, grid sampling, cells of LSTM and GRU: one kernel stores all of it, masks or not.
- embeddings have a single gradient; ``linear``, ``mm`` and ``bmm`` reach the recorder as a product for each gradient
  and a sum (``linear_backward`` exists for nested tensors and devices that are neither CPU nor CUDA).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import add_call, arguments_of, pinned, reference_of
from nimble_core.torch_compat.dispatch import OpOverload

__all__ = ["split_backward"]

_aten = torch.ops.aten
_CONVOLUTION, _BIAS = _aten.convolution_backward.default, 2
_APART: dict[Any, tuple[tuple[int, ...], ...]] = {
    _CONVOLUTION: ((0,), (1,), (_BIAS,)),
    _aten.native_layer_norm_backward.default: ((0,), (1, 2)),
    _aten._fused_rms_norm_backward.default: ((0,), (1,)),
}
"""Results of an operator, by place, in groups that need nothing of each other; what others wait for comes first."""


def split_backward(module: fx.GraphModule, choose: Callable[[fx.Node], bool] | None = None) -> int:
    """Compute gradients that need nothing of each other in separate calls; how many calls were split.

    Each new call stands where the old one stood, for the same eager calls, and makes the same values in the same
    layout, to the bit but for the bias of a convolution. So it may read and make memory that is written in place
    later, as parameters and clipped gradients are. Gradients that nobody reads are not computed.

    Args:
        module: changed in place.
        choose: asked once for each call that could be split, in graph order; None: all of them.
    """
    count = 0
    for node in list(module.graph.nodes):
        parts = _parts(node)
        if len(parts) > 1 and (choose is None or choose(node)):
            _split(module.graph, node, parts)
            count += 1
    return count


def _parts(node: fx.Node) -> list[list[fx.Node]]:
    """Results of a node that are read, in groups that need nothing of each other; none if it stays as it is."""
    if node.target not in _APART:
        return []
    computed = [place for place, wanted in enumerate(arguments_of(node)["output_mask"]) if wanted]
    if any(user.target is not operator.getitem or user.args[1] not in computed for user in node.users):
        return []
    groups = ([user for user in node.users if user.args[1] in places] for places in _APART[node.target])
    return [group for group in groups if group]


def _split(graph: fx.Graph, node: fx.Node, parts: Sequence[Sequence[fx.Node]]) -> None:
    given = arguments_of(node)
    assert isinstance(node.target, OpOverload)
    with graph.inserting_before(node):
        for items in parts:
            total = _bias_as_sum(graph, node, items)
            if total is not None:
                for item in items:
                    item.replace_all_uses_with(total)
                    graph.erase_node(item)
                continue
            read = {item.args[1] for item in items}
            given["output_mask"] = [place in read for place in range(len(given["output_mask"]))]
            made = add_call(graph, node.target, tuple(given.values()), (node,))
            made.meta["pinned"] = any(pinned(item) for item in items)
            for item in items:
                item.args = (made, item.args[1])
    graph.erase_node(node)


def _bias_as_sum(graph: fx.Graph, node: fx.Node, items: Sequence[fx.Node]) -> fx.Node | None:
    """The gradient of a convolution's bias; None if it is another one, or its shape or type is not known."""
    if node.target is not _CONVOLUTION or items[0].args[1] != _BIAS:
        return None
    source = arguments_of(node)["grad_output"]
    before, after = reference_of(source), reference_of(items[0])
    if before is None or after is None or before.dtype != after.dtype:
        return None
    total = add_call(graph, _aten.sum.dim_IntList, (source, [0, *range(2, len(before.sizes))]), items)
    total.meta["pinned"] = any(pinned(item) for item in items)
    return total
