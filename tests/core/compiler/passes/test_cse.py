"""Equal computations run once, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.to_fx import lift
from tests.support.rewrite_models import lifted, recorded, targets, unchanged_by


def saved(forward: Callable[..., Any], *inputs: torch.Tensor) -> int:
    one = recorded(forward, *inputs)
    unchanged_by(share_equal, one, 0.0)
    return share_equal(lift(one.recording))


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("forward", "times"),
    [
        (lambda x: x.relu() + x.relu(), 1),
        (lambda x: (x + 1).sin() + (x + 1).sin() + (x + 1).cos(), 3),
        (lambda x: x.view(-1)[2:] * x.view(-1)[2:], 2),
        (lambda x: x.split(2, 1)[0] @ x.split(2, 1)[1].t(), 1),
        (lambda x: torch.arange(4) + torch.arange(4) + x, 1),
    ],
)
def test_equal_is_computed_once(forward: Callable[..., Any], times: int) -> None:
    assert saved(forward, X) == times


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (torch.full((4,), 1), torch.full((4,), 1.0), torch.full((4,), True)),
        lambda x: (x.long() + 1, x.long() + 1.0, x.long() + True)[1:],
        lambda x: (torch.full((4,), 0.0), torch.full((4,), -0.0)),
        lambda x: (x * 0.0 + 1, x * -0.0 + 2),
        lambda x: torch.rand(4) + torch.rand(4),
        lambda x: torch.nn.functional.dropout(x) + torch.nn.functional.dropout(x),
        lambda x: x.new_empty(4).fill_(1.0) + x.new_empty(4).fill_(2.0),
        lambda x: (x.sum(0), x.sum(1), x.sum(0, keepdim=True)),
        lambda x: (x.to(torch.float64), x.to(torch.float16)),
    ],
)
def test_different_stays_different(forward: Callable[..., Any]) -> None:
    one, module = lifted(forward, X)
    before = [name for name in targets(module) if "long" not in name and "_to_copy" not in name]
    unchanged_by(share_equal, one, 0.0)
    share_equal(module)
    after = [name for name in targets(module) if "long" not in name and "_to_copy" not in name]
    assert after == before


def returned_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shared = x.cos() + x.cos()
    used = x.tan() * 2
    return x.sin(), x.sin(), x.sin().t(), x.exp().flatten(), x.exp()[1:], shared, used, x.tan(), x.tan()


def test_results_that_are_returned_keep_memory_of_their_own() -> None:
    one = recorded(returned_twice, X)
    module = unchanged_by(share_equal, one, 0.0, strides=True)
    outputs = module(X)
    homes = [out.untyped_storage().data_ptr() for out in outputs]
    assert len(set(homes)) == len(homes)
    assert share_equal(lift(one.recording)) == 2  # the cosines, and two of three tangents
