"""Autograd's nodes that accumulate gradients of leaves (``AccumulateGrad``): who holds them, and their hooks.

A leaf has one such node for as long as any graph holds it: a loss that a notebook keeps is enough. It belongs to the
stream on which it was made, and every backward hands its gradients over there. Under capture that pulls a stream into
the graph that is not the capture's, and CUDA ends the capture. torch 2.13 can redirect it
(``torch.autograd.graph.set_override_stale_capture_stream``); before, the error can only name the leaf.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from nimble_core.torch_compat.autograd import set_stale_capture_stream, stale_capture_stream
from nimble_core.utils.errors import CaptureError, InputError, causes

__all__ = ["has_node_hooks", "held_by_graphs", "kept_graphs_apart", "require_no_node_hooks"]

_MARK = "nimble_core.tracing.grad_accumulators"


@contextmanager
def kept_graphs_apart(leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Keep graphs of earlier steps out of a capture of a backward, or name them in its error.

    Args:
        leaves: whose gradients are captured, by name.

    Raises:
        CaptureError: the capture failed, and graphs that hold leaves may be why.
    """
    held = held_by_graphs(leaves)
    if held and set_stale_capture_stream is not None:
        before = stale_capture_stream()
        set_stale_capture_stream(True)
        try:
            yield
        finally:
            set_stale_capture_stream(before)
        return
    try:
        yield
    except (CaptureError, torch.AcceleratorError) as error:
        _clear_frames(error)
        if not held:
            raise
        raise CaptureError(
            f"the backward cannot be captured while {held[0]}{_and_more(len(held))} is part of a graph that is kept: "
            "its gradient would go to the stream of that graph's forward",
            where=getattr(error, "where", ""),
            fix="let go of losses and outputs of earlier steps that carry gradients (del loss, or loss = loss.item()), "
            "and prepare again; torch 2.13 needs none of that",
        ) from error


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes: a notebook keeps the error, and with it their graphs."""
    for one in causes(error):
        traceback.clear_frames(one.__traceback__)


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def held_by_graphs(leaves: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of leaves whose nodes something holds, such as a graph."""
    return [name for name, leaf in leaves.items() if _has_node(leaf) and _is_held(leaf)]


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Return whether hooks are registered on the node of ``leaf``; a replay would not call them."""
    node = _node(leaf)
    probes = node.register_hook(_nothing), node.register_prehook(_nothing)
    # Handles lead to all hooks that are registered in the same place.
    found = any(len(probe.hooks_dict_ref()) > 1 for probe in probes)
    for probe in probes:
        probe.remove()
    return found


def require_no_node_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError for a leaf with hooks on its node: a replay would not call them."""
    for name, leaf in named:
        if _has_node(leaf) and has_node_hooks(leaf):
            raise InputError(
                f"{name} has a hook on the node that gathers its gradient (AccumulateGrad), which a replay passes by",
                fix="register it on the parameter: register_hook, or register_post_accumulate_grad_hook with "
                "prepare(x, training=True)",
            )


def _nothing(*gradients: Any) -> None:
    """Do nothing, as a hook."""


def _has_node(leaf: torch.Tensor) -> bool:
    """Whether torch can be asked for the node of ``leaf``: it makes a view, which not all layouts have."""
    strided = leaf.layout is torch.strided and not leaf.is_nested
    return leaf.requires_grad and leaf.is_leaf and strided and not leaf.is_inference()


def _node(leaf: torch.Tensor) -> Any:
    with torch.inference_mode(False):  # where it is on, views have no nodes
        return get_gradient_edge(leaf).node


def _is_held(leaf: torch.Tensor) -> bool:
    """Whether anything holds the node of ``leaf``: else it is a new one each time it is asked for."""
    mark = object()
    _node(leaf).metadata[_MARK] = mark
    return _node(leaf).metadata.pop(_MARK, None) is mark
