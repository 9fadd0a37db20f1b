"""Channels last: the layout in which GPUs run convolutions fastest.

Inputs of the graph are converted once, weights ahead of time; operators in between keep the layout that they find.
The tensors that the model returns get the strides that eager gives them.
"""

from __future__ import annotations

import torch
from torch import fx

from nimble_core.lift import add_call, arguments_of, pinned, reference_of

__all__ = ["to_channels_last"]

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_STRIDED = {_aten.as_strided.default, _aten.set_.source_Tensor, _aten.view_as_real.default}


def to_channels_last(module: fx.GraphModule) -> int:
    """Let every two-dimensional convolution read and write channels last; how many now do.

    Graphs that speak of strides themselves stay as they are, and so does one that has no such convolution.
    """
    graph = module.graph
    convolutions = [node for node in graph.nodes if node.target is _CONVOLUTION and _of_images(node)]
    if not convolutions or any(node.target in _STRIDED for node in graph.nodes):
        return 0
    outputs = graph.output_node()
    for node in convolutions:
        given = arguments_of(node)
        source, weight = given["input"], given["weight"]
        with graph.inserting_before(node):
            if not _comes_channels_last(source):
                source = add_call(graph, _aten.clone.default, (source,), (), memory_format=torch.channels_last)
            weight = add_call(graph, _aten.clone.default, (weight,), (), memory_format=torch.channels_last)
        node.args = (source, weight, *node.args[2:])
    for result in outputs.all_input_nodes:
        recorded = reference_of(result)
        if recorded is not None and len(recorded.sizes) == 4 and not pinned(result):
            with graph.inserting_before(outputs):
                kept = add_call(graph, restrided, (result, recorded.strides), (result,))
            outputs.replace_input_with(result, kept)
    return len(convolutions)


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` with these strides: itself if it has them, else a copy."""
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _of_images(node: fx.Node) -> bool:
    weight = node.args[1]
    recorded = reference_of(weight) if isinstance(weight, fx.Node) else None
    sizes = recorded.sizes if recorded else ()
    if not sizes and isinstance(weight, fx.Node):
        made = reference_of(node)
        sizes = made.sizes if made else ()
    return len(sizes) == 4 and not pinned(node)


def _comes_channels_last(node: fx.Node) -> bool:
    """Whether what makes this tensor already gives it channels last: anything between convolutions does."""
    return node.op == "call_function"
