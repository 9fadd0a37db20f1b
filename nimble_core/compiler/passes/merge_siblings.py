"""Siblings: products, and convolutions, of one input with different weights become one with the weights side by side.

Query, key and value of an attention, the 1x1 branches of an Inception block: one larger call fills more of the device
than several small ones, and needs no streams to do so. It pays where the larger call takes no longer than the small
ones after each other, and side by side on streams, all of which is measured. For libraries siblings are whole sites,
with the scale, shift and ReLU that follow each of them, so that a single call does it all; slices that have to be
copied for who reads them are counted.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.channels_last import keep_strides
from nimble_core.compiler.passes.conv_algorithms import Place, Site, measured, side_by_side, sites_of
from nimble_core.compiler.passes.decisions import Decisions, Timer
from nimble_core.compiler.passes.fold_batchnorm import affine
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
from nimble_core.ir.program import TensorRef

__all__ = ["joined", "merge_siblings"]

_aten = torch.ops.aten
_HAND_OFF_NS = 3_000.0
"""What running siblings side by side costs beside their own time: forks and joins of streams. Where it is not timed."""


def joined(parts: Sequence[torch.Tensor | None], sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Weights or biases side by side along the first dimension; zeros for a bias that is not there."""
    made = [torch.zeros(size, dtype=like.dtype, device=like.device) if part is None else part
            for part, size in zip(parts, sizes, strict=True)]  # fmt: skip
    # The layout stays theirs: 1x1 weights are in either, and strides that only one has would decide the result's.
    return torch.cat(made)


def merge_siblings(
    module: fx.GraphModule, device: torch.device, decisions: Decisions, *, channels_last: bool, compiled: bool
) -> int:
    """Merge sibling products, and convolutions, where it pays; how many calls that saved.

    Args:
        module: changed in place.
        device: where it runs.
        decisions: where nothing is measured, products are merged without asking, convolutions are not.
        channels_last: layout of all convolutions.
        compiled: a compiler takes what follows a convolution, and reads slices of channels as they are.
    """
    sites: Sites = {}
    if not compiled:
        sites = {one.convolution: (site, one) for site, one in sites_of(module, channels_last=channels_last)}
    saved = 0
    for group in _groups(module, sites, compiled=compiled):
        if decisions.given is not None or decisions.timer is None:
            wanted = group[0].target is not _aten.convolution.default
        elif group[0] in sites:
            wanted = _sites_pay([sites[node] for node in group], device, decisions, decisions.timer)
        else:
            wanted = _pays(group, device, decisions, decisions.timer)
        if decisions.take(group[0], "merged siblings", wanted=wanted):
            _merge(module.graph, group, [sites[node][1] for node in group if node in sites])
            saved += len(group) - 1
    if saved:
        keep_strides(module)
    drop_unused(module)
    return saved


Sites = Mapping[fx.Node, tuple[Site, Place]]


