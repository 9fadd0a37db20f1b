"""Convolutions with what follows them, and which library routine runs each: decided by measurement.

After folding, a convolution is followed by its bias, often by a sum and a ReLU. Libraries have single calls for that
(cuDNN on CUDA, oneDNN on the host), a 1x1 convolution is a matrix product, a depthwise one has kernels of its own.
Which is fastest depends on shape, type and device, so each distinct convolution is timed by itself in all its forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.decisions import Decisions, Timer
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

__all__ = [
    "Form",
    "Site",
    "best_forms",
    "choose_forms",
    "contiguous_is_faster",
    "forms_of",
    "measured",
    "padded_channels",
    "side_by_side",
    "sites_of",
    "times_of",
]

_aten = torch.ops.aten

Routine = Callable[..., torch.Tensor]
"""``(x, weight, bias, addend) -> result``; bias and addend may be None."""

_TENSOR_CORE_CHANNELS = {"float16": 8, "bfloat16": 8, "float32": 4}
"""Multiples of input channels that tensor cores ask for."""

_CLEARLY = 0.97
"""A form that is not faster than this share of eager's is not worth being another than eager's."""


@dataclass(frozen=True, slots=True)
class Site:
    """A convolution and what follows it; all that decides which form is fastest.

    Args:
        sizes: of input and weight, ``((N, C, H, W), (O, C / groups, kH, kW))``.
        parameters: stride, padding, dilation, groups.
        dtype: e.g. ``"float16"``.
        channels_last: layout of input, weight and result.
        bias: whether there is one.
        add: whether a tensor of the result's shape is added.
        relu: whether a ReLU follows.
    """

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    parameters: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
    dtype: str
    channels_last: bool
    bias: bool
    add: bool
    relu: bool

    @property
    def pointwise(self) -> bool:
        """Whether it is a matrix product: 1x1, unit stride, no padding, one group."""
        stride, padding, _, groups = self.parameters
        return self.sizes[1][2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and groups == 1

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.parameters[3] == self.sizes[0][1] == self.sizes[1][0] and self.parameters[3] > 1

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Sizes of the result."""
        (batch, _, *image), (channels, _, *kernel) = self.sizes
        stride, padding, dilation, _ = self.parameters
        spatial = [
            (size + 2 * pad - dil * (kern - 1) - 1) // step + 1
            for size, kern, step, pad, dil in zip(image, kernel, stride, padding, dilation, strict=True)
        ]
        return (batch, channels, *spatial)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute a site.

    Args:
        run: on input, weight, bias and addend.
        weight: what the weight has to be made into first, ahead of time; None: nothing.
        bare: the convolution alone, where all that follows is separate: a compiler fuses that with what comes next.
        zeros: channels of zeros that ``bare`` and ``weight`` expect behind those of the input, and make behind those of
            the result: a compiler writes and skips them in passing.
    """

    run: Routine
    weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    bare: Routine | None = None
    zeros: tuple[int, int] = (0, 0)


def padded_channels(weight: torch.Tensor) -> torch.Tensor:
    """A convolution's weight with zeros up to the next multiples of channels, in and out, that tensor cores ask for."""
    multiple = _TENSOR_CORE_CHANNELS[str(weight.dtype).removeprefix("torch.")]
    missing = [-size % multiple for size in weight.shape[:2]]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, missing[1], 0, missing[0]))
    return padded.to(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the graph a site is.

    Args:
        convolution: alone.
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
    """Every plain two-dimensional convolution of the graph, with the scale, sum and ReLU that alone read it."""
    found = []
    taken: set[fx.Node] = set()
    # The later of two convolutions that are added runs with the sum: by then both are there.
    for node in reversed(list(module.graph.nodes)):
        if node.target is not _aten.convolution.default or not movable(node):
            continue
        given = arguments_of(node)
        source, weight, result = (
            reference_of(one) for one in (given["input"], recorded_ancestor(given["weight"]), node)
        )
        if source is None or result is None or weight is None or given["transposed"]:
            continue
        if len(source.sizes) != 4 or len(weight.sizes) != 4:
            continue
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
        parameters = (tuple(given["stride"]), tuple(given["padding"]), tuple(given["dilation"]), int(given["groups"]))
        site = Site(
            (source.sizes, (result.sizes[1], *weight.sizes[1:])),  # of merged siblings all of theirs
            parameters,
            result.dtype,
            channels_last,
            given["bias"] is not None or norm is not None,
            total is not None,
            last.target is _aten.relu.default,
        )
        found.append((site, Place(node, norm, total, addend if isinstance(addend, fx.Node) else None, last)))
    return found


def _is_sum(user: fx.Node, of: fx.Node, result: TensorRef) -> bool:
    """Whether ``user`` adds a tensor of the same shape to ``of``, and a ReLU alone reads that."""
    if (
        user.target is not _aten.add.Tensor
        or not movable(user)
        or len(user.args) != 2
        or user.kwargs.get("alpha", 1) != 1
    ):
        return False
    other = next((one for one in user.args if isinstance(one, fx.Node) and one is not of), None)
    recorded = reference_of(other) if other is not None else None
    after = _only_user(user)
    if recorded is None or after is None or after.target is not _aten.relu.default:
        return False
    return (recorded.sizes, recorded.dtype) == (result.sizes, result.dtype)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def forms_of(site: Site, device: str) -> dict[str, Form]:
    """Ways to compute ``site``, by name; the first is eager's own."""
    forms = {"separate": _separate(site, _bare(site), open_end=True)}
    if device == "cuda":
        forms |= _on_cuda(site)
    elif site.dtype == "float32" and (site.relu or site.add) and torch.backends.mkldnn.is_available():
        forms["onednn fused"] = _onednn(site)
    if site.pointwise and (site.channels_last or site.sizes[0][2:] == (1, 1)):
        forms["matrix product"] = _matrix_product(site, device)
    return forms


def _separate(site: Site, bare: Routine, *, open_end: bool, weight: Any = None) -> Form:
    """A convolution without bias, and then each thing that follows it."""

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        out = bare(x, weight, None, None) if open_end or bias is None else bare(x, weight, bias, None)
        if bias is not None and open_end:
            out = _aten.add.Tensor(out, _aten.reshape.default(bias, [1, -1, 1, 1]))
        if addend is not None:
            out = _aten.add.Tensor(out, addend)
        return _aten.relu.default(out) if site.relu else out

    return Form(run, weight, bare if open_end else None)


def _on_cuda(site: Site) -> dict[str, Form]:
    stride, padding, dilation, groups = site.parameters
    forms: dict[str, Form] = {}
    if site.dtype in ("float16", "bfloat16"):
        # cuDNN keeps, for the whole process, the routine with which a convolution first ran, whether it was chosen by
        # trial or by rule. What float32 may be rounded to does not matter here, but counts as another convolution.
        def timed(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
            tf32 = not torch.backends.cudnn.allow_tf32
            return _aten.cudnn_convolution.default(x, weight, padding, stride, dilation, groups, True, False, tf32)

        if not torch.backends.cudnn.deterministic and not site.pointwise:  # products have one good routine
            forms["cudnn timed"] = _separate(site, timed, open_end=True)
    multiple = _TENSOR_CORE_CHANNELS.get(site.dtype, 1)
    zeros = (-site.sizes[0][1] % multiple, -site.sizes[1][0] % multiple)
    if any(zeros) and site.channels_last and groups == 1:
        forms["padded channels"] = _padded(site, zeros)
    if site.dtype == "float32" and not site.channels_last and groups == 1 and not site.pointwise:
        kernel_sizes = site.sizes[1][2:]

        def unfolded(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
            return _aten._slow_conv2d_forward.default(x, weight, kernel_sizes, bias, stride, padding)

        if set(dilation) == {1}:
            forms["im2col"] = _separate(site, unfolded, open_end=True)
    if site.relu and site.bias and site.dtype in _TENSOR_CORE_CHANNELS:

        def fused(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
            if addend is None:
                return _aten.cudnn_convolution_relu.default(x, weight, bias, stride, padding, dilation, groups)
            return _aten.cudnn_convolution_add_relu.default(
                x, weight, addend, 1.0, bias, stride, padding, dilation, groups
            )

        forms["cudnn fused"] = Form(fused)
    if site.depthwise and site.dtype != "bfloat16":
        kernel = site.sizes[1][2:]

        def native(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
            out = _aten._conv_depthwise2d.default(x, weight, kernel, bias, stride, padding, dilation)
            return out.contiguous(memory_format=torch.channels_last) if site.channels_last else out

        def library(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
            tuned, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
            return _aten.cudnn_convolution.default(x, weight, padding, stride, dilation, groups, tuned, False, tf32)

        forms["depthwise native"] = _separate(site, native, open_end=False)
        forms["depthwise cudnn"] = _separate(site, library, open_end=True)
    return forms


def _padded(site: Site, zeros: tuple[int, int]) -> Form:
    """cuDNN pads by itself, each convolution anew, with up to five more kernels; here the weight is padded for good."""
    plain, features = _bare(site), site.sizes[1][0]

    def padded(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        x = _aten.constant_pad_nd.default(x, [0, 0, 0, 0, 0, zeros[0]]) if zeros[0] else x
        return _aten.slice.Tensor(plain(x, weight, None, None), 1, 0, features)

    whole = _separate(site, padded, open_end=True, weight=padded_channels)
    return Form(whole.run, padded_channels, plain, zeros)


def _onednn(site: Site) -> Form:
    """Bias and sum are part of the call. The ReLU is not: oneDNN's makes 0 of NaN, where eager's leaves NaN."""
    stride, padding, dilation, groups = site.parameters
    mkldnn = torch.ops.mkldnn

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        if addend is None:
            out = mkldnn._convolution_pointwise(x, weight, bias, padding, stride, dilation, groups, "none", [], "")
        else:
            out = mkldnn._convolution_pointwise.binary(
                x, addend, weight, bias, padding, stride, dilation, groups, "add", 1.0, None, [], ""
            )
        return _aten.relu_.default(out) if site.relu else out

    return Form(run)


def _matrix_product(site: Site, device: str) -> Form:
    """The rows are the pixels; on CUDA bias and ReLU are part of the product."""

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        batch, channels, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
        columns = weight.reshape(weight.shape[0], channels).t()
        done = site.relu and bias is not None and addend is None and device == "cuda"
        if done:
            out = _aten._addmm_activation.default(bias, rows, columns)
        elif bias is not None:
            out = _aten.addmm.default(bias, rows, columns)
        else:
            out = _aten.mm.default(rows, columns)
        out = out.view(batch, height, width, -1).permute(0, 3, 1, 2)
        if addend is not None:
            out = _aten.add.Tensor(out, addend)
        return _aten.relu.default(out) if site.relu and not done else out

    return Form(run)


def _bare(site: Site) -> Routine:
    """The convolution of ``site`` alone."""
    stride, padding, dilation, groups = site.parameters
    return lambda x, weight, bias, addend: _aten.convolution.default(
        x, weight, bias, stride, padding, dilation, False, (0, 0), groups
    )


def _example(site: Site, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
    dtype = getattr(torch, site.dtype)
    layout = torch.channels_last if site.channels_last else torch.contiguous_format

    def made(sizes: tuple[int, ...]) -> torch.Tensor:
        chosen = layout if len(sizes) == 4 else torch.contiguous_format
        return torch.empty(sizes, dtype=dtype, device=device, memory_format=chosen).uniform_(-0.1, 0.1)

    return (
        made(site.sizes[0]),
        made(site.sizes[1]),
        made(site.sizes[1][:1]) if site.bias else None,
        made(site.out_sizes) if site.add else None,
    )


def times_of(
    sites: Iterable[Site], device: torch.device, timer: Timer, *, compiled: bool
) -> dict[Site, dict[str, float]]:
    """Time every form of every distinct site.

    Args:
        sites: of a graph.
        device: where they run.
        timer: times a call.
        compiled: whether a compiler takes what follows the convolution: then that counts as one pass over its result.

    Returns:
        ns of each form, by site; inf for one that does not run.
    """
    asked: list[tuple[Site, str, Callable[[], object]]] = []
    for site in dict.fromkeys(sites):
        x, given, bias, addend = _example(site, device)
        out = torch.empty(site.out_sizes, dtype=x.dtype, device=device)
        for name, form in forms_of(site, device.type).items():
            weight = form.weight(given) if form.weight else given
            if compiled and form.bare is not None:
                more = (0, 0, 0, 0, 0, form.zeros[0])
                source = torch.nn.functional.pad(x, more).contiguous(memory_format=_layout(x)) if form.zeros[0] else x
                asked.append((site, name, partial(form.bare, source, weight, None, None)))
                if site.bias or site.add or site.relu:
                    asked.append((site, name, partial(torch.relu, out)))
            else:
                asked.append((site, name, partial(form.run, x, weight, bias, addend)))
    times: dict[Site, dict[str, float]] = {}
    for (site, name, _), taken in zip(asked, timer([call for *_, call in asked]), strict=True):
        own = times.setdefault(site, {})
        own[name] = own.get(name, 0.0) + (math.inf if taken is None else taken)
    return times


def side_by_side(forms: Sequence[tuple[Site, str]], device: torch.device) -> tuple[Callable[[], object], ...]:
    """Calls of sites in these forms, to be timed; all read one input."""
    x = _example(forms[0][0], device)[0]
    calls = []
    for site, name in forms:
        _, weight, bias, addend = _example(site, device)
        form = forms_of(site, device.type)[name]
        calls.append(partial(form.run, x, form.weight(weight) if form.weight else weight, bias, addend))
    return tuple(calls)


def measured(
    sites: Iterable[Site], device: torch.device, decisions: Decisions, timer: Timer, *, compiled: bool = False
) -> dict[Site, dict[str, float]]:
    """``times_of``, with what was measured before in these decisions."""
    distinct = dict.fromkeys(sites)
    missing = [site for site in distinct if site not in decisions.times]
    for site, own in times_of(missing, device, timer, compiled=compiled).items():
        decisions.times[site] = own
    return {site: decisions.times[site] for site in distinct}


def _layout(x: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def best_forms(times: Mapping[Site, Mapping[str, float]]) -> dict[Site, str]:
    """The fastest form of each site, where it is clearly faster than eager's."""
    chosen = {}
    for site, own in times.items():
        if not own:
            continue
        name = min(own, key=lambda one: own[one])
        if name != "separate" and own[name] <= _CLEARLY * own.get("separate", float("inf")):
            chosen[site] = name
    return chosen


def contiguous_is_faster(module: fx.GraphModule, device: torch.device, decisions: Decisions, *, compiled: bool) -> bool:
    """Whether the convolutions of a graph, each in its fastest form, take less time contiguous than channels last.

    Only float32 is asked: half precision runs on tensor cores, which want channels last.
    """
    layouts = {layout: sites_of(module, channels_last=layout) for layout in (False, True)}
    if not layouts[True] or any(site.dtype != "float32" for site, _ in layouts[True]):
        return False
    first = layouts[True][-1][1].convolution  # the last that is found is the first in the graph
    wanted = False
    if decisions.timer is not None:
        totals = {}
        for layout, sites in layouts.items():
            times = measured((site for site, _ in sites), device, decisions, decisions.timer, compiled=compiled)
            totals[layout] = sum(min(times[site].values()) for site, _ in sites)
        wanted = totals[False] < _CLEARLY * totals[True]
    return decisions.take(first, "contiguous", wanted=wanted)


def choose_forms(
    module: fx.GraphModule, device: torch.device, decisions: Decisions, *, channels_last: bool, compiled: bool
) -> int:
    """Put the fastest form of each convolution in its place, with what follows it; how many are not eager's own.

    Args:
        module: changed in place.
        device: where it runs.
        decisions: where nothing is measured, library calls that do several eager calls at once are taken.
        channels_last: layout of all convolutions.
        compiled: as for ``times_of``.
    """
    sites = sites_of(module, channels_last=channels_last)
    best: dict[Site, str] = {}
    if decisions.given is None:
        distinct = list(dict.fromkeys(site for site, _ in sites))
        if decisions.timer is not None:
            best = best_forms(measured(distinct, device, decisions, decisions.timer, compiled=compiled))
        elif not compiled:
            fused = {"cuda": "cudnn fused", "cpu": "onednn fused"}.get(device.type, "")
            best = {site: fused for site in distinct if fused in forms_of(site, device.type)}
    count = 0
    for site, place in sites:
        for name, form in forms_of(site, device.type).items():
            if name != "separate" and decisions.take(place.convolution, name, wanted=best.get(site) == name):
                _replace(module.graph, place, form, site.sizes[1][0], compiled=compiled)
                count += 1
                break
    drop_unused(module)
    return count


def _replace(graph: fx.Graph, place: Place, form: Form, channels: int, *, compiled: bool) -> None:
    given = arguments_of(place.convolution)
    alone = compiled and form.bare is not None
    last = place.convolution if alone else place.last
    with graph.inserting_before(last):
        weight, bias = given["weight"], given["bias"]
        if place.norm is not None and not alone:
            weight, bias = folded_into(graph, weight, place.norm)
        if form.weight:
            weight = graph.call_function(form.weight, (weight,))
        if alone:  # the compiler takes all that follows
            source = given["input"]
            if form.zeros[0]:
                source = graph.call_function(_aten.constant_pad_nd.default, (source, [0, 0, 0, 0, 0, form.zeros[0]]))
            fused = add_call(graph, form.bare, (source, weight, None, None), (place.convolution,))
            if form.zeros[1]:
                fused = add_call(graph, _aten.slice.Tensor, (fused, 1, 0, channels), (place.convolution,))
            if bias is not None:
                shaped = graph.call_function(_aten.reshape.default, (bias, [1, -1, 1, 1]))
                fused = add_call(graph, _aten.add.Tensor, (fused, shaped), (place.convolution,))
        else:
            parts = (place.convolution, place.norm, place.total, place.last)
            sources = tuple(dict.fromkeys(one for one in parts if one is not None))
            fused = add_call(graph, form.run, (given["input"], weight, bias, place.addend), sources)
    last.replace_all_uses_with(fused)
