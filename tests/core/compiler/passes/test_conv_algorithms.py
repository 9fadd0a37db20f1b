"""Every form of a convolution computes what the convolution and what follows it do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.conv_algorithms import (
    Site,
    best_forms,
    choose_forms,
    contiguous_is_faster,
    forms_of,
    padded_channels,
    sites_of,
    times_of,
)
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.program import KernelChoice
from tests.support.rewrite_models import (
    Drawn,
    claimed,
    drawn_models,
    fake_timer,
    lifted,
    recorded,
    targets,
    unchanged_by,
)

HOST = torch.device("cpu")
CONVOLUTION = torch.ops.aten.convolution.default
RUNS_ANYWHERE = {"matrix product", "padded channels", "im2col"}
"""Of the forms for CUDA, those made of operators that the host has too."""


@st.composite
def sites(draw: st.DrawFn, dtype: str = "float32") -> Site:
    """Any small convolution and what follows it."""
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = (draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3])))
    numbers = [(draw(st.integers(1, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 2))) for _ in range(2)]
    stride, padding, dilation = map(tuple, zip(*numbers, strict=True))
    image = (draw(st.sampled_from([1, 4, 6])), draw(st.sampled_from([1, 4, 6])))
    batch, out = draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    relu = draw(st.booleans())
    site = Site(
        ((batch, groups * per_group, *image), (out, per_group, *kernel)),
        (stride, padding, dilation, groups),
        dtype,
        draw(st.booleans()),
        draw(st.booleans()),
        relu and draw(st.booleans()),
        relu,
    )
    assume(min(site.out_sizes) > 0)
    return site


def tensors_for(site: Site) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    layout = torch.channels_last if site.channels_last else torch.contiguous_format
    dtype = getattr(torch, site.dtype)
    x, weight = (torch.randn(one).to(dtype).to(memory_format=layout) for one in site.sizes)
    bias = torch.randn(site.sizes[1][0]).to(dtype) if site.bias else None
    addend = torch.randn(site.out_sizes).to(dtype).to(memory_format=layout) if site.add else None
    return x, weight, bias, addend


def by_hand(site: Site, x: Any, weight: Any, bias: Any, addend: Any) -> torch.Tensor:
    out = nn.functional.conv2d(x, weight, bias, *site.parameters)
    out = out if addend is None else out + addend
    return out.relu() if site.relu else out


@settings(max_examples=70)
@given(sites(), st.sampled_from(["cpu", "cuda"]))
def test_every_form_computes_the_same(site: Site, device: str) -> None:
    x, weight, bias, addend = tensors_for(site)
    before = [one.clone() for one in (x, weight, bias, addend) if one is not None]
    wanted = by_hand(site, x, weight, bias, addend)
    assert site.out_sizes == tuple(wanted.shape)
    forms = forms_of(site, device)
    assert next(iter(forms)) == "separate"
    for name, form in forms.items():
        if device == "cuda" and name not in RUNS_ANYWHERE | {"separate"}:
            continue
        made = form.run(x, form.weight(weight) if form.weight else weight, bias, addend)
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype), name
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4, msg=name)
        if form.bare:
            wide = nn.functional.pad(x, (0, 0, 0, 0, 0, form.zeros[0]))
            bare = form.bare(wide, form.weight(weight) if form.weight else weight, None, None)
            assert bare.shape[1] == site.sizes[1][0] + form.zeros[1]
            bare = bare[:, : site.sizes[1][0]]
            plain = nn.functional.conv2d(x, weight, None, *site.parameters)
            torch.testing.assert_close(bare, plain, rtol=1e-4, atol=1e-4, msg=f"bare {name}")
    after = [one for one in (x, weight, bias, addend) if one is not None]
    assert all(map(torch.equal, after, before))


def spoilt(one: torch.Tensor) -> torch.Tensor:
    """With one NaN in the middle."""
    one = one.clone()
    one[(0, 0, *(size // 2 for size in one.shape[2:]))] = math.nan
    return one


def differ_in_nans(site: Site, device: str) -> dict[str, int]:
    """Forms that run: at how many places a NaN in the input, or in the addend, is lost or comes out where none is."""
    given = [None if one is None else one.to(device) for one in tensors_for(site)]
    found: dict[str, int] = {}
    for position in (0, 3):
        if given[position] is None:
            continue
        x, weight, bias, addend = (spoilt(one) if place == position else one for place, one in enumerate(given))
        wanted = by_hand(site, *(None if one is None else one.cpu() for one in (x, weight, bias, addend))).isnan()
        assert wanted.any()
        # Routines for larger kernels, eager's among them, may spread it over tiles of the image, as Winograd's does.
        allowed = wanted if site.pointwise or position else wanted.any(3, True).any(2, True).expand(wanted.shape)
        assert not allowed.all()
        for name, form in forms_of(site, device).items():
            try:
                made = form.run(x, form.weight(weight) if form.weight else weight, bias, addend)
            except RuntimeError:  # no routine for it: such a form is never chosen
                continue
            nan = made.cpu().isnan()
            found[name] = found.get(name, 0) + int((wanted & ~nan | nan & ~allowed).sum())
    return found


WITH_RELU = [
    Site(
        ((2, 8, 9, 9), (16, 8 // groups, *kernel)), ((1, 1), padding, (1, 1), groups), "float32", last, bias, add, True
    )
    for kernel, padding, groups in [((1, 1), (0, 0), 1), ((3, 3), (1, 1), 1), ((3, 3), (1, 1), 8)]
    for last in (False, True)
    for bias in (False, True)
    for add in (False, True)
]


@pytest.mark.parametrize("site", WITH_RELU, ids=str)
def test_a_relu_leaves_nan_where_eager_does(site: Site) -> None:
    found = differ_in_nans(site, "cpu")
    assert {"separate", "onednn fused"} <= found.keys()
    assert not any(found.values()), found


PLAIN, HALVED = ((1, 1), (1, 1), (1, 1)), ((2, 2), (1, 1), (1, 1))
SMALL = (2, 16, 9, 9)
EACH_FORM = {
    "cudnn timed": Site((SMALL, (24, 16, 3, 3)), (*PLAIN, 1), "float16", True, True, True, True),
    "padded channels": Site(((2, 3, 9, 9), (10, 3, 3, 3)), (*HALVED, 1), "float16", True, True, False, True),
    "im2col": Site((SMALL, (8, 16, 3, 3)), (*PLAIN, 1), "float32", False, True, True, True),
    "cudnn fused": Site((SMALL, (24, 16, 3, 3)), (*HALVED, 1), "float16", True, True, True, True),
    "depthwise native": Site((SMALL, (16, 1, 3, 3)), (*HALVED, 16), "float16", True, True, False, True),
    "depthwise cudnn": Site((SMALL, (16, 1, 3, 3)), (*PLAIN, 16), "float32", False, True, False, True),
}


def differ_on_a_gpu(site: Site) -> dict[str, str]:
    """Forms that run on a GPU, each with how it differs from float64 there; empty where it does not."""
    tensors = [None if one is None else one.to("cuda") for one in tensors_for(site)]
    wanted = by_hand(site, *(None if one is None else one.double() for one in tensors)).float()
    near = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.1}[site.dtype]
    found = {}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=False, benchmark=False):
        for name, form in forms_of(site, "cuda").items():
            x, weight, bias, addend = tensors
            weight = form.weight(weight) if form.weight else weight
            try:
                made = form.run(x, weight, bias, addend)
                bare = None if form.bare is None else form.bare(
                    nn.functional.pad(x, (0, 0, 0, 0, 0, form.zeros[0])), weight, None, None
                )  # fmt: skip
            except RuntimeError:  # no routine for it: such a form is never chosen
                continue
            pairs = [(made, wanted)]
            if bare is not None:
                plain = nn.functional.conv2d(tensors[0].double(), tensors[1].double(), None, *site.parameters)
                pairs.append((bare[:, : site.sizes[1][0]], plain))
            found[name] = ""
            for one, other in pairs:
                try:
                    torch.testing.assert_close(one.float(), other.float(), rtol=near, atol=near)
                except AssertionError as error:
                    found[name] = str(error)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", EACH_FORM)
def test_every_form_computes_the_same_on_a_gpu(name: str) -> None:
    found = differ_on_a_gpu(EACH_FORM[name])
    assert {"separate", name} <= found.keys()
    assert not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("site", WITH_RELU, ids=str)
def test_a_relu_leaves_nan_where_eager_does_on_a_gpu(site: Site, dtype: str) -> None:
    site = replace(site, dtype=dtype)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=False, benchmark=False):
        found = differ_in_nans(site, "cuda")
    # In bfloat16 eager's own routine for groups of one channel spreads NaN further.
    eager = found["separate"]
    assert eager == 0 or (dtype == "bfloat16" and site.sizes[1][1] == 1)
    assert all(count <= eager for count in found.values()), found


@pytest.mark.gpu
@settings(max_examples=80)
@given(st.sampled_from(["float32", "float16", "bfloat16"]).flatmap(sites))
def test_every_form_of_any_site_computes_the_same_on_a_gpu(site: Site) -> None:
    found = differ_on_a_gpu(site)
    assert "separate" in found
    assert not any(found.values()), found


@settings(max_examples=60)
@given(sites())
def test_forms_exist_where_they_apply(site: Site) -> None:
    cpu, cuda = forms_of(site, "cpu"), forms_of(site, "cuda")
    assert ("onednn fused" in cpu) == (site.relu or site.add)
    one_pixel = site.sizes[0][2:] == (1, 1)
    assert ("matrix product" in cpu) == (site.pointwise and (site.channels_last or one_pixel))
    assert ("cudnn fused" in cuda) == (site.relu and site.bias)
    assert ("depthwise native" in cuda) == site.depthwise
    assert not cuda.keys() & {"onednn fused"}
    assert "cudnn timed" not in cuda


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types(dtype: str) -> None:
    site = Site(((1, 3, 4, 4), (4, 3, 3, 3)), ((1, 1), (1, 1), (1, 1), 1), dtype, True, True, True, True)
    tensors = tensors_for(site)
    forms = forms_of(site, "cpu") | {k: v for k, v in forms_of(site, "cuda").items() if k in RUNS_ANYWHERE}
    assert "onednn fused" not in forms
    assert ("padded channels" in forms) == (dtype != "float64")
    for form in forms.values():
        weight = form.weight(tensors[1]) if form.weight else tensors[1]
        made = form.run(tensors[0], weight, *tensors[2:])
        assert made.dtype == tensors[0].dtype
        torch.testing.assert_close(made, by_hand(site, *tensors), rtol=0.05, atol=0.1)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_padding_adds_zeros_only(features: int, channels: int, dtype: torch.dtype) -> None:
    weight = torch.randn(features, channels, 3, 3).to(dtype)
    made, multiple = padded_channels(weight), 4 if dtype == torch.float32 else 8
    assert all(
        wide % multiple == 0 and 0 <= wide - size < multiple
        for wide, size in zip(made.shape, weight.shape[:2], strict=False)
    )
    assert torch.equal(made[:features, :channels], weight)
    assert not made[features:].any()
    assert not made[:, channels:].any()


# -- sites in a graph ------------------------------------------------------------------------------------------------

NAMES = ("conv", "conv_norm", "conv_norm_relu", "conv_add_relu", "conv_add_relu", "relu", "relu_", "add", "add_",
         "slice_", "input_", "again", "flat_view", "view_", "copy_")  # fmt: skip


@settings(max_examples=30)
@given(
    drawn_models(NAMES, torch.float32),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.floats(1, 2), min_size=1, max_size=4),
)
def test_any_model_computes_the_same(
    made: tuple[Drawn, tuple[torch.Tensor, ...]], layout: bool, compiled: bool, norms: bool, times: list[float]
) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    decisions = Decisions(fake_timer(times))

    def rewrite(module: fx.GraphModule, decisions: Decisions = decisions) -> None:
        if norms:
            affine_norms(module)
        last = layout and to_channels_last(module) > 0
        choose_forms(module, HOST, decisions, channels_last=last, compiled=compiled)

    module = unchanged_by(rewrite, one, 2e-4)
    assert claimed(module) == claimed(lift(one.recording))
    again, follow = lift(one.recording), Decisions(None, frozenset(decisions.made))
    rewrite(again, follow)
    assert targets(again) == targets(module)
    assert follow.made == decisions.made


A, B = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
X = torch.randn(2, 3, 5, 5)


def fused(forward: Callable[..., Any], *inputs: torch.Tensor) -> list[tuple[int, ...]]:
    """Eager calls of each fused call, where every convolution that can be fused is."""
    one = recorded(forward, *(inputs or (X,)))
    before = claimed(lift(one.recording))
    found: list[tuple[int, ...]] = []

    def rewrite(module: fx.GraphModule) -> None:
        choose_forms(module, HOST, Decisions(), channels_last=False, compiled=False)
        found.extend(calls_of(node) for node in module.graph.nodes if getattr(node.target, "__name__", "") == "run")
        split_constants(module, {})

    assert claimed(unchanged_by(rewrite, one, 1e-4)) == before
    return found


def addend_written(x: torch.Tensor) -> Any:
    y = x * 2
    part = y[0]
    total = A(x) + y
    part.mul_(3)
    return total.relu(), y


def input_written(x: torch.Tensor) -> Any:
    y = A(x)
    x.mul_(3)
    return y.relu()


@pytest.mark.parametrize(
    ("forward", "calls"),
    [
        (lambda x: A(x).relu(), [(0, 1)]),
        (lambda x: (A(x) + x).relu_(), [(0, 1, 2)]),
        (lambda x: (x + A(x)).relu(), [(0, 1, 2)]),
        (lambda x: torch.add(x, A(x), alpha=2).relu(), []),
        (lambda x: (A(x) + B(x)).relu(), [(1, 2, 3)]),
        (lambda x: (A(x) + 1).relu(), []),
        (lambda x: (A(x) + x[:, :1]).relu(), []),
        (lambda x: (A(x) + x.double()).relu(), []),
        (lambda x: [(y := A(x)).relu(), y], []),
        (lambda x: (y := A(x)) + y.relu(), []),
        (lambda x: ((y := A(x)) + y).relu(), []),
        (lambda x: A(x) + x, []),
        (lambda x: (A(x).relu() + B(x).relu()).relu(), [(0, 1), (2, 3)]),
        (lambda x: A(A(x).relu()).relu(), [(0, 1), (2, 3)]),
        (lambda x: A(x.transpose(2, 3)).relu(), [(0, 1)]),
        (lambda x: A(x).relu().relu(), [(0, 1)]),
        (lambda x: nn.functional.conv2d(x, A.weight * x.mean(), A.bias).relu(), [(2, 3)]),
        (lambda x: nn.functional.conv2d(x, A.weight, x.mean((0, 2, 3))).relu(), [(1, 2)]),
        (addend_written, []),
        (input_written, []),
    ],
)
def test_what_is_fused(forward: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    assert fused(forward) == calls


def test_one_dimension_and_transposed_are_no_sites() -> None:
    for layer, shape in ((nn.Conv1d(3, 4, 3), (2, 3, 8)), (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5))):
        _, module = lifted(lambda x, layer=layer: layer(x).relu(), torch.randn(*shape))
        assert sites_of(module, channels_last=False) == []


def test_the_fastest_form_wins_if_it_is_clearly_faster() -> None:
    site = Site(((1, 3, 4, 4), (4, 3, 3, 3)), ((1, 1), (1, 1), (1, 1), 1), "float32", False, True, False, True)
    assert best_forms({site: {"separate": 100.0, "a": 96.0, "b": 95.0}}) == {site: "b"}
    assert best_forms({site: {"separate": 100.0, "a": 98.0}}) == {}
    assert best_forms({site: {"separate": math.inf, "a": 98.0}}) == {site: "a"}
    assert best_forms({site: {"separate": 100.0, "a": math.inf}}) == best_forms({site: {}}) == {}


@pytest.mark.parametrize("compiled", [False, True])
def test_each_distinct_site_is_timed_once(compiled: bool) -> None:
    site = Site(((1, 3, 4, 4), (4, 3, 3, 3)), ((1, 1), (1, 1), (1, 1), 1), "float32", False, True, False, True)
    times = times_of([site, site], HOST, fake_timer([3.0]), compiled=compiled)
    assert times == {site: {"separate": 6.0 if compiled else 3.0, "onednn fused": 3.0}}
    assert times_of([site], HOST, lambda calls: [None] * len(calls), compiled=compiled) == {
        site: {"separate": math.inf, "onednn fused": math.inf}
    }


def test_a_choice_is_made_for_one_convolution() -> None:
    one = recorded(lambda x: B(A(x).relu()).relu(), X)
    module = lift(one.recording)
    given_choices = Decisions(None, frozenset([KernelChoice(2, "onednn fused"), KernelChoice(0, "no such form")]))
    assert choose_forms(module, HOST, given_choices, channels_last=False, compiled=False) == 1
    assert [calls_of(node) for node in module.graph.nodes if node.target is CONVOLUTION] == [(0,)]


@pytest.mark.parametrize("contiguous_wins", [True, False])
def test_the_layout_of_float32_is_the_one_that_takes_less_time(contiguous_wins: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    asked: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        asked.append(len(calls))
        fast = (len(asked) == 1) == contiguous_wins  # contiguous is asked first
        return [10.0 if fast else 20.0] * len(calls)

    decisions = Decisions(timer)
    _, module = lifted(model, torch.randn(1, 3, 8, 8))
    assert contiguous_is_faster(module, HOST, decisions, compiled=False) == contiguous_wins
    assert [choice.kernel for choice in decisions.made] == ["contiguous"] * contiguous_wins
    again = Decisions(None, frozenset(decisions.made))
    assert contiguous_is_faster(module, HOST, again, compiled=False) == contiguous_wins


def test_half_precision_is_channels_last_without_asking() -> None:
    def never(calls: Any) -> list[float | None]:
        raise AssertionError("timed")

    _, module = lifted(nn.Conv2d(4, 4, 3).half().eval(), torch.randn(1, 4, 8, 8).half())
    assert not contiguous_is_faster(module, HOST, Decisions(never), compiled=False)
