"""Random numbers of a compiled graph, drawn ahead of it by eager's own calls.

A compiler draws other numbers than eager does, so its dropout could not be compared with eager's. What random operators
draw mostly depends on shapes alone: so they run first, in eager's order, and masks reach the compiled kernels as
inputs. Nothing waits for them, and kernels on both sides of a dropout can become one.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from nimble_core.compiler.passes.partition import cut_before
from nimble_core.compiler.to_fx import add_call, arguments_of, draws, drop_unused, pinned, reference_of
from nimble_core.tracing.operator_traits import fills

__all__ = ["draws_apart"]

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_LIKE = {_DROPOUT, _aten.rand_like.default, _aten.randn_like.default}
"""Operators that draw a number for each element of their first argument, whatever its value is."""


def draws_apart(module: fx.GraphModule, where: torch.device) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """Cut a graph into the calls that draw its random numbers, and all the rest.

    Numbers are drawn in a fixed order, so either all of these calls move or none does. Dropout becomes a product with
    its mask, scaled as ATen scales it.

    Args:
        module: changed in place, into the same computation with its draws first.
        where: the device of its tensors.

    Returns:
        ``draws``, from the inputs to a tuple of what the rest reads, inputs among it; and the rest, from these to the
        outputs. If nothing is drawn, or some of it cannot be drawn ahead: None, and ``module`` as it was.
    """
    graph = module.graph
    drawing = [node for node in graph.nodes if draws(node)]
    if not drawing or not all(_can_be_ahead(node) for node in drawing):
        return None, module
    others = [node for node in graph.nodes if node.op in ("call_function", "output") and node not in drawing]
    first = others[0]
    for node in drawing:
        with graph.inserting_before(first):
            drawn = _drawn(graph, node, where)
        if node.target is _DROPOUT:
            with graph.inserting_before(node):
                _apply(graph, node, drawn)
        else:
            node.replace_all_uses_with(drawn)
        graph.erase_node(node)  # numbers that nobody reads count as read
    drop_unused(module)
    kept = set(graph.nodes)  # memory that was filled is gone
    return cut_before(module, next(node for node in others if node in kept))


def _can_be_ahead(node: fx.Node) -> bool:
    """Whether what a call draws depends on shapes alone, and nothing writes its result in place."""
    if pinned(node):
        return False
    if node.target is _DROPOUT and not 0.0 < arguments_of(node)["p"] < 1.0:
        return False
    models = node.all_input_nodes  # none of rand, randn, randint, randperm
    if models and not (node.target in _LIKE or fills(node.target)):
        return False
    return not models or (models == [node.args[0]] and reference_of(models[0]) is not None)


def _drawn(graph: fx.Graph, node: fx.Node, where: torch.device) -> fx.Node:
    """Add the call once more, where ``graph`` inserts, and return what it draws: of dropout, its mask."""
    model = node.all_input_nodes[0] if node.all_input_nodes else None
    copies: dict[fx.Node, fx.Node] = {}
    if model is not None:
        recorded = reference_of(model)
        assert recorded is not None
        copies[model] = graph.call_function(
            _aten.empty_strided.default,
            (recorded.sizes, recorded.strides),
            {"dtype": getattr(torch, recorded.dtype), "device": where},
        )
        copies[model].meta["ref"] = recorded
    drawn = graph.node_copy(node, copies.__getitem__)
    return drawn if node.target is not _DROPOUT else add_call(graph, operator.getitem, (drawn, 1), (drawn,))


def _apply(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> None:
    """Compute dropout's results from its mask."""
    given = arguments_of(node)
    for user in list(node.users):
        result = mask
        if user.args[1] == 0:
            kept = add_call(graph, _aten.mul.Tensor, (given["input"], mask), (node, user))
            result = add_call(graph, _aten.mul.Tensor, (kept, 1.0 / (1.0 - given["p"])), (node, user))
        else:
            mask.meta["ref"] = reference_of(user)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
