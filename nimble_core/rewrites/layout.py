"""Channels last: the layout in which GPUs run convolutions fastest.

Inputs of the graph are converted once, weights ahead of time; operators in between keep the layout that they find.
The tensors that the model returns get the strides that eager gives them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from nimble_core.lift import add_call, arguments_of, is_view, pinned, reference_of

__all__ = ["keep_strides", "restrided", "speaks_of_strides", "to_channels_last", "writes_through_views"]

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_STRIDED = {
    _aten.as_strided.default,
    _aten._reshape_alias.default,
    _aten.set_.source_Tensor,
    _aten.view_as_real.default,
}


def to_channels_last(module: fx.GraphModule) -> int:
    """Let every two-dimensional convolution read and write channels last; how many now do.

    Graphs that speak of strides themselves or write through views stay as they are (in another layout a view may be a
    copy), and so does one that has no such convolution.
    """
    graph = module.graph
    convolutions = [node for node in graph.nodes if node.target is _CONVOLUTION and _of_images(node)]
    if not convolutions or writes_through_views(module) or speaks_of_strides(module):
        return 0
    converted: dict[fx.Node, fx.Node] = {}
    for node in convolutions:
        given = arguments_of(node)
        source, weight = given["input"], given["weight"]
        for one in (source, weight):
            if (one is weight or not _comes_channels_last(one)) and (one not in converted or pinned(one)):
                with graph.inserting_before(node):
                    converted[one] = graph.call_function(
                        _aten.clone.default, (one,), {"memory_format": torch.channels_last}
                    )
                converted[one].meta["ref"] = reference_of(one)
        node.args = (converted.get(source, source), converted[weight], *node.args[2:])
    keep_strides(module)
    return len(convolutions)


def speaks_of_strides(module: fx.GraphModule) -> bool:
    """Whether some operator takes a window by its strides: what it shows depends on the layout of what it looks at."""
    return any(node.target in _STRIDED for node in module.graph.nodes)


def keep_strides(module: fx.GraphModule) -> None:
    """Give the tensors that the graph returns the strides that eager gives them."""
    outputs = module.graph.output_node()
    for result in outputs.all_input_nodes:
        recorded = reference_of(result)
        if recorded is None or result.op != "call_function" or result.target is restrided or pinned(result):
            continue
        with module.graph.inserting_before(outputs):
            kept = add_call(module.graph, restrided, (result, recorded.strides), (result,))
        outputs.replace_input_with(result, kept)


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


def writes_through_views(module: fx.GraphModule) -> bool:
    """Whether memory is written that views look at: in another layout they might be copies."""
    views = (node for node in module.graph.nodes if node.op == "call_function" and is_view(node.target))
    return any(pinned(node) and node.target is not operator.getitem for node in views)


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
