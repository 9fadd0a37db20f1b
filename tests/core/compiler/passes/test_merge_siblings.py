"""Siblings run as one where it pays, and each gets its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.channels_last import keep_strides, to_channels_last
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.program import KernelChoice
from tests.support.rewrite_models import HOST, claimed, fake_timer, lifted, recorded, unchanged_by

CONVOLUTION = torch.ops.aten.convolution.default


def merged(module: fx.GraphModule, decisions: Decisions | None = None, *, convolutions: bool = True) -> int:
    chosen = decisions or Decisions(fake_timer([1.0]))
    saved = merge_siblings(module, HOST, chosen, convolutions=convolutions)
    keep_strides(module)
    return saved


class Siblings(nn.Module):
    """Layers of any widths, with and without bias, on one input."""

    def __init__(self, widths: list[int], biases: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, n, bias=b) for n, b in zip(widths, biases, strict=True))
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        x = x.sin()
        return [layer(x) for layer in self.layers]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=5), st.booleans())
def test_products_of_any_width(kinds: list[tuple[int, bool]], batched: bool) -> None:
    one = recorded(Siblings(*map(list, zip(*kinds, strict=True))), torch.randn(*[2] * batched, 3, 4).double())

    def rewrite(module: fx.GraphModule) -> None:
        share_equal(module)  # each layer has a view of its own of the same rows
        merged(module)

    module = unchanged_by(rewrite, one, strides=True)
    with_bias = sum(bias for _, bias in kinds)
    groups = [size for size in (with_bias, len(kinds) - with_bias) if size]
    products = [node for node in module.graph.nodes if "mm" in str(node.target)]
    assert sorted(len(calls_of(node)) for node in products) == sorted(groups)


KINDS = st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 2), st.sampled_from([1, 3]), st.booleans())


@settings(max_examples=15)
@given(st.lists(KINDS, min_size=2, max_size=5), st.booleans(), st.booleans(), st.integers(1, 2))
def test_convolutions_of_any_kind(kinds: list[Any], layout: bool, norms: bool, batch: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Conv2d(3, 3 * n, k, s, k // 2, groups=g, bias=b) for n, k, s, g, b in kinds).double()
    scales = nn.ModuleList(nn.BatchNorm2d(3 * n) for n, *_ in kinds).double().eval()

    def forward(x: torch.Tensor) -> Any:
        made = [layer(x) for layer in layers]
        return [scale(y).relu() for scale, y in zip(scales, made, strict=True)] if norms else made

    def rewrite(module: fx.GraphModule) -> None:
        affine_norms(module)
        if layout:
            to_channels_last(module)
        alike: dict[Any, int] = {}
        for _, k, s, g, bias in kinds:
            key = k, s, g, bias and not norms  # a norm takes the bias over
            alike[key] = alike.get(key, 0) + (g == 1)
        before = sum(node.target is CONVOLUTION for node in module.graph.nodes)
        saved = merged(module)
        assert saved == sum(max(count - 1, 0) for count in alike.values())
        assert before - sum(node.target is CONVOLUTION for node in module.graph.nodes) == saved
        split_constants(module, {})

    one = recorded(forward, torch.randn(batch, 3, 5, 5).double())
    module = unchanged_by(rewrite, one, strides=True)
    assert claimed(module) == claimed(lift(one.recording))


A, B, C = (nn.Linear(4, 4).double() for _ in range(3))


def weights_used_before(x: torch.Tensor) -> Any:
    y = F.linear(x, B.weight).tanh()
    return A(y) + F.linear(y, B.weight, A.bias), B.weight


def bias_used_before(x: torch.Tensor) -> Any:
    y = (x + B.bias).tanh()
    return A(y), B(y)


def one_bias_for_all(x: torch.Tensor) -> Any:
    y = x.tanh()
    bias = A.bias[:1].detach()
    return torch.addmm(bias, y, B.weight.t()) + torch.addmm(A.bias, y, C.weight.t())


def scaled_sum(x: torch.Tensor) -> Any:
    y = x.tanh()
    return torch.addmm(A.bias, y, B.weight.t(), alpha=2), torch.addmm(A.bias, y, C.weight.t(), beta=3), A(y), B(y)


@pytest.mark.parametrize(
    ("forward", "saved"),
    [
        (lambda x: A(x) * B(x), 1), (weights_used_before, 1), (bias_used_before, 1), (one_bias_for_all, 0),
        (scaled_sum, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [False, True])
def test_what_siblings_share(forward: Callable[..., Any], saved: int, cut: bool) -> None:
    def rewrite(module: fx.GraphModule) -> None:
        assert merged(module) == saved
        if cut:
            split_constants(module, {})

    unchanged_by(rewrite, recorded(forward, torch.randn(3, 4).double()), strides=True)


@pytest.mark.parametrize(
    ("together", "in_turn", "side_by_side", "pays"),
    [
        (12.0, 20.0, None, True),
        (12.0, 20.0, 12.5, True),  # which share the device badly
        (12.0, 20.0, 11.5, False),  # or well
        (21.0, 20.0, 25.0, False),
        (21.0, 20.0, None, False),
        (None, 20.0, 20.0, False),  # does not run
        (1.0, None, None, False),
    ],
)
def test_it_has_to_pay(together: float | None, in_turn: float | None, side_by_side: float | None, pays: bool) -> None:
    def timer(calls: Any) -> list[float | None]:
        whole, after, beside = calls
        assert whole().shape[-1] == 5
        assert [one.shape[-1] for one in after()] == [one().shape[-1] for one in beside] == [2, 3]
        return [together, in_turn, side_by_side]

    _, module = lifted(Siblings([2, 3], [True, True]), torch.randn(3, 4).double())
    decisions = Decisions(timer)
    assert merged(module, decisions) == int(pays)
    assert decisions.made == [KernelChoice(1, "merged siblings")] * pays


def test_unmeasured_products_are_merged_and_convolutions_are_not() -> None:
    _, module = lifted(Siblings([2, 3], [True, True]), torch.randn(3, 4).double())
    assert merged(module, Decisions()) == 1
    layers = [nn.Conv2d(3, n, 1) for n in (2, 3)]
    _, module = lifted(lambda x: [layer(x) for layer in layers], torch.randn(1, 3, 4, 4))
    assert merged(module, Decisions()) == 0
    assert merged(module, convolutions=False) == 0, "a library would have to copy the slices"
    assert merged(module) == 1
