"""A small certain gain: equal computations once."""

from __future__ import annotations

from typing import Any

from torch import fx

from nimble_core.lift import drop_unused, movable, only_computes, use_calls

__all__ = ["share_equal"]


def share_equal(module: fx.GraphModule) -> int:
    """Let operators with equal arguments compute once; how many nodes that saved.

    What draws random numbers, only makes memory, or touches memory that is written in place stays as often as it is.
    """
    seen: dict[Any, fx.Node] = {}
    saved = 0
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not movable(node):
            continue
        if node.op == "call_function" and not only_computes(node.target):
            continue
        key = _key(node)
        first = seen.setdefault(key, node) if key is not None else node
        if first is not node:
            use_calls(first, node)
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
            saved += 1
    drop_unused(module)
    return saved


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
