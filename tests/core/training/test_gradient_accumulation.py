"""Gradients in ``.grad``: added up as in eager, each in memory of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from tests.support.drop_in import CLOSE, QUICK, Place, assert_same_gradients, loss_of, pair, prepared
from tests.support.training_problems import OPTIMIZERS, perceptron
from tests.support.training_steps import assert_same, assert_values, state_of


def test_an_alias_of_a_gradient_is_the_gradient(on: Place) -> None:
    model = on(perceptron())
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    for one in (net, eager):
        one(x).sum().backward()
        for parameter in one.parameters():
            parameter.grad = parameter.grad.detach()
        one(2 * x).sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=on.near, atol=on.near)
    net.close()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads none", "grads zero"])
def test_accumulating_by_hand(set_to_none: bool) -> None:
    found, net, eager = prepared("resnet")
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for at in range(6):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            (loss_of(found, model, inputs, targets) / 3).backward()
            if at % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        assert_same_gradients(found.model, eager)
    assert_same(state_of(found.model, mine), state_of(eager, theirs))
    net.close()


def test_a_users_gradient_stays_the_users_tensor(on: Place) -> None:
    net, eager = pair(on(perceptron()), on(torch.randn(6, 8)), options=on.options)
    mine = [torch.randn_like(one) for one in net.parameters()][1::2]
    for one, other, grad in zip([*net.parameters()][1::2], [*eager.parameters()][1::2], mine, strict=True):
        one.grad, other.grad = grad, grad.clone()
    for _ in range(3):
        x = on(torch.randn(6, 8))
        for model in (net, eager):
            model(x).sin().sum().backward()
    assert all(one.grad is grad for one, grad in zip([*net.parameters()][1::2], mine, strict=True))
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


def test_gradients_kept_elsewhere_are_not_overwritten(on: Place, request: pytest.FixtureRequest) -> None:
    if on.cuda:
        why = "on CUDA .grad is the engine's memory, overwritten even where it is kept elsewhere"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    net, _ = pair(on(perceptron()), on(torch.randn(6, 8)))
    net(on(torch.randn(6, 8))).sin().sum().backward()
    kept = [one.grad for one in net.parameters()]
    values = [one.clone() for one in kept if one is not None]
    for one in net.parameters():
        one.grad = None
    net(on(torch.randn(6, 8))).sin().sum().backward()
    assert_values(kept, values)
    net.close()


class SameGradient(nn.Module):
    """Two parameters with one gradient, one whose gradient is a single number seen five times, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
        self.d = nn.Parameter(torch.ones(5))
        self.e = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.a + self.b + self.c + self.d.sum() + (self.e.t() @ x.new_ones(3, 4))


def test_each_gradient_has_memory_of_its_own(on: Place) -> None:
    net, eager = pair(on(SameGradient()), on(torch.randn(4, 4)))
    x = on(torch.randn(4, 4))
    for model in (net, eager):
        model(x).sin().sum().backward()
        for at, one in enumerate(model.parameters()):
            assert one.grad is not None
            assert one.grad.stride() == one.stride()
            one.grad.mul_(at + 2)
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


def test_a_gradient_that_is_sparse_is_added_to_as_in_eager() -> None:
    model = perceptron()
    other, x = copy.deepcopy(model), torch.randn(6, 8)
    net = Nimble(model, QUICK).prepare(x, training=True)
    for one in (model, other):
        weight = next(one.parameters())
        weight.grad = torch.eye(*weight.shape).to_sparse()
    for _ in range(3):
        net(x).square().sum().backward()
        other(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=CLOSE, atol=CLOSE)
        assert mine.grad.layout is theirs.grad.layout
    net.close()


class _Borrowing(torch.autograd.Function):
    """Whose gradient is memory of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, ctx.scale, None


def test_a_gradient_never_is_memory_of_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Borrowing.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]

    model = Scaled()
    net = Nimble(model, QUICK).prepare(torch.randn(8), training=True)
    net(torch.randn(8)).backward()
    assert model.weight.grad is not None
    model.weight.grad.zero_()
    assert torch.equal(model.get_buffer("scale"), torch.ones(8))
    net.close()