def _groups(module: fx.GraphModule, sites: Sites, *, compiled: bool) -> list[list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in module.graph.nodes:
        key = _key(node)
        if key is not None and not compiled and node.target is _aten.convolution.default:
            key = (key, _tail(*sites[node])) if node in sites and sites[node][1].total is None else None
        if key is not None:
            found.setdefault(key, []).append(node)
    return [group for group in found.values() if len(group) > 1]


def _tail(site: Site, place: Place) -> tuple[bool, bool, bool]:
    """What follows a convolution: siblings have to be alike in that."""
    return place.norm is not None, site.bias, site.relu


def _key(node: fx.Node) -> Any:
    made = reference_of(node)
    if node.op != "call_function" or not movable(node) or made is None:
        return None
    if node.target in (_aten.addmm.default, _aten.mm.default):
        given = arguments_of(node)
        rows = given["mat1"] if "mat1" in given else given["self"]
        weight = _weight_of(given["mat2"])
        bias = given["self"] if node.target is _aten.addmm.default else None
        plain = given.get("alpha", 1) == 1 and given.get("beta", 1) == 1
        if weight is None or not plain or (bias is not None and not _is_vector(bias, made.sizes[1])) or _is_given(rows):
            return None
        return node.target, rows, given["mat2"].target, _dtype(weight), bias is None
    if node.target is _aten.convolution.default:
        given = arguments_of(node)
        weight = given["weight"]
        if given["transposed"] or given["groups"] != 1 or not _only_weights(weight):
            return None
        kernel = reference_of(recorded_ancestor(weight))
        if kernel is None or len(kernel.sizes) != 4 or (given["bias"] is not None and not _only_weights(given["bias"])):
            return None
        parameters = tuple(tuple(given[name]) for name in ("stride", "padding", "dilation"))
        return node.target, given["input"], kernel.sizes[1:], kernel.dtype, parameters
    return None


def _weight_of(node: Any) -> fx.Node | None:
    """The weight ``[out, in]`` whose transpose this is."""
    if isinstance(node, fx.Node) and node.target is _aten.t.default and isinstance(node.args[0], fx.Node):
        weight = node.args[0]
        return weight if _is_given(weight) and not pinned(weight) else None
    return None


def _is_given(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _is_vector(node: Any, size: int) -> bool:
    recorded = reference_of(node) if _is_given(node) and not pinned(node) else None
    return recorded is not None and recorded.sizes == (size,)


def _only_weights(node: Any) -> bool:
    """Whether a node is computed from given tensors that nobody writes."""
    pending = [node]
    while pending:
        one = pending.pop()
        if pinned(one) or one.op == "placeholder" or (one.op != "get_attr" and not one.all_input_nodes):
            return False
        pending += one.all_input_nodes
    return True


def _dtype(node: fx.Node) -> str:
    recorded = reference_of(node)
    return recorded.dtype if recorded else ""


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, int]:
    """``(input, weight, bias, output features)``."""
    given, recorded = arguments_of(node), reference_of(node)
    assert recorded is not None
    if node.target is _aten.convolution.default:
        return given["input"], given["weight"], given["bias"], recorded.sizes[1]
    weight = given["mat2"].args[0]
    if node.target is _aten.addmm.default:
        return given["mat1"], weight, given["self"], recorded.sizes[1]
    return given["self"], weight, None, recorded.sizes[1]


def _example(recorded: TensorRef, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    made = torch.empty(sizes, dtype=getattr(torch, recorded.dtype), device=device)
    if len(sizes) == 4 and device.type == "cuda":
        made = made.to(memory_format=torch.channels_last)
    return made.uniform_(-0.1, 0.1)


def _pays(group: Sequence[fx.Node], device: torch.device, decisions: Decisions, timer: Timer) -> bool:
    source = _parts(group[0])[0]
    recorded, results = reference_of(source), [reference_of(node) for node in group]
    if recorded is None or not all(results):
        return False
    widths = [_parts(node)[3] for node in group]
    target, _, *alike = _key(group[0])
    key = (target, *alike, recorded.sizes, *widths)
    return _worth(key, decisions, partial(_times, group, recorded, widths, device, timer))


def _worth(key: Hashable, decisions: Decisions, measure: Callable[[], dict[str, float]]) -> bool:
    """Whether one call is not slower than several, as was measured before or is now."""
    if key not in decisions.times:
        decisions.times[key] = measure()
    return decisions.times[key]["merged"] <= decisions.times[key]["apart"]


def _times(
    group: Sequence[fx.Node], recorded: TensorRef, widths: Sequence[int], device: torch.device, timer: Timer
) -> dict[str, float]:
    """ns of a group as one, and of its members by themselves."""
    x = _example(recorded, recorded.sizes, device)

    def call(width: int) -> Callable[[], object]:
        if group[0].target is _aten.convolution.default:
            kernel = reference_of(recorded_ancestor(_parts(group[0])[1]))
            assert kernel is not None
            weight = _example(recorded, (width, *kernel.sizes[1:]), device)
            return partial(_aten.convolution.default, x, weight, None, *group[0].args[3:])
        weight, bias = (_example(recorded, sizes, device) for sizes in ((width, recorded.sizes[-1]), (width,)))
        return partial(_aten.addmm.default, bias, x, weight.t())

    members = {width: call(width) for width in widths}
    merged, beside, *taken = timer([call(sum(widths)), tuple(map(call, widths)), *members.values()])
    times = dict(zip(members, taken, strict=True))
    return _outcome(merged, [times[width] for width in widths], beside)


def _outcome(merged: float | None, apart: Sequence[float | None], beside: float | None) -> dict[str, float]:
    """ns as one, and apart: after each other or side by side, whichever is less. What does not run does not pay."""
    times = [one for one in apart if one is not None and math.isfinite(one)]
    if merged is None or not math.isfinite(merged) or len(times) < len(apart):
        return {"merged": math.inf, "apart": 0.0}
    return {"merged": merged, "apart": min(sum(times), max(times) + _HAND_OFF_NS if beside is None else beside)}


def _sites_pay(group: Sequence[tuple[Site, Place]], device: torch.device, decisions: Decisions, timer: Timer) -> bool:
    """Each in its fastest form; and then the slices that somebody reads who wants them without gaps."""
    singles = [site for site, _ in group]
    (source, (_, *kernel)), widths = singles[0].sizes, [site.sizes[1][0] for site in singles]
    whole = replace(singles[0], sizes=(source, (sum(widths), *kernel)))
    copied = [] if _dense(whole) else [site.out_sizes[1] for site, place in group for _ in range(_copies(place))]

    def measure() -> dict[str, float]:
        tried = measured([*singles, whole], device, decisions, timer)
        best = {site: min(own, key=own.__getitem__) for site, own in tried.items()}
        out = torch.empty(whole.out_sizes, dtype=getattr(torch, whole.dtype), device=device)
        out = out.to(memory_format=torch.channels_last) if whole.channels_last else out
        layout = torch.channels_last if whole.channels_last else torch.contiguous_format
        slices = [partial(out[:, :width].contiguous, memory_format=layout) for width in copied]
        beside, *copies = timer([side_by_side([(site, best[site]) for site in singles], device), *slices])
        merged = tried[whole][best[whole]] + sum(math.inf if one is None else one for one in copies)
        return _outcome(merged, [tried[site][best[site]] for site in singles], beside)

    return _worth(("siblings", *singles, *copied), decisions, measure)


def _dense(site: Site) -> bool:
    """Whether channels that are neighbours lie in one piece of memory."""
    return not site.channels_last and site.out_sizes[0] == 1


def _copies(place: Place) -> int:
    """How many read a result and copy a slice before; what joins it to others copies it anyway."""
    return sum(user.target is not _aten.cat.default for user in place.last.users)


def _merge(graph: fx.Graph, group: Sequence[fx.Node], places: Sequence[Place]) -> None:
    """One call for a group; of sites also one scale and shift, and one ReLU."""
    sources = [_parts(node) for node in group]
    widths = [width for *_, width in sources]
    first = group[0]
    norms = [place.norm for place in places if place.norm is not None]
    ends = [place.last for place in places] or group
    vectors = [one for norm in norms for one in norm.args[1:3] if isinstance(one, fx.Node)]
    # Weights are given tensors, or made of them: they may all come before the first sibling.
    late = set(itertools.dropwhile(lambda one: one is not first, list(graph.nodes)))
    for needed in made_of([*vectors, *(one for part in sources for one in part[1:3] if one is not None)], graph):
        if needed in late:
            late.remove(needed)
            first.prepend(needed)
    with graph.inserting_before(first):
        weight = graph.call_function(joined, ([one[1] for one in sources], widths, sources[0][1]))
        biases = [one[2] for one in sources]
        bias = (
            graph.call_function(joined, (biases, widths, sources[0][1])) if any(b is not None for b in biases) else None
        )
        if first.target is _aten.convolution.default:
            merged = graph.call_function(first.target, (sources[0][0], weight, bias, *first.args[3:]))
        else:
            turned = graph.call_function(_aten.t.default, (weight,))
            if bias is None:
                merged = graph.call_function(_aten.mm.default, (sources[0][0], turned))
            else:
                merged = graph.call_function(_aten.addmm.default, (bias, sources[0][0], turned))
        merged = _all_of(merged, group, widths)
        if norms:
            scale, shift = (
                graph.call_function(joined, ([norm.args[at] for norm in norms], widths, norms[0].args[at]))
                for at in (1, 2)
            )
            merged = _all_of(graph.call_function(affine, (merged, scale, shift)), norms, widths)
        if ends[0].target is _aten.relu.default:
            merged = _all_of(graph.call_function(_aten.relu.default, (merged,)), ends, widths)
        slices = graph.call_function(_aten.split_with_sizes.default, (merged, widths, 1))
        pieces = [graph.call_function(operator.getitem, (slices, place)) for place in range(len(group))]
    for node, piece in zip(ends, pieces, strict=True):
        piece.meta.update(node.meta)
        piece.meta["eager"] = ()
        node.replace_all_uses_with(piece)


def _all_of(merged: fx.Node, nodes: Sequence[fx.Node], widths: Sequence[int]) -> fx.Node:
    """``merged``, which stands for all of ``nodes``, as wide as they are together."""
    use_calls(merged, *nodes)
    recorded = reference_of(nodes[0])
    if recorded is not None:
        merged.meta["ref"] = replace(recorded, sizes=(recorded.sizes[0], sum(widths), *recorded.sizes[2:]))
    return merged
