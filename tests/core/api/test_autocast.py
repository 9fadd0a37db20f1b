"""Preparing and calling under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, InputError
from nimble_viz.collect.compare import compare

QUICK = Options(tune="off")
FAST = Options(budget_s=0.05)


def casting(to: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", to or torch.bfloat16, enabled=to is not None)


CASTS = [None, torch.bfloat16, torch.float16]


def asked_for_the_sum(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


PREPARING: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "inference": lambda net, x: Nimble(net, FAST).prepare(x).close(),
    "in place of the model": lambda net, x: Nimble(net, FAST).prepare(x, training=True).close(),
    "whole step": lambda net, x: (
        TrainStep(net, torch.Tensor.sum, torch.optim.SGD(net.parameters(), lr=0.1), options=FAST).prepare(x).close()
    ),
    "compare": lambda net, x: compare(net, x, options=FAST),
    "compare steps": lambda net, x: compare(net, x, options=FAST, training=True, loss_fn=torch.Tensor.sum),
    "an error": lambda net, x: Nimble(lambda one: asked_for_the_sum(net(one)), FAST).prepare(x),
}


@pytest.mark.parametrize("way", PREPARING)
def test_autocast_keeps_no_cast_of_a_weight_from_a_preparation(way: str) -> None:
    """What is read afterwards in the same region would be the weight as it was, written without a word to autocast."""
    net, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    with casting(torch.bfloat16):
        with pytest.raises(CaptureError) if way == "an error" else nullcontext():
            PREPARING[way](net, x)
        with torch.no_grad():
            net.weight.zero_()
        assert not net(x).any()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("then", "now"), [(a, b) for a in CASTS for b in CASTS if a is not b])
def test_another_autocast_is_another_signature(
    then: torch.dtype | None, now: torch.dtype | None, training: bool
) -> None:
    model, x = nn.Linear(8, 8).train(training), torch.randn(2, 8)
    net = Nimble(model, QUICK)
    with casting(then):
        net.prepare(x, training=training)
    with casting(now), torch.no_grad(), pytest.raises(InputError, match="under this autocast: autocast was") as caught:
        net(x)
    names = [str(one).removeprefix("torch.") if one else "off" for one in (then, now)]
    assert f"was {names[0]} then, and is {names[1]} now" in str(caught.value)
    assert "the same torch.autocast" in caught.value.fix
    with casting(now):
        net.prepare(x, training=training).prepare(x, training=training)
    assert len(net.engines) == 2
    for cast in (then, now, then):
        with casting(cast):
            made, wanted = net(x), model(x)
            with pytest.raises(InputError, match=r"args\[0\]: expected"):
                net(torch.randn(3, 8))
        assert made.dtype is wanted.dtype
        torch.testing.assert_close(made, wanted)
    net.close()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("answer", ["eager", "prepare"])
def test_other_autocasts(answer: Any, training: bool) -> None:
    model, x = nn.Linear(8, 8).train(training), torch.randn(2, 8)
    net = Nimble(model, Options(tune="off", on_new_shape=answer)).prepare(x, training=training)
    for _ in range(2):
        with casting(torch.bfloat16):
            made = net(x)
        assert made.dtype is torch.bfloat16
        assert made.requires_grad is (training or answer == "eager")
        assert net(x).dtype is torch.float32
    assert len(net.engines) == (2 if answer == "prepare" else 1)
    net.close()
