"""Which library routine computes each convolution with what follows it, decided by measurement.

Which form is fastest depends on shape, type and device, so each distinct convolution is timed by itself in all its
forms (``conv_forms``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.conv_forms import Form, Site, forms_of
from nimble_core.compiler.passes.decisions import Decisions, example
from nimble_core.compiler.passes.fold_batchnorm import affine, folded_into
from nimble_core.compiler.to_fx import (
    add_call,
    arguments_of,
    drop_unused,
    movable,
    pinned,
    recorded_ancestor,
    reference_of,
)
from nimble_core.ir.program import TensorRef

__all__ = ["choose_forms", "contiguous_is_faster", "sites_of"]

_aten = torch.ops.aten

_CLEARLY = 0.97
"""What replaces eager's form, or channels last, takes at most this share of its time."""
_STAY_CONVOLUTIONS = ("separate", "padded channels")
"""Forms whose graph still holds ``aten.convolution``, by which Inductor chooses layouts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the graph a site is.

    Args:
        convolution: the convolution alone.
        norm: the scale and shift of its result, if there is one.
        total: the sum, if there is one.
        addend: what is added.
        last: the node whose result is the site's.
    """

    convolution: fx.Node
    norm: fx.Node | None
    total: fx.Node | None
    addend: fx.Node | None
    last: fx.Node


def sites_of(module: fx.GraphModule, *, channels_last: bool) -> list[tuple[Site, Place]]:
    """Find every plain two-dimensional convolution, with the scale, sum and ReLU that alone read it."""
    found = []
    taken: set[fx.Node] = set()
    # The later of two convolutions that are added runs with the sum: by then both are there.
    for node in reversed(list(module.graph.nodes)):
        if node.target is _aten.convolution.default and movable(node):
            site = _site_at(node, taken, channels_last=channels_last)
            if site is not None:
                found.append(site)
    return found


def _site_at(node: fx.Node, taken: set[fx.Node], *, channels_last: bool) -> tuple[Site, Place] | None:
    """Find the site of a convolution, and add its sum to those that are ``taken``."""
    given = arguments_of(node)
    source, weight, result = (reference_of(one) for one in (given["input"], recorded_ancestor(given["weight"]), node))
    if source is None or result is None or weight is None or given["transposed"]:
        return None
    if len(source.sizes) != 4 or len(weight.sizes) != 4:
        return None
    last, norm, total, addend = node, None, None, None
    user = _only_user(last)
    if user is not None and user.target is affine and given["bias"] is None:
        last = norm = user
        user = _only_user(last)
    if user is not None and user not in taken and _is_sum(user, last, result):
        taken.add(user)
        addend = next(one for one in user.args[:2] if one is not last)
        last = total = user
        user = _only_user(last)
    if user is not None and user.target is _aten.relu.default and not pinned(user):
        last = user
    site = Site(
        (source.sizes, (result.sizes[1], *weight.sizes[1:])),  # all output channels of merged siblings
        (tuple(given["stride"]), tuple(given["padding"]), tuple(given["dilation"]), int(given["groups"])),
        result.dtype,
        channels_last,
        given["bias"] is not None or norm is not None,
        total is not None,
        last.target is _aten.relu.default,
    )
    return site, Place(node, norm, total, addend if isinstance(addend, fx.Node) else None, last)


def _is_sum(user: fx.Node, of: fx.Node, result: TensorRef) -> bool:
    """Whether ``user`` adds a tensor of the same shape to ``of``, and a ReLU alone reads that."""
    if user.target is not _aten.add.Tensor or not movable(user):
        return False
    if len(user.args) != 2 or user.kwargs.get("alpha", 1) != 1:
        return False
    other = next((one for one in user.args if isinstance(one, fx.Node) and one is not of), None)
    recorded = reference_of(other) if other is not None else None
    after = _only_user(user)
    if recorded is None or after is None or after.target is not _aten.relu.default:
        return False
    return (recorded.sizes, recorded.dtype) == (result.sizes, result.dtype)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _times_ns(site: Site, device: torch.device, decisions: Decisions, *, compiled: bool) -> dict[str, float] | None:
    """Time every form of ``site``, ns by name; None if nothing is measured.

    For a compiler, what follows the bare convolution counts as one pass over its result.
    """
    forms = forms_of(site, device.type)

    def calls() -> list[Callable[[], object]]:
        x, given, bias, addend = _example(site, device)
        out = torch.empty(site.out_sizes, dtype=x.dtype, device=device)
        return [
            call(form, x, form.weight(given) if form.weight else given, bias, addend, out) for form in forms.values()
        ]

    def call(form: Form, x: torch.Tensor, weight: torch.Tensor, bias: Any, addend: Any, out: Any) -> Any:
        if form.bare is None or not compiled:
            return partial(form.run, x, weight, bias, addend)
        layout = torch.channels_last if site.channels_last else torch.contiguous_format
        wide = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, form.zeros[0])).contiguous(memory_format=layout)
        passes = [partial(form.bare, wide, weight, None, None)]
        if site.bias or site.add or site.relu:
            passes.append(partial(torch.relu, out))
        return lambda: [one() for one in passes]

    times = decisions.times_ns(site, calls)
    return None if times is None else dict(zip(forms, times, strict=True))


