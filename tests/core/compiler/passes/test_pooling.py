"""Pools in the faster layout: the same numbers, and the same choice each time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.pooling import choose_pools
from nimble_core.compiler.to_fx import lift
from tests.support.rewrite_models import HOST, fake_timer, lifted, recorded, unchanged_by

TURNED, AS_IS = fake_timer([2.0, 1.0]), fake_timer([1.0, 2.0])


def turned(module: fx.GraphModule) -> int:
    return choose_pools(module, HOST, Decisions(TURNED))


@settings(max_examples=40)
@given(
    average=st.booleans(),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    ceil=st.booleans(),
    last=st.booleans(),
    extra=st.booleans(),
)
def test_any_pool(average: bool, kernel: int, stride: int, padding: int, ceil: bool, last: bool, extra: bool) -> None:
    padding = min(padding, kernel // 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if average:
            return F.avg_pool2d(x, kernel, stride, padding, ceil, extra)
        return F.max_pool2d(x, kernel, stride, padding, 1 + extra, ceil)

    layout = torch.channels_last if last else torch.contiguous_format
    one = recorded(forward, torch.randn(2, 3, 7, 8).to(memory_format=layout))
    assert turned(unchanged_by(turned, one, 1e-6)) == 0
    assert turned(lift(one.recording)) == 1


def test_used_places_forbid_it() -> None:
    _, module = lifted(lambda x: F.max_pool2d(x, 2, return_indices=True), torch.randn(2, 3, 6, 6))
    assert turned(module) == 0


def test_equal_pools_are_timed_once_and_chosen_again_alike() -> None:
    asked = []

    def timer(calls: Any) -> list[float]:
        asked.append(len(calls))
        return [2.0, 1.0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 3, 1, 1) + F.max_pool2d(x.sin(), 3, 1, 1) + F.max_pool2d(x, 3, 1, 1, ceil_mode=True)

    one = recorded(forward, torch.randn(2, 3, 6, 6))
    first, decisions = lift(one.recording), Decisions(timer)
    assert choose_pools(first, HOST, decisions) == 3
    assert asked == [2, 2]
    assert [choice.kernel for choice in decisions.made] == ["contiguous pool"] * 3
    again, follow = lift(one.recording), Decisions(None, frozenset(decisions.made[1:]))
    assert choose_pools(again, HOST, follow) == 2
    assert follow.made == decisions.made[1:]
