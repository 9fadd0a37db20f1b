"""A graph cut in two, so that one part can be compiled while the other runs as it was recorded."""

from __future__ import annotations

from torch import fx

from nimble_core.compiler.to_fx import graph_module

__all__ = ["cut_before"]


def cut_before(module: fx.GraphModule, first: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a graph before ``first``. O(nodes).

    Args:
        module: from inputs to a tuple of outputs; left as it is.
        first: the first node of the second part.

    Returns:
        ``head``, from the inputs to a tuple of what the tail reads or the whole returns; and ``tail``, from these to
        the outputs. Both read the attributes of ``module``.

    >>> def model(x):
    ...     y = x.exp()
    ...     return (y + x.sin(),)
    >>> module = fx.symbolic_trace(model)
    >>> head, tail = cut_before(module, list(module.graph.nodes)[2])
    >>> x = torch.ones(2)
    >>> torch.equal(tail(*head(x))[0], module(x)[0])
    True
    """
    nodes = list(module.graph.nodes)
    at = nodes.index(first)
    behind = nodes[at:]
    ahead = {node for node in nodes[:at] if node.op != "get_attr"}
    crossing = list(dict.fromkeys(one for node in behind for one in node.all_input_nodes if one in ahead))
    head, tail = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[:at]:
        copies[node] = head.node_copy(node, lambda one: copies[one])
    head.output(tuple(copies[node] for node in crossing))
    moved = {node: tail.placeholder(node.name) for node in crossing}
    for node, placeholder in moved.items():
        placeholder.meta.update(node.meta)

    def copied(one: fx.Node) -> fx.Node:
        if one not in moved:
            moved[one] = tail.node_copy(one, copied)  # an attribute
        return moved[one]

    for node in behind:
        if node not in moved:
            moved[node] = tail.node_copy(node, copied)
    return graph_module(module, head), graph_module(module, tail)
