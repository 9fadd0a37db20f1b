"""Channels last: the layout in which GPUs run convolutions fastest.

Inputs of the graph are converted once, weights ahead of time; operators in between keep the layout that they find.
The tensors that the model returns get the strides that eager gives them. In a training step weights are converted in
each run, for forward and backward together, and their gradients are converted back, since optimizers take a gradient's
layout to be its parameter's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import add_call, arguments_of, graph_module, is_view, pinned, reference_of
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.strides import dense, laid_out, restrided, row_by_row

__all__ = [
    "keep_strides",
    "results_laid_out",
    "speaks_of_strides",
    "to_channels_last",
    "train_channels_last",
    "writes_through_views",
]

_aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_STRIDED = {
    _aten.as_strided.default,
    _aten._reshape_alias.default,
    _aten.set_.source_Tensor,
    _aten.view_as_real.default,
}
_COPIES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.view.dtype}
"""Views that are none in another layout."""


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


def train_channels_last(module: fx.GraphModule, *, free: int = 0) -> int:
    """Let two-dimensional convolutions of a training step and their backwards run channels last; how many forwards do.

    Steps that take images by their strides, or write them through views, stay as they are. Results keep theirs, as
    ``keep_strides`` says.
    """
    graph = module.graph
    forwards = [node for node in graph.nodes if node.target is _CONVOLUTION and _of_images(node)]
    backwards = [node for node in graph.nodes if node.target is _BACKWARD and _has_images(arguments_of(node)["weight"])]
    if not forwards or any(_fixes_images(node) for node in graph.nodes):
        return 0
    place = {node: position for position, node in enumerate(graph.nodes)}
    written = _first_writes(graph)
    wanted: dict[fx.Node, list[fx.Node]] = {}
    for node in (*forwards, *backwards):
        given = arguments_of(node)
        if _has_no_layout(given["input"]):
            continue
        sources = [given["weight"], *([given["input"]] if not _comes_channels_last(given["input"]) else [])]
        for source in sources:
            if not _is_channels_last(source):
                wanted.setdefault(source, []).append(node)
    for source, users in wanted.items():
        recorded = reference_of(source)
        if recorded is None or written.get(recorded.storage, len(place)) < max(place[user] for user in users):
            continue  # its value changes in between
        with graph.inserting_before(min(users, key=place.__getitem__)):
            converted = graph.call_function(_aten.clone.default, (source,), {"memory_format": torch.channels_last})
        converted.meta["ref"] = reference_of(source)
        for user in users:
            user.replace_input_with(source, converted)
    for node in backwards:
        for gradient in [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]:
            recorded = reference_of(gradient)
            if recorded is None:
                continue
            with graph.inserting_after(gradient):
                kept = add_call(graph, laid_out, (gradient, recorded.strides), (gradient,))
            kept.meta["pinned"] = pinned(gradient)
            gradient.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    keep_strides(module, exactly=True, free=free)
    return len(forwards)


def _first_writes(graph: fx.Graph) -> dict[int, int]:
    """By storage, the position of the first operator that may write it, through whatever view."""
    found: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for one in node.all_input_nodes if _mutates(node) else ():
            recorded = reference_of(one)
            if recorded is not None:
                found.setdefault(recorded.storage, position)
    return found


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return isinstance(node.target, Relaunch) if schema is None else bool(schema.is_mutable)


def _has_images(node: object) -> bool:
    recorded = reference_of(node) if isinstance(node, fx.Node) else None
    return recorded is not None and len(recorded.sizes) == 4


def _has_no_layout(node: fx.Node) -> bool:
    """Whether images are single pixels: libraries and compilers then disagree about what they are told by strides."""
    recorded = reference_of(node)
    return recorded is not None and recorded.sizes[2:] == (1, 1)


def _fixes_images(node: fx.Node) -> bool:
    """Whether an operator depends on the strides of images, or writes them through a view that others may not allow.

    Single pixels without gaps are viewed alike in any layout: what is pooled, flattened and then written (dropout).
    """
    images = [one for one in (node, *node.all_input_nodes) if _has_images(one)]
    if node.target in _COPIES and pinned(node):
        return not all(_has_no_layout(one) and _is_row_by_row(one) for one in images)
    return node.target in _STRIDED and bool(images)


def _is_row_by_row(node: fx.Node) -> bool:
    recorded = reference_of(node)
    return recorded is not None and row_by_row(recorded.sizes, recorded.strides)


def _is_channels_last(node: fx.Node) -> bool:
    """Whether a tensor's memory already is in that order."""
    recorded = reference_of(node)
    if recorded is None or len(recorded.sizes) != 4:
        return False
    return dense(recorded.sizes, recorded.strides, (1, 3, 2, 0))


def speaks_of_strides(module: fx.GraphModule) -> bool:
    """Whether some operator takes a window by its strides: what it shows depends on the layout of what it looks at."""
    return any(node.target in _STRIDED for node in module.graph.nodes)


def keep_strides(module: fx.GraphModule, *, exactly: bool = False, free: int = 0) -> None:
    """Give the tensors that the graph returns the strides that eager gives them.

    Args:
        module: changed in place.
        exactly: also where they do not matter, as optimizers ask of gradients, and for results that whoever reads them
            may write.
        free: results, the first so many, that may have any strides.
    """
    outputs, function = module.graph.output_node(), laid_out if exactly else restrided
    wanted = set(_results(module)[free:])
    for result in outputs.all_input_nodes:
        recorded = reference_of(result)
        if recorded is None or result.op != "call_function" or result.target is function or result not in wanted:
            continue
        if pinned(result) and not exactly:
            continue
        with module.graph.inserting_before(outputs):
            kept = add_call(module.graph, function, (result, recorded.strides), (result,))
        kept.meta["pinned"] = pinned(result)
        outputs.replace_input_with(result, kept)


def results_laid_out(module: fx.GraphModule, *, free: int = 0) -> fx.GraphModule:
    """What gives results of ``module`` eager's types, and but for the first ``free`` eager's strides, where a compiler
    returned others.

    Compilers pad the rows of products, and may hand out the padded memory for what the graph says is contiguous. They
    keep statistics of norms in float32 where torch's kernels for the host round them to half precision.
    """
    graph = fx.Graph()
    kept: list[fx.Node] = []
    for position, result in enumerate(_results(module)):
        one = graph.placeholder(f"result_{position}")
        recorded = reference_of(result) if isinstance(result, fx.Node) else None
        if recorded is not None:
            one = add_call(graph, typed, (one, recorded.dtype), (result,))
            if position >= free:
                one = add_call(graph, laid_out, (one, recorded.strides), (result,))
        kept.append(one)
    graph.output(tuple(kept))
    return graph_module(torch.nn.Module(), graph)


def typed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """``tensor`` as the type of this name; itself if it is."""
    return tensor.to(getattr(torch, dtype))


def _results(module: fx.GraphModule) -> tuple[Any, ...]:
    """What the graph returns: a tuple, as ``to_fx`` and ``partition`` make it."""
    (results,) = module.graph.output_node().args
    return tuple(results)  # type: ignore[arg-type]  # fx allows one alone


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
    """Whether what makes this tensor already gives it channels last: anything between convolutions does.

    A view of what is given is as it was given.
    """
    while (source := _viewed(node)) is not None:
        node = source
    return node.op == "call_function"


def _viewed(node: fx.Node) -> fx.Node | None:
    """What this is a view of, or was written in place to; None if it is neither."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    mine, theirs = reference_of(node), reference_of(source)
    return source if mine is not None and theirs is not None and mine.storage == theirs.storage else None
