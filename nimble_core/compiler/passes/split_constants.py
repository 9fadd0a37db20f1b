"""What depends on weights alone is computed once, ahead of time, and can be computed again when weights change.

The graph is cut in two: one from the model's own tensors to constants, run now and on every refresh, and the rest,
which reads the constants. Folded weights, joined weights, weights in another layout, masks and positions: all of it is
the same to this cut.
"""

from __future__ import annotations

import torch
from torch import fx

from nimble_core.compiler.passes.conv_forms import padded_channels
from nimble_core.compiler.passes.fold_batchnorm import narrowed, norm_scale, norm_shift, scaled_weight, shift_as
from nimble_core.compiler.to_fx import add_call, drop_unused, graph_module, is_view, made_of, only_computes, pinned
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.operator_traits import overlaps_itself
from nimble_core.tracing.strides import restrided

__all__ = ["WEIGHT_FUNCTIONS", "split_constants"]

WEIGHT_FUNCTIONS = {norm_scale, norm_shift, narrowed, scaled_weight, shift_as, padded_channels}
"""Functions of our own that compute weights from weights."""

_GROWTH_NBYTES = 64 << 20
"""Constants that are larger than this and larger than what they are made of stay calls."""


def split_constants(module: fx.GraphModule, names: dict[str, str]) -> Folded | None:
    """Cut ``module`` down to what depends on its inputs; what it reads instead becomes attributes ``folded_<n>``.

    Args:
        module: changed in place.
        names: what the given tensors are called in the model, by attribute (for messages).

    Returns:
        The constants, with what computes them and what they are made of; None if there are none.
    """
    constant: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if not pinned(node):
                constant.add(node)
        elif node.op == "call_function" and _pure(node) and all(one in constant for one in node.all_input_nodes):
            constant.add(node)
    computed = {node for node in constant if node.op == "call_function" and _computes(node)}
    roots = [node for node in module.graph.nodes if node in computed and _wanted_outside(node, constant)]
    if not roots:
        return None
    _hand_out_copies(module, constant)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in made_of(roots, module.graph):
        copies[node] = graph.node_copy(node, lambda one: copies[one])
    graph.output([copies[node] for node in roots])
    compute = graph_module(module, graph)
    with torch.no_grad():
        values = [value.contiguous() if overlaps_itself(value) else value.clone() for value in compute()]
    kept: list[torch.Tensor] = []
    used: list[int] = []
    for place, (node, value) in enumerate(zip(roots, values, strict=True)):
        if value.nbytes > _GROWTH_NBYTES:
            parts = [one for one in made_of([copies[node]], graph) if one.op == "get_attr"]
            if value.nbytes > _GROWTH_NBYTES + sum(getattr(module, str(one.target)).nbytes for one in parts):
                continue
        name = f"folded_{len(kept)}"
        module.register_buffer(name, value)
        with module.graph.inserting_before(node):
            constant_node = module.graph.get_attr(name)
        constant_node.meta.update(node.meta)
        node.replace_all_uses_with(constant_node)
        kept.append(value)
        used.append(place)
    wanted = [copies[roots[place]] for place in used]
    sources = dict.fromkeys(str(one.target) for one in made_of(wanted, graph) if one.op == "get_attr")
    drop_unused(module)
    module.graph.lint()
    module.recompile()
    if not kept:
        return None

    def recompute() -> list[torch.Tensor]:
        with torch.no_grad():
            values = compute()
        return [values[place] for place in used]

    return Folded(recompute, tuple(kept), tuple((names.get(one, one), getattr(module, one)) for one in sources))


def _hand_out_copies(module: fx.GraphModule, constant: set[fx.Node]) -> None:
    """Let the graph return copies of constants: whoever gets them may write them."""
    outputs = module.graph.output_node()
    for result in outputs.all_input_nodes:
        made = result.args[0] if result.target is restrided else result
        if made in constant and isinstance(made, fx.Node) and _computes(made):
            with module.graph.inserting_before(outputs):
                copy = add_call(module.graph, torch.ops.aten.clone.default, (result,), (result,))
            outputs.replace_input_with(result, copy)


def _pure(node: fx.Node) -> bool:
    return not pinned(node) and (node.target in WEIGHT_FUNCTIONS or only_computes(node.target))


def _computes(node: fx.Node) -> bool:
    """Whether a constant node has a value of its own (a view of a weight reads live weights, and costs nothing)."""
    while is_view(node.target) and node.op == "call_function":
        if not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _wanted_outside(node: fx.Node, constant: set[fx.Node]) -> bool:
    return any(user not in constant for user in node.users)
