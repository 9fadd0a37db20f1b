"""What depends on weights alone, computed once, ahead of time, and again when weights change.

The graph is cut in two: one from the model's own tensors to constants, run now and on every refresh, and the rest,
which reads the constants. Folded weights, joined weights, weights in another layout, masks and positions are all alike
to this cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.conv_forms import padded_channels
from nimble_core.compiler.passes.fold_batchnorm import narrowed, norm_scale, norm_shift, scaled_weight, shift_as
from nimble_core.compiler.to_fx import FIXED_PREFIX, add_call, drop_unused, graph_module, made_of, only_computes, pinned
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.operator_traits import is_view, overlaps_itself
from nimble_core.tracing.strides import restrided

__all__ = ["WEIGHT_FUNCTIONS", "split_constants"]

WEIGHT_FUNCTIONS = {norm_scale, norm_shift, narrowed, scaled_weight, shift_as, padded_channels}
"""Our own functions that compute weights from weights."""

_GROWTH_NBYTES = 64 << 20
"""Constants that are larger by this than what they are made of stay calls."""


def split_constants(module: fx.GraphModule, names: dict[str, str]) -> Folded | None:
    """Cut ``module`` down to what depends on its inputs; the rest becomes attributes ``folded_<n>``.

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
    roots = [node for node in module.graph.nodes if node in constant and _is_wanted(node, constant)]
    if not roots:
        return None
    _hand_out_copies(module, constant)
    values = _values(module, roots)
    kept = [(node, value) for node, value in zip(roots, values, strict=True) if not _grows(module, node, value)]
    if not kept:
        return None
    compute, sources = _cut(module, [node for node, _ in kept])
    for place, (node, value) in enumerate(kept):
        module.register_buffer(f"folded_{place}", value)
        with module.graph.inserting_before(node):
            folded = module.graph.get_attr(f"folded_{place}")
        folded.meta.update(node.meta)
        node.replace_all_uses_with(folded)
    drop_unused(module)
    module.graph.lint()
    module.recompile()

    def recompute(stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(compute() if stand_in is None else _WithStandIns(compute, stand_in).run())

    constants = tuple(value for _, value in kept)
    return Folded(recompute, constants, tuple((names.get(one, one), getattr(module, one)) for one in sources))


class _WithStandIns(fx.Interpreter):
    """Runs a graph with other tensors in place of its attributes."""

    def __init__(self, module: fx.GraphModule, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(module)
        self._stand_in = stand_in

    def fetch_attr(self, target: str) -> Any:
        """Return the stand-in of an attribute."""
        found = super().fetch_attr(target)
        return self._stand_in(found) if isinstance(found, torch.Tensor) else found


def _cut(module: fx.GraphModule, roots: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[str]]:
    """Copy what computes ``roots`` into a graph of its own, and name the attributes that it reads."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in made_of(roots, module.graph):
        copies[node] = graph.node_copy(node, lambda one: copies[one])
    graph.output([copies[node] for node in roots])
    read = (str(node.target) for node in graph.nodes if node.op == "get_attr")
    sources = dict.fromkeys(one for one in read if not one.startswith(FIXED_PREFIX))  # these never change
    return graph_module(module, graph), list(sources)


def _values(module: fx.GraphModule, roots: Sequence[fx.Node]) -> list[torch.Tensor]:
    """Compute ``roots`` now, each in memory of its own."""
    compute, _ = _cut(module, roots)
    with torch.no_grad():
        return [value.contiguous() if overlaps_itself(value) else value.clone() for value in compute()]


def _grows(module: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> bool:
    """Whether a constant is much larger than what it is made of."""
    if value.nbytes <= _GROWTH_NBYTES:
        return False
    sources = [one for one in made_of([node], module.graph) if one.op == "get_attr"]
    return bool(value.nbytes > _GROWTH_NBYTES + sum(getattr(module, str(one.target)).nbytes for one in sources))


def _hand_out_copies(module: fx.GraphModule, constant: set[fx.Node]) -> None:
    """Let the graph return copies of constants, because whoever gets them may write them."""
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
    """Whether a constant has a value of its own: a view of a weight reads live weights at no cost."""
    while is_view(node.target) and node.op == "call_function":
        if not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _is_wanted(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Whether a node computes a constant that others than constants read."""
    return node.op == "call_function" and _computes(node) and any(user not in constant for user in node.users)
