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

from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.to_fx import lift
from nimble_core.ir.program import KernelChoice
from tests.support.rewrite_models import claimed, fake_timer, recorded, targets, unchanged_by

CPU = torch.device("cpu")


def as_sums(module: fx.GraphModule) -> int:
    return row_products_as_sums(module, CPU, Decisions())


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
        count.append(as_sums(module))

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
    module = unchanged_by(as_sums, one)
    assert as_sums(lift(one.recording)) == count
    assert claimed(module) == claimed(lift(one.recording))


def test_large_weights_are_left_to_libraries_where_no_gpu_measures() -> None:
    weight = torch.randn(1024, 1024)
    module = lift(recorded(lambda x: F.linear(x, weight), torch.randn(1, 1024)).recording)
    decisions = Decisions(fake_timer((2.0, 1.0)))
    assert row_products_as_sums(module, CPU, decisions) == 0
    assert not decisions.made


def test_what_was_chosen_for_a_large_weight_is_repeated() -> None:
    weight = torch.randn(1024, 1024, dtype=torch.float64)
    one = recorded(lambda x: F.linear(x.sin(), weight), torch.randn(1, 1024, dtype=torch.float64))
    chosen = KernelChoice(1, "sum over one row")
    decisions = Decisions(given=frozenset({chosen}))
    module = unchanged_by(lambda module: row_products_as_sums(module, CPU, decisions), one)
    assert "aten.mm.default" not in targets(module)
    assert decisions.made == [chosen]


@pytest.mark.gpu
@pytest.mark.compiler
def test_large_weights_are_timed_on_a_gpu() -> None:
    device = torch.device("cuda")
    weights = [torch.randn(size, 2048, device=device, dtype=torch.bfloat16) / 45 for size in (1024, 65536)]
    one = recorded(
        lambda x: [F.linear(x, weight) for weight in weights], torch.randn(1, 2048, device=device).bfloat16()
    )
    decisions = Decisions(device_for(device).call_times_ns)
    module = lift(one.recording)
    count = row_products_as_sums(module, device, decisions)
    assert count == len(decisions.made) == sum(b < a for a, b in decisions.times.values())
    assert all(0 < ns < 1e6 for times in decisions.times.values() for ns in times)
    again = lift(one.recording)
    assert row_products_as_sums(again, device, Decisions(given=frozenset(decisions.made))) == count
