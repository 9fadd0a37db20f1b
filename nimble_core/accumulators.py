"""Autograd's nodes that gather the gradients of leaves (``AccumulateGrad``): their hooks, and new ones for a capture.

A leaf has one such node for as long as any graph holds it: a loss that a notebook keeps is enough. It belongs to the
stream on which it was made, and every backward hands its gradients over there. Under capture, that pulls a stream into
the graph which is none of its own, and CUDA ends the capture (torch issue 137483; torch 2.13 can redirect it, releases
before cannot).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from nimble_core.errors import InputError

__all__ = ["accumulators_renewed", "has_node_hooks", "renew", "require_no_node_hooks"]

_MARK = "nimble_core.accumulators"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def accumulators_renewed(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Nodes of earlier graphs are none of those inside, nor the other way round, whatever keeps a graph alive."""
    leaves = list(leaves)
    renew(leaves)
    try:
        yield
    finally:
        renew(leaves)


def renew(leaves: Iterable[torch.Tensor]) -> int:
    """Let the next graph make nodes of its own; how many leaves had one that is alive.

    Graphs that hold the old node still add to the leaf's ``.grad``; its value, version and hooks stay. Not renewed are
    nodes with hooks of their own, which would be lost, and none at all where ``torch.distributed`` runs, which has some
    that Python does not see.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0
    plain = [one for one in leaves if one.requires_grad and one.is_leaf and type(one) in _PLAIN]
    found = [one for one in plain if _is_held(one) and not has_node_hooks(one)]
    for leaf in found:
        data = leaf.data
        other = torch.float32 if data.dtype == torch.float64 else torch.float64
        empty = torch.empty(0, dtype=other, device=data.device)
        # torch lets go of the node where a leaf's type changes. Python looks neither for signals nor for other threads
        # between these two lines, so nobody ever finds the leaf empty.
        leaf.data = empty
        leaf.data = data
    return len(found)


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks are registered on the node of ``leaf``, which a gradient that does not come by there passes."""
    node: Any = get_gradient_edge(leaf).node
    probes = node.register_hook(_nothing), node.register_prehook(_nothing)
    # Handles lead to all hooks that are registered in the same place.
    found = any(len(probe.hooks_dict_ref()) > 1 for probe in probes)
    for probe in probes:
        probe.remove()
    return found


def require_no_node_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InputError for a leaf with hooks on its node: gradients of a replay do not come by there."""
    for name, leaf in named:
        if leaf.requires_grad and leaf.is_leaf and has_node_hooks(leaf):
            raise InputError(
                f"{name} has a hook on the node that gathers its gradient (AccumulateGrad), which a replay passes by",
                fix="register it on the parameter: register_hook, or register_post_accumulate_grad_hook with "
                "prepare(x, training=True)",
            )


def _nothing(*gradients: Any) -> None:
    """A hook that changes nothing."""


def _is_held(leaf: torch.Tensor) -> bool:
    """Whether anything holds the node of ``leaf``: else it is a new one each time it is asked for."""
    mark = object()
    node: Any = get_gradient_edge(leaf).node
    node.metadata[_MARK] = mark
    del node
    node = get_gradient_edge(leaf).node
    return node.metadata.pop(_MARK, None) is mark