def _example(site: Site, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
    """Input, weight, bias and addend of ``site``; the last two are None if it has none."""
    dtype = getattr(torch, site.dtype)
    layout = torch.channels_last if site.channels_last else torch.contiguous_format

    def made(sizes: Sequence[int]) -> torch.Tensor:
        chosen = layout if len(sizes) == 4 else torch.contiguous_format
        return example(sizes, dtype, device, chosen)

    return (
        made(site.sizes[0]),
        made(site.sizes[1]),
        made(site.sizes[1][:1]) if site.bias else None,
        made(site.out_sizes) if site.add else None,
    )


def contiguous_is_faster(module: fx.GraphModule, device: torch.device, decisions: Decisions, *, compiled: bool) -> bool:
    """Whether convolutions, each in its fastest form, take less time contiguous than channels last.

    Only float32 is asked: half precision runs on tensor cores, which want channels last. Unmeasured, float32 keeps
    eager's layout.
    """
    layouts = [sites_of(module, channels_last=layout) for layout in (False, True)]
    if not layouts[0] or any(site.dtype != "float32" for site, _ in layouts[0]):
        return False
    totals = []
    for sites in layouts:
        times = [_times_ns(site, device, decisions, compiled=compiled) for site, _ in sites]
        totals.append(sum(min(own.values()) for own in times if own is not None))
    first = layouts[0][-1][1].convolution  # the last that is found is the first in the graph
    unmeasured = decisions.timer is None
    return decisions.take(first, "contiguous", wanted=unmeasured or totals[0] < _CLEARLY * totals[1])


def choose_forms(
    module: fx.GraphModule, device: torch.device, decisions: Decisions, *, channels_last: bool, compiled: bool
) -> int:
    """Replace each convolution, with what follows it, by its fastest form.

    Args:
        module: changed in place.
        device: where it runs.
        decisions: if nothing is measured, library calls that do several eager calls at once are taken.
        channels_last: layout of all convolutions.
        compiled: whether a compiler takes what follows a convolution.

    Returns:
        How many convolutions are not eager's own any more.
    """
    count = 0
    stays = compiled and channels_last and _resizes(module)
    for site, place in sites_of(module, channels_last=channels_last):  # the last one first
        forms = forms_of(site, device.type)
        if stays:
            forms, stays = {name: forms[name] for name in _STAY_CONVOLUTIONS if name in forms}, False
        best = _best_form(site, tuple(forms), device, decisions, compiled=compiled)
        for name, form in forms.items():
            if name != "separate" and decisions.take(place.convolution, name, wanted=best == name):
                _replace(module.graph, place, form, site.sizes[1][0], compiled=compiled)
                count += 1
                break
    drop_unused(module)
    return count


def _resizes(module: fx.GraphModule) -> bool:
    """Whether images are resized, so that the last convolution has to stay one.

    Inductor lays images out channels last only if some convolution reads them, directly or through other operators.
    Else resized images are contiguous, and the kernels that make them have to transpose: in a SegFormer these took
    192 us on an H200 instead of 88.
    """
    return any(str(node.target).startswith("aten.upsample_") for node in module.graph.nodes)


def _best_form(site: Site, names: Sequence[str], device: torch.device, decisions: Decisions, *, compiled: bool) -> str:
    """Name of the fastest form of these if it is clearly faster than eager's, else ``"separate"``."""
    times = _times_ns(site, device, decisions, compiled=compiled)
    if times is None:
        return "separate" if compiled else {"cuda": "cudnn fused", "cpu": "onednn fused"}.get(device.type, "")
    best = min(names, key=times.__getitem__)
    return best if times[best] <= _CLEARLY * times["separate"] else "separate"


def _replace(graph: fx.Graph, place: Place, form: Form, channels: int, *, compiled: bool) -> None:
    if compiled and form.bare is not None:
        _replace_convolution(graph, place.convolution, form, channels)
        return
    given = arguments_of(place.convolution)
    with graph.inserting_before(place.last):
        weight, bias = given["weight"], given["bias"]
        if place.norm is not None:
            weight, bias = folded_into(graph, weight, place.norm)
        if form.weight:
            weight = graph.call_function(form.weight, (weight,))
        parts = (place.convolution, place.norm, place.total, place.last)
        sources = tuple(dict.fromkeys(one for one in parts if one is not None))
        fused = add_call(graph, form.run, (given["input"], weight, bias, place.addend), sources)
    place.last.replace_all_uses_with(fused)


def _replace_convolution(graph: fx.Graph, convolution: fx.Node, form: Form, channels: int) -> None:
    """Replace the convolution alone: a compiler takes all that follows it."""
    given = arguments_of(convolution)
    with graph.inserting_before(convolution):
        source, weight, bias = given["input"], given["weight"], given["bias"]
        if form.weight:
            weight = graph.call_function(form.weight, (weight,))
        if form.zeros[0]:
            source = graph.call_function(_aten.constant_pad_nd.default, (source, [0, 0, 0, 0, 0, form.zeros[0]]))
        made = add_call(graph, form.bare, (source, weight, None, None), (convolution,))
        if form.zeros[1]:
            made = add_call(graph, _aten.slice.Tensor, (made, 1, 0, channels), (convolution,))
        if bias is not None:
            shaped = graph.call_function(_aten.reshape.default, (bias, [1, -1, 1, 1]))
            made = add_call(graph, _aten.add.Tensor, (made, shaped), (convolution,))
    convolution.replace_all_uses_with(made)
