"""Values that constants were folded from: writes to them are noticed, as far as they show."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from nimble_core.guards.folded_values import FoldedValues, announce


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()


def sources(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(), ("1.running_mean", net[1].running_mean), ("1.running_var", net[1].running_var)]


def watched() -> tuple[nn.Sequential, FoldedValues]:
    net = model()
    values = FoldedValues(sources(net), net.modules())
    values.folding()
    return net, values


def step(net: nn.Module, made: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
    parameters = list(net.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    made(parameters).step()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def train_once(net: nn.Sequential) -> None:
    net[1].train()(torch.randn(3, 4) + 2)
    net[1].eval()


def write_under_inference_mode(net: nn.Sequential) -> None:
    with torch.inference_mode():
        net[0].weight.mul_(2)


@torch.no_grad()
def write_a_view(net: nn.Sequential) -> None:
    net[0].weight.t()[0].zero_()


@torch.no_grad()
def average(net: nn.Sequential) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net)
    for name, value in averaged.module.state_dict().items():
        net.state_dict()[name].copy_(value)


CHANGES = [
    lambda net: net.load_state_dict(net.state_dict()),
    lambda net: nn.init.normal_(net[0].weight),
    lambda net: net[1].running_mean.add_(1),
    lambda net: net[1].reset_running_stats(),
    train_once,
    write_under_inference_mode,
    write_a_view,
    average,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_values_are_noticed(change: Callable[[nn.Sequential], object]) -> None:
    net, values = watched()
    assert not values.stale()
    change(net)
    assert values.stale()
    values.folding()
    assert not values.stale()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_of_optimizers_are_noticed(kind: Any) -> None:
    """Fused ones raise no version counter."""
    net, values = watched()
    step(net, lambda parameters: kind(parameters, lr=0.1, fused=True))
    assert values.stale()


def test_other_models_optimizers_do_not_matter() -> None:
    _, values = watched()
    step(model(), lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert not values.stale()


def test_an_optimizer_that_holds_the_memory_as_another_tensor() -> None:
    flat = torch.zeros(20, requires_grad=True)
    net = model()
    net[0].weight.data = flat.detach()[4:].view(4, 4)
    values = FoldedValues([("0.weight", net[0].weight)], net.modules())
    values.folding()
    flat.grad = torch.ones(20)
    torch.optim.SGD([flat], lr=0.1, fused=True).step()
    assert net[0].weight[0, 0] != 0
    assert values.stale()


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda tensor: tensor.data])
def test_aliases_of_the_models_tensors_as_sources(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = model()
    values = FoldedValues([(name, alias(tensor)) for name, tensor in sources(net)], net.modules())
    for change in (*CHANGES, lambda net: step(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True))):
        values.folding()
        assert not values.stale()
        change(net)
        assert values.stale()


def test_tensors_without_a_version_counter_are_named() -> None:
    with torch.inference_mode():
        net = model()
    values = FoldedValues(sources(net), net.modules())
    assert set(values.blind) == {name for name, _ in sources(net)}
    values.folding()
    assert not values.stale()
    values.doubt()
    assert values.stale()


def test_one_hook_for_all_and_nothing_kept_alive() -> None:
    followers = [watched()[1] for _ in range(3)]
    ours = [
        hook for hook in optimizers._global_optimizer_post_hooks.values() if hook.__module__ == FoldedValues.__module__
    ]
    assert len(ours) == 1
    dead = weakref.ref(followers.pop())
    gc.collect()
    assert dead() is None
    assert not any(one.stale() for one in followers)


def test_sources_that_are_not_the_models() -> None:
    outside = torch.ones(3)
    values = FoldedValues([("outside", outside.detach())], ())
    values.folding()
    assert not values.stale()
    outside.add_(1)
    assert values.stale()


def test_replays_tell_of_what_they_write() -> None:
    (net, values), (_, other) = watched(), watched()
    announce({net[0].weight.data_ptr()}, by=values)
    assert not values.stale()
    announce({net[0].weight.data_ptr()})
    assert values.stale()
    assert not other.stale()
