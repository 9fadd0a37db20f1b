"""Equal computations, done once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import drop_unused, movable, only_computes, use_calls
from nimble_core.tracing.operator_traits import is_view

__all__ = ["share_equal"]

_RESHAPE = torch.ops.aten.reshape.default  # a view, where that is possible


def share_equal(module: fx.GraphModule) -> int:
    """Let operators with equal arguments compute once, and return how many nodes that saved.

    What draws random numbers, only makes memory, or touches memory that is written in place is never shared. Nor are
    two results that are both returned: whoever writes one of them does not expect to write the other.
    """
    seen: dict[Any, fx.Node] = {}
    returned = _returned(module.graph)
    saved = 0
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not movable(node):
            continue
        if node.op == "call_function" and not only_computes(node.target):
            continue
        key = _key(node)
        first = seen.setdefault(key, node) if key is not None else node
        if first is not node and not (first in returned and node in returned):
            if node in returned:
                returned.add(first)
            use_calls(first, node)
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
            saved += 1
    drop_unused(module)
    return saved


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """Find the calls whose memory the model returns, as it is or in views."""
    found: set[fx.Node] = set()
    pending = list(graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            pending += node.all_input_nodes if is_view(node.target) or node.target is _RESHAPE else ()
    return found


def _key(node: fx.Node) -> Any:
    try:
        key = (node.op, node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    # 1 and 1.0 and True are equal, 0.0 and -0.0 too, but not to an operator.
    return value if isinstance(value, fx.Node) else (type(value), repr(value), value)
