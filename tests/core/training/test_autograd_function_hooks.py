"""Hooks of parameters, outputs, inputs and modules, with a drop-in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.utils.errors import InputError
from tests.support.drop_in import QUICK, Place, assert_same_gradients, layer, pair
from tests.support.training_problems import OPTIMIZERS, perceptron
from tests.support.training_steps import assert_values


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_hooks_of_parameters_are_called_with_what_eager_gives_them(kind: str, on: Place) -> None:
    net, eager = pair(on(perceptron()), on(torch.randn(6, 8)))
    seen: dict[nn.Module, list[torch.Tensor]] = {net: [], eager: []}
    for model in (net, eager):
        weight = layer(model, 2).weight

        def doubled(grad: torch.Tensor, of: nn.Module = model) -> torch.Tensor:
            seen[of].append(grad.clone())
            return grad * 2

        def accumulated(one: torch.Tensor, of: nn.Module = model) -> None:
            assert one.grad is not None
            seen[of].append(one.grad.clone())

        if kind == "gradient":
            weight.register_hook(doubled)
        else:
            weight.register_post_accumulate_grad_hook(accumulated)
    x = on(torch.randn(6, 8))
    for model in (net, eager):
        for _ in range(2):
            model(x).sin().sum().backward()
    assert len(seen[net]) == len(seen[eager]) == 2
    assert_values(seen[net], seen[eager], rtol=on.near)
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


def test_the_optimizer_in_the_backward() -> None:
    """Updates from hooks that run once a gradient is there, which is then freed."""
    net, eager = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8))
    for model in (net, eager):
        for one in model.parameters():
            optimizer = OPTIMIZERS["momentum"]([one])

            def update(parameter: torch.Tensor, by: torch.optim.Optimizer = optimizer) -> None:
                by.step()
                by.zero_grad()

            one.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        x = torch.randn(6, 8)
        for model in (net, eager):
            model(x).sin().sum().backward()
    assert_values(list(net.parameters()), list(eager.parameters()), rtol=1e-6)
    net.close()


def test_hooks_of_outputs_and_inputs() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8, requires_grad=True))
    data = torch.randn(6, 8)
    results = []
    for model in (net, eager):
        x = data.clone().requires_grad_()
        x.register_hook(lambda grad: grad * 3)
        out = model(x * 1)
        out.register_hook(lambda grad: grad * 2)
        out.retain_grad()
        out.sin().sum().backward()
        results.append((x.grad, out.grad))
    assert_values(results[0], results[1], rtol=1e-6)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


@pytest.mark.filterwarnings("ignore:the .*hook scaled of 2:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_submodules_act_or_are_refused(kind: str) -> None:
    """A hook that is there when the module is prepared changes results as in eager."""

    def scaled(*given: Any) -> Any:
        if kind == "forward":
            return given[2] * 2
        if kind == "forward_pre":
            return (given[1][0] * 2,)
        return tuple(None if one is None else one * 2 for one in given[1])

    model = perceptron()
    eager = copy.deepcopy(model)
    for one in (model, eager):
        getattr(one[2], f"register_{kind}_hook")(scaled)
    net = Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True)
    x = torch.randn(6, 8)
    for one in (net, eager):
        one(x).sin().sum().backward()
    assert_same_gradients(model, eager, rtol=1e-6)
    net.close()


def test_modules_that_share_gradients_are_refused() -> None:
    with pytest.raises(InputError, match="shares gradients in hooks"):
        Nimble(nn.DataParallel(nn.Linear(8, 4)), QUICK).prepare(torch.randn(6, 8), training=True)
