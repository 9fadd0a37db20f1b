"""A product with one row is a sum: the same numbers, types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.to_fx import lift
from tests.support.rewrite_models import claimed, recorded, unchanged_by


@settings(max_examples=40)
@given(
    channels=st.integers(1, 6),
    features=st.integers(1, 3),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    groups=st.booleans(),
    bias=st.booleans(),
    layout=st.booleans(),
)
def test_convolutions_of_one_pixel(
    channels: int, features: int, kernel: int, stride: int, padding: int, groups: bool, bias: bool, layout: bool
) -> None:
    padding = max(padding, kernel // 2)
    layer = nn.Conv2d(
        channels, channels * features, kernel, stride, padding, groups=channels if groups else 1, bias=bias
    ).double()
    one = recorded(lambda x: layer(x.sin()), torch.randn(1, channels, 1, 1).double())
    count = []

    def rewrite(module: fx.GraphModule) -> None:
        if layout:
            to_channels_last(module)
        count.append(row_products_as_sums(module))

    unchanged_by(rewrite, one)
    assert count == [int(kernel == 1 and padding == 0 and (not groups or channels == 1))]


W, B = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
X = torch.randn(1, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (lambda x: F.linear(x, W, B), 1),
        (lambda x: F.linear(x, W), 1),
        (lambda x: F.linear(x[None], W, B), 1),
        (lambda x: x @ W.t().contiguous(), 1),
        (lambda x: torch.addmm(B[:1], x, W.t()), 1),
        (lambda x: torch.addmm(B[None], x, W.t()), 1),
        (lambda x: torch.addmm(B, x, W.t(), alpha=2), 0),
        (lambda x: torch.addmm(B, x, W.t(), beta=0.5), 0),
        (lambda x: F.linear(x.expand(2, 4), W, B), 0),
        (lambda x: x @ x.t(), 1),
        (lambda x: (x.long() @ W.long().t(), x.int() @ W.int().t()), 0),
        (lambda x: F.linear(x[:, :0], W[:, :0], B), 1),
        (lambda x: F.linear(x, W, B).relu_().add_(1).view(-1), 1),
    ],
)
def test_products(forward: Callable[..., Any], count: int) -> None:
    one = recorded(forward, X)
    module = unchanged_by(row_products_as_sums, one)
    assert row_products_as_sums(lift(one.recording)) == count
    assert claimed(module) == claimed(lift(one.recording))
