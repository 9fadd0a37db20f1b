"""Every form of a convolution computes what the convolution and what follows it do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.compiler.passes.conv_forms import Site, forms_of

RUNS_ANYWHERE = {"separate", "matrix product", "padded channels", "im2col"}
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


def tensors_for(site: Site, device: str = "cpu") -> list[Any]:
    """Input, weight, bias and addend."""
    torch.manual_seed(0)
    layout = torch.channels_last if site.channels_last else torch.contiguous_format
    dtype = getattr(torch, site.dtype)
    x, weight = (torch.randn(one).to(dtype).to(memory_format=layout) for one in site.sizes)
    bias = torch.randn(site.sizes[1][0]).to(dtype) if site.bias else None
    addend = torch.randn(site.out_sizes).to(dtype).to(memory_format=layout) if site.add else None
    return [None if one is None else one.to(device) for one in (x, weight, bias, addend)]


def by_hand(site: Site, x: Any, weight: Any, bias: Any, addend: Any) -> torch.Tensor:
    out = nn.functional.conv2d(x, weight, bias, *site.parameters)
    out = out if addend is None else out + addend
    return out.relu() if site.relu else out


def wrong_forms(site: Site, device: str, names: set[str] | None = None) -> dict[str, str]:
    """Forms that run on ``device``, each with how it differs from float64; empty if it does not.

    Args:
        site: whose forms.
        device: whose forms, run there or, if only some of them by ``names`` are, on the host.
        names: of the forms to run; None: all.
    """
    tensors = tensors_for(site, device if names is None else "cpu")
    x, given, bias, addend = tensors
    wanted = by_hand(site, *(None if one is None else one.double() for one in tensors))
    plain = nn.functional.conv2d(x.double(), given.double(), None, *site.parameters)
    near = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.1, "float64": 1e-9}[site.dtype]
    found = {}
    for name, form in forms_of(site, device).items():
        if names is not None and name not in names:
            continue
        weight = form.weight(given) if form.weight else given
        wide = nn.functional.pad(x, (0, 0, 0, 0, 0, form.zeros[0]))
        try:
            made = form.run(x, weight, bias, addend)
            bare = form.bare(wide, weight, None, None) if form.bare else None
        except RuntimeError:  # no routine for it: such a form is never chosen
            continue
        assert made.dtype == x.dtype
        found[name] = ""
        pairs = [(made, wanted)]
        if bare is not None:
            assert bare.shape[1] == site.sizes[1][0] + form.zeros[1]
            pairs.append((bare[:, : site.sizes[1][0]], plain))
        for one, other in pairs:
            try:
                torch.testing.assert_close(one.double(), other, rtol=near, atol=near)
            except AssertionError as error:
                found[name] = str(error)
    return found


@settings(max_examples=70)
@given(st.sampled_from(["float32", "float64", "float16", "bfloat16"]).flatmap(sites), st.sampled_from(["cpu", "cuda"]))
def test_every_form_computes_the_same(site: Site, device: str) -> None:
    assert site.out_sizes == tuple(by_hand(site, *tensors_for(site)).shape)
    names = set(forms_of(site, "cpu")) if device == "cpu" else RUNS_ANYWHERE
    found = wrong_forms(site, device, names)
    assert next(iter(found)) == "separate"
    assert found.keys() == names & forms_of(site, device).keys()
    assert not any(found.values()), found


def spoilt(one: torch.Tensor) -> torch.Tensor:
    """With one NaN in the middle."""
    one = one.clone()
    one[(0, 0, *(size // 2 for size in one.shape[2:]))] = math.nan
    return one


def differ_in_nans(site: Site, device: str) -> dict[str, int]:
    """Forms that run: at how many places a NaN in the input, or in the addend, is lost or comes out where none is."""
    tensors = tensors_for(site, device)
    found: dict[str, int] = {}
    for position in (0, 3):
        if tensors[position] is None:
            continue
        x, weight, bias, addend = (spoilt(one) if place == position else one for place, one in enumerate(tensors))
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


def exact_cudnn() -> Any:
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=False, benchmark=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EACH_FORM)
def test_every_form_computes_the_same_on_a_gpu(name: str) -> None:
    with exact_cudnn():
        found = wrong_forms(EACH_FORM[name], "cuda")
    assert {"separate", name} <= found.keys()
    assert not any(found.values()), found


@pytest.mark.gpu
@settings(max_examples=80)
@given(st.sampled_from(["float32", "float16", "bfloat16"]).flatmap(sites))
def test_every_form_of_any_site_computes_the_same_on_a_gpu(site: Site) -> None:
    with exact_cudnn():
        found = wrong_forms(site, "cuda")
    assert "separate" in found
    assert not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("site", WITH_RELU, ids=str)
def test_a_relu_leaves_nan_where_eager_does_on_a_gpu(site: Site, dtype: str) -> None:
    site = replace(site, dtype=dtype)
    with exact_cudnn():
        found = differ_in_nans(site, "cuda")
    # In bfloat16 eager's own routine for groups of one channel spreads NaN further.
    eager = found["separate"]
    assert eager == 0 or (dtype == "bfloat16" and site.sizes[1][1] == 1)
    assert all(count <= eager for count in found.values()), found
