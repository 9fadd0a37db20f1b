"""Sibling products and convolutions, which read one input with different weights, as one call.

Query, key and value of an attention and the 1x1 branches of an Inception block are siblings. One larger call fills more
of the device than several small ones and needs no streams to do so. Convolutions are merged for a compiler only: it
reads slices of channels as they are, where a library would have to copy them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.decisions import Decisions, example
from nimble_core.compiler.to_fx import (
    arguments_of,
    drop_unused,
    made_of,
    movable,
    pinned,
    recorded_ancestor,
    reference_of,
    use_calls,
)
from nimble_core.runtime.device import Timed

__all__ = ["merge_siblings"]

_aten = torch.ops.aten
_CONVOLUTION, _PRODUCTS = _aten.convolution.default, (_aten.addmm.default, _aten.mm.default)


@dataclass(frozen=True, slots=True)
class _Sibling:
    """A product or convolution whose weight, ``[out, in, ...]``, and bias come from given tensors alone."""

    node: fx.Node
    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def width(self) -> int:
        """Output features."""
        return _sizes(self.node)[1]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Sizes of the weight without its output features."""
        return _sizes(recorded_ancestor(self.weight))[1:]

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Arguments of a convolution behind its bias."""
        return self.node.args[3:] if self.node.target is _CONVOLUTION else ()


def merge_siblings(module: fx.GraphModule, device: torch.device, decisions: Decisions, *, convolutions: bool) -> int:
    """Merge sibling products, and convolutions if asked to, where that pays.

    Args:
        module: changed in place.
        device: where it runs.
        decisions: if nothing is measured, products are merged and convolutions are not.
        convolutions: whether convolutions are merged as well.

    Returns:
        How many calls were saved.
    """
    groups: dict[Any, list[_Sibling]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and (convolutions or node.target is not _CONVOLUTION):
            sibling = _sibling(node)
            if sibling is not None:
                groups.setdefault(_likeness(sibling), []).append(sibling)
    saved = 0
    for group in groups.values():
        first = group[0].node
        if len(group) > 1 and decisions.take(first, "merged siblings", wanted=_pays(group, device, decisions)):
            _merge(module.graph, group)
            saved += len(group) - 1
    drop_unused(module)
    return saved


def _sibling(node: fx.Node) -> _Sibling | None:
    """``node`` as a sibling of others, or None if it cannot be one."""
    if node.target not in (_CONVOLUTION, *_PRODUCTS) or reference_of(node) is None or not movable(node):
        return None
    given = arguments_of(node)
    if node.target is _CONVOLUTION:
        found = _Sibling(node, given["input"], given["weight"], given["bias"])
        fits = not given["transposed"] and given["groups"] == 1
    else:
        if given["mat2"].target is not _aten.t.default or given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
            return None
        bias = given["self"] if node.target is _aten.addmm.default else None
        found = _Sibling(node, given.get("mat1", given["self"]), given["mat2"].args[0], bias)
        fits = bias is None or _sizes(bias) == (found.width,)
    fits = fits and all(one is None or _from_given(one) for one in (found.weight, found.bias))
    return found if fits and len(found.kernel) in (1, 3) else None


def _likeness(sibling: _Sibling) -> Any:
    """Return what siblings have to agree in."""
    recorded = reference_of(recorded_ancestor(sibling.weight))
    dtype = recorded.dtype if recorded is not None else ""
    parameters = repr(sibling.parameters)
    return sibling.node.target, sibling.source, sibling.kernel, dtype, sibling.bias is None, parameters


def _from_given(node: fx.Node) -> bool:
    """Whether a node is computed from given tensors that nobody writes."""
    return all(
        not pinned(one) and (one.op == "get_attr" or (one.op == "call_function" and bool(one.all_input_nodes)))
        for one in made_of([node], node.graph)
    )


def _sizes(node: fx.Node) -> tuple[int, ...]:
    recorded = reference_of(node)
    return recorded.sizes if recorded is not None else ()


def _pays(group: Sequence[_Sibling], device: torch.device, decisions: Decisions) -> bool:
    """Whether one call takes no longer than its parts, one after another or side by side on streams."""
    source = reference_of(group[0].source)
    if source is None:
        return False
    widths = tuple(one.width for one in group)
    key = (group[0].node.target, group[0].kernel, source.dtype, repr(group[0].parameters), source.sizes, widths)

    def alternatives() -> list[Timed]:
        apart = [_example(group[0], width, device) for width in widths]
        return [_example(group[0], sum(widths), device), lambda: [call() for call in apart], tuple(apart)]

    times = decisions.times_ns(key, alternatives)
    if times is None:
        return group[0].node.target is not _CONVOLUTION
    merged, in_turn, side_by_side = times
    return merged <= min(in_turn, side_by_side) < math.inf


def _example(sibling: _Sibling, width: int, device: torch.device) -> Callable[[], object]:
    """Make a call like ``sibling`` with that many output features."""
    source = reference_of(sibling.source)
    assert source is not None

    def made(sizes: Sequence[int]) -> torch.Tensor:
        channels_last = len(sizes) == 4 and device.type == "cuda"
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return example(sizes, getattr(torch, source.dtype), device, layout)

    x, weight = made(source.sizes), made((width, *sibling.kernel))
    if sibling.node.target is _CONVOLUTION:
        return partial(_aten.convolution.default, x, weight, None, *sibling.parameters)
    return partial(_aten.addmm.default, made((width,)), x, weight.t())


def _merge(graph: fx.Graph, group: Sequence[_Sibling]) -> None:
    first, widths = group[0], [one.width for one in group]
    biases = [one.bias for one in group if one.bias is not None]
    # Weights are computed from given tensors, so all of that may come before the first sibling.
    late = set(dropwhile(lambda one: one is not first.node, list(graph.nodes)))
    for needed in made_of([*(one.weight for one in group), *biases], graph):
        if needed in late:
            first.node.prepend(needed)
    with graph.inserting_before(first.node):
        weight = graph.call_function(_aten.cat.default, ([one.weight for one in group],))
        bias = graph.call_function(_aten.cat.default, (biases,)) if biases else None
        args: tuple[Any, ...]
        target: Any = first.node.target
        if target is _CONVOLUTION:
            args = (first.source, weight, bias, *first.parameters)
        else:
            turned = graph.call_function(_aten.t.default, (weight,))
            args = (first.source, turned) if bias is None else (bias, first.source, turned)
        merged = graph.call_function(target, args)
        use_calls(merged, *(one.node for one in group))
        recorded = reference_of(first.node)
        assert recorded is not None
        merged.meta["ref"] = replace(recorded, sizes=(recorded.sizes[0], sum(widths), *recorded.sizes[2:]))
        parts = graph.call_function(_aten.split_with_sizes.default, (merged, widths, 1))
        for place, one in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, place))
            part.meta.update(one.node.meta)
            part.meta["eager"] = ()
            one.node.replace_all_uses_with(part)
