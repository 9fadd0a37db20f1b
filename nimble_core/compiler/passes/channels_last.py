"""Channels last: the memory layout in which GPUs run convolutions fastest.

Inputs of the graph are converted once. Weights are converted ahead of time for inference; in a training step they are
converted in each run, for forward and backward together, and their gradients are converted back, because optimizers
expect a gradient in the layout of its parameter. Operators in between keep the layout they are given.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.decisions import example
from nimble_core.compiler.to_fx import (
    add_call,
    arguments_of,
    calls_of,
    graph_module,
    pinned,
    recorded_ancestor,
    reference_of,
)
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.strides import dense, laid_out, restrided, row_by_row

__all__ = [
    "convolutions_alone",
    "keep_strides",
    "layout_matters",
    "results_laid_out",
    "takes_windows",
    "to_channels_last",
]

_aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_WINDOWS = {
    _aten.as_strided.default,
    _aten._reshape_alias.default,
    _aten.set_.source_Tensor,
    _aten.view_as_real.default,
}
"""Operators whose result depends on the strides of what they read."""
_COPIES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.view.dtype}
"""Views that become copies in another layout."""


def to_channels_last(module: fx.GraphModule) -> int:
    """Let two-dimensional convolutions, and their backwards, read and write channels last.

    Graphs whose results depend on the layout stay as they are.

    Args:
        module: changed in place. The tensors it returns may get other strides, see ``keep_strides``.

    Returns:
        How many forward convolutions run channels last.
    """
    graph = module.graph
    forwards = [node for node in graph.nodes if node.target is _CONVOLUTION and _is_image(node.args[1])]
    backwards = [node for node in graph.nodes if node.target is _BACKWARD and _is_image(arguments_of(node)["weight"])]
    if not forwards or layout_matters(module):
        return 0
    _convert_sources(graph, [*forwards, *backwards])
    for node in backwards:
        for gradient in [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]:
            recorded = reference_of(gradient)
            if recorded is None:
                continue
            with graph.inserting_after(gradient):
                kept = add_call(graph, laid_out, (gradient, recorded.strides), (gradient,))
            kept.meta["pinned"] = pinned(gradient)
            gradient.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    return len(forwards)


def convolutions_alone(module: fx.GraphModule, device: torch.device, *, channels_last: bool) -> Callable[[], None]:
    """Make a function that runs the convolutions of a graph and what converts tensors for them, and nothing else.

    To be timed where a compiler makes new kernels of all the rest.

    Args:
        module: as lifted, or as ``to_channels_last`` left it.
        device: where its tensors, which are new ones of the same shapes, are made.
        channels_last: whether ``to_channels_last`` has changed it.
    """

    @cache
    def tensor(sizes: tuple[int, ...], dtype: str, last: bool) -> torch.Tensor:
        layout = torch.channels_last if last else torch.contiguous_format
        return example(sizes, getattr(torch, dtype), device, layout)

    def given(node: fx.Node, *, last: bool) -> torch.Tensor:
        recorded = reference_of(recorded_ancestor(node))
        assert recorded is not None
        return tensor(recorded.sizes, recorded.dtype, last and len(recorded.sizes) == 4)

    calls: list[Callable[[], object]] = []
    for node in module.graph.nodes:
        converts = node.target is _aten.clone.default and not calls_of(node)  # the model's own are in both layouts
        if converts or node.target in (_CONVOLUTION, _BACKWARD) or (node.target is laid_out and _is_gradient(node)):
            made = partial(given, last=channels_last and not converts)
            args, kwargs = fx.map_arg((node.args, node.kwargs), made)
            calls.append(partial(node.target, *args, **kwargs))

    def run() -> None:
        for call in calls:
            call()

    return run


def _convert_sources(graph: fx.Graph, convolutions: list[fx.Node]) -> None:
    """Convert weights and inputs of convolutions, once each, where they are not channels last already."""
    place = {node: position for position, node in enumerate(graph.nodes)}
    written = _first_writes(graph)
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in convolutions:
        given = arguments_of(node)
        if _is_single_pixel(given["input"]):
            continue
        sources = [given["weight"], *([] if _is_computed(given["input"]) else [given["input"]])]
        for source in sources:
            if not _is_channels_last(source):
                users.setdefault(source, []).append(node)
    for source, readers in users.items():
        recorded = reference_of(source)
        if recorded is None or written.get(recorded.storage, len(place)) < max(place[reader] for reader in readers):
            continue  # its value changes in between
        with graph.inserting_before(min(readers, key=place.__getitem__)):
            converted = graph.call_function(_aten.clone.default, (source,), {"memory_format": torch.channels_last})
        converted.meta["ref"] = recorded
        for reader in readers:
            reader.replace_input_with(source, converted)


def _first_writes(graph: fx.Graph) -> dict[int, int]:
    """Map each storage to the position of the first operator that may write it, through any view."""
    found: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if isinstance(node.target, Relaunch) if schema is None else schema.is_mutable:
            for one in node.all_input_nodes:
                recorded = reference_of(one)
                if recorded is not None:
                    found.setdefault(recorded.storage, position)
    return found


def takes_windows(module: fx.GraphModule) -> bool:
    """Whether some operator takes a window by strides, so that it shows something else in another layout."""
    return any(node.target in _WINDOWS for node in module.graph.nodes)


def layout_matters(module: fx.GraphModule) -> bool:
    """Whether the graph computes something else if its images have another layout.

    It does if it takes windows by strides, or writes images through a view that would be a copy in another layout.
    Single pixels without gaps are viewed alike in any layout: what is pooled, flattened and then written (dropout).
    """
    if takes_windows(module):
        return True
    for node in module.graph.nodes:
        if node.target in _COPIES and pinned(node):
            images = [one for one in (node, *node.all_input_nodes) if _is_image(one)]
            if not all(_is_single_pixel(one) and _is_row_by_row(one) for one in images):
                return True
    return False


def _is_gradient(node: fx.Node) -> bool:
    """Whether a node converts what the backward of a convolution makes."""
    (item, *_) = node.all_input_nodes
    return item.target is operator.getitem and item.all_input_nodes[0].target is _BACKWARD


def _is_image(node: Any) -> bool:
    """Whether a tensor has four dimensions."""
    recorded = reference_of(recorded_ancestor(node))
    return recorded is not None and len(recorded.sizes) == 4


def _is_single_pixel(node: fx.Node) -> bool:
    """Whether images are single pixels: their strides mean no layout that all libraries agree on."""
    recorded = reference_of(node)
    return recorded is not None and recorded.sizes[2:] == (1, 1)


def _is_row_by_row(node: fx.Node) -> bool:
    recorded = reference_of(node)
    return recorded is not None and row_by_row(recorded.sizes, recorded.strides)


def _is_channels_last(node: fx.Node) -> bool:
    recorded = reference_of(node)
    # A single channel is in both layouts at once, and torch then takes it for contiguous.
    if recorded is None or len(recorded.sizes) != 4 or recorded.strides[1] != 1:
        return False
    return dense(recorded.sizes, recorded.strides, (1, 3, 2, 0))


def _is_computed(node: fx.Node) -> bool:
    """Whether an image is computed, and so channels last already, and not given or a view of that."""
    while node.op == "call_function" and node.args:
        source = node.args[0]
        mine, theirs = reference_of(node), reference_of(source) if isinstance(source, fx.Node) else None
        if mine is None or theirs is None or mine.storage != theirs.storage:
            break
        node = source  # type: ignore[assignment]
    return node.op == "call_function"


def keep_strides(module: fx.GraphModule, *, exactly: bool = False, free: int = 0) -> None:
    """Give the tensors that the graph returns the strides that eager gives them.

    Args:
        module: changed in place.
        exactly: also where they do not matter, as optimizers ask of gradients, and for results that are written.
        free: how many results, from the first on, may have any strides.
    """
    outputs, function = module.graph.output_node(), laid_out if exactly else restrided
    for result in dict.fromkeys(_results(module)[free:]):
        recorded = reference_of(result) if isinstance(result, fx.Node) else None
        if recorded is None or result.op != "call_function" or result.target is function:
            continue
        if pinned(result) and not exactly:
            continue
        with module.graph.inserting_before(outputs):
            kept = add_call(module.graph, function, (result, recorded.strides), (result,))
        kept.meta["pinned"] = pinned(result)
        outputs.replace_input_with(result, kept)


def results_laid_out(module: fx.GraphModule, *, free: int = 0) -> fx.GraphModule:
    """Make a graph that gives the results of compiled kernels eager's types and strides.

    Compilers pad the rows of products, and may hand out the padded memory for what the graph says is contiguous. They
    keep statistics of norms in float32 where torch's kernels for the host round them to half precision.

    Args:
        module: what was compiled.
        free: how many results, from the first on, may have any strides.
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
    """Convert ``tensor`` to the type of this name; a tensor of that type is returned as it is."""
    return tensor.to(getattr(torch, dtype))


def _results(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what the graph returns: a tuple, as ``to_fx`` and ``partition`` make it."""
    (results,) = module.graph.output_node().args
    return tuple(results)  # type: ignore[arg-type]  # fx allows one alone
