"""What is made of a forward and a backward that were recorded together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, NotStaticError
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.training import prepare_training
from nimble_core.utils.errors import InputError, NimbleError
from tests.support.drop_in import QUICK, assert_same_gradients, loss_of, pair, prepared
from tests.support.training_problems import OPTIMIZERS, made, perceptron
from tests.support.training_steps import assert_untouched, assert_values, everything


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_are_wrong_together_are_left_out(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = prepare_training._unlike_eager, []

    def unlike(joint: Any, forward: Any, backward: Any, count: int) -> str:
        asked.append(backward.tuned.recorded.recording.program.fuse)
        return real(joint, forward, backward, count) if asked[-1] == "none" else "replays are not what eager computes"

    monkeypatch.setattr(prepare_training, "_unlike_eager", unlike)
    options = Options(fuse="inductor", tune="off", strict=strict)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 3)
    if strict:
        with pytest.raises(NimbleError, match="not what eager computes"):
            pair(model, x, options=options)
        return
    net, eager = pair(model, x, options=options)
    assert asked == ["inductor", "none"]
    assert net.engines[0].recorded.recording.program.fuse == "none"
    assert net.engines[0].notes[0] == "inductor: left out: replays are not what eager computes"
    for module in (net, eager):
        module(x).square().sum().backward()
    assert_same_gradients(model, eager, rtol=1e-5)
    net.close()


def test_a_backward_can_be_made_once_more() -> None:
    _, net, _ = prepared("resnet")
    half = net.engines[0].backward
    assert half is not None
    spare = prepare_training._captured_separately(HostDevice(), half.tuned, None)
    tensors = half.recorded.signature.tensors
    inputs = [torch.randn_like(one) if one.is_floating_point() else one for one in tensors]
    assert_values(spare.run(inputs), half.executable.run(inputs))
    spare.close()
    net.close()


@pytest.mark.parametrize("options", [QUICK, Options(budget_s=0.5)], ids=["quick", "measured"])
@pytest.mark.parametrize("name", ["resnet", "dropout", "shared", "frozen"])
def test_preparing_changes_nothing(name: str, options: Options) -> None:
    found = made(name)
    optimizer = OPTIMIZERS["adamw"](found.model.parameters())
    inputs, targets = found.draw()
    loss_of(found, found.model, inputs, targets).backward()
    optimizer.step()
    if inputs.is_floating_point():
        inputs.requires_grad_()
        inputs.grad = torch.ones_like(inputs)
    kept = inputs.detach().clone()
    before = everything(found.model, optimizer)
    net = Nimble(found.model, options).prepare(inputs, training=True)
    assert_untouched(before, everything(found.model, optimizer))
    assert torch.equal(inputs, kept)
    if inputs.is_floating_point():
        assert torch.equal(inputs.grad, torch.ones_like(inputs))
        assert inputs.requires_grad
        assert inputs.is_leaf
    net.close()


def test_a_number_that_follows_the_input_is_refused_beside_an_output() -> None:
    class Tells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), float(x.numpy()[0, 0])

    with pytest.raises(NotStaticError, match=r"on other input values output\[1\] is"):
        Nimble(Tells().train()).prepare(torch.randn(6, 8), training=True)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"a gradient is sparse(.|\n)*0\.weight(.|\n)*sparse=False"):
        Nimble(model, QUICK).prepare(torch.randint(9, (5,)), training=True)
    assert all(one.grad is None for one in model.parameters())


def test_a_module_without_gradients_is_refused() -> None:
    model = perceptron().requires_grad_(False)
    with pytest.raises(InputError, match="no output depends on"):
        Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True)
    net, eager = pair(model, torch.randn(6, 8, requires_grad=True))
    x = torch.randn(6, 8, requires_grad=True)
    assert_values(*(torch.autograd.grad(one(x).sin().sum(), [x])[0] for one in (net, eager)), rtol=1e-6)
    net.close()


CHANGES: dict[str, Callable[[nn.Sequential, torch.Tensor], object]] = {
    "a part in evaluation mode": lambda model, x: model[1].eval(),
    "frozen": lambda model, x: model[0].weight.requires_grad_(False),
    "unfrozen": lambda model, x: model[2].bias.requires_grad_(True),
    "an input with a gradient": lambda model, x: x.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_refused_before_anything_is_written(change: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].bias.requires_grad_(False)
    x = torch.randn(6, 8)
    net = Nimble(model, QUICK).prepare(x, training=True)
    net(x).sin().sum().backward()
    norm = model[1]
    values = copy.deepcopy([norm.running_mean.float(), norm.num_batches_tracked])
    CHANGES[change](model, x)
    with pytest.raises(NimbleError) as error:
        net(x)
    assert error.value.fix
    assert_values([norm.running_mean.float(), norm.num_batches_tracked], values)
    net.close()


def test_preparing_leaves_a_backward_that_is_under_way_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    loss = model(torch.randn(6, 8)).sin().sum()
    Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True).close()
    loss.backward()
