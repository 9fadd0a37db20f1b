"""Drop-in training: outputs of a prepared module carry gradients as eager's do."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.scheduling.options import Options
from tests.support.drop_in import QUICK, Place, assert_same_gradients, layer, loss_of, pair, prepared
from tests.support.training_problems import OPTIMIZERS, PROBLEMS, Residual, images, perceptron
from tests.support.training_steps import assert_same, assert_values, state_of


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads none", "grads zero"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_training_equals_eager(name: str, set_to_none: bool, on: Place) -> None:
    if on.cuda and name == "dropout":
        pytest.skip("on a GPU a replay draws other numbers than eager")
    found, net, eager = prepared(name, on.options, on.device)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for seed in range(4):
        inputs, targets = found.draw()
        mine.zero_grad(set_to_none)
        theirs.zero_grad(set_to_none)
        torch.manual_seed(seed)
        loss = loss_of(found, net, inputs, targets)
        loss.backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = loss_of(found, eager, inputs, targets)
        expected.backward()
        assert torch.equal(after, torch.get_rng_state())
        assert_values(loss, expected, rtol=on.exact)
        assert_same_gradients(found.model, eager, rtol=on.exact)
        mine.step()
        theirs.step()
        assert_same(state_of(found.model, mine), state_of(eager, theirs), rtol=on.exact)
    assert net.state_dict().keys() == eager.state_dict().keys()
    net.close()


class Tangent(nn.Module):
    """Computes with a transform inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.jvp(lambda one: self.layer(one).tanh(), (x,), (torch.ones_like(x),))[1]
        return found


def once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sin().sum().backward()


def twice_in_one_loss(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).sin().sum() + 2 * model(x.flip(0)).cos().sum()).backward()


def on_its_own_output(model: nn.Module, x: torch.Tensor) -> None:
    model(model(x)).square().sum().backward()


def the_later_forward_first(model: nn.Module, x: torch.Tensor) -> None:
    first, second = model(x), model(x.flip(0))
    second.sin().sum().backward()
    first.cos().sum().backward()


def from_a_gradient_of_the_callers(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.backward(out.detach().cos())


def after_a_write_to_the_output(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.mul_(2).add_(1)
    out.sin().sum().backward()


def frozen_in_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).sin().sum()
    layer(model, 0).weight.requires_grad_(False)
    loss.backward()


def moved_in_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).sin().sum()
    weight = layer(model, 0).weight
    weight.data = weight.detach().clone()
    loss.backward()


def vectors() -> torch.Tensor:
    return torch.randn(6, 8)


USES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Callable[[nn.Module, torch.Tensor], None]]
] = {
    "a transform inside": (Tangent, vectors, once),
    "twice in one loss": (perceptron, vectors, twice_in_one_loss),
    "on its own output": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        lambda: torch.randn(6, 8, requires_grad=True),
        on_its_own_output,
    ),
    "the later of two forwards first": (Residual, lambda: images()[0], the_later_forward_first),
    "a gradient of the caller's": (perceptron, vectors, from_a_gradient_of_the_callers),
    "an output that is written": (lambda: nn.Linear(8, 4), vectors, after_a_write_to_the_output),
    "a parameter frozen in between": (perceptron, vectors, frozen_in_between),
    "a parameter moved in between": (perceptron, vectors, moved_in_between),
}


@pytest.mark.parametrize("name", USES)
def test_uses_equal_eager(name: str) -> None:
    make, draw, use = USES[name]
    net, eager = pair(make(), draw())
    x = draw().detach()
    for model in (net, eager):
        torch.manual_seed(1)
        use(model, x)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_a_loss_keeps_what_its_backward_replays() -> None:
    model = perceptron()
    x = torch.randn(6, 8)
    loss = Nimble(model, QUICK).prepare(x, training=True)(x).sum()
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_loss_kept_on_the_model_keeps_nothing_after_its_backward() -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sum()
    loss.backward()
    object.__setattr__(net, "last", loss)
    gone = weakref.ref(net)
    del net, loss
    gc.collect()
    assert gone() is None


def test_between_other_trainable_modules(on: Place) -> None:
    torch.manual_seed(0)
    below, above = on(nn.Linear(5, 8)), on(nn.Linear(4, 3))
    model = on(perceptron())
    eager = copy.deepcopy(nn.Sequential(below, model, above))
    net = Nimble(model, on.options).prepare(on(torch.randn(6, 8)).requires_grad_(), training=True)
    whole = nn.Sequential(below, net, above)
    mine, theirs = OPTIMIZERS["momentum"](whole.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    assert len(list(whole.parameters())) == len(list(eager.parameters()))
    for _ in range(3):
        x = on(torch.randn(6, 5))
        for one, optimizer in ((whole, mine), (eager, theirs)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
        assert_values(list(whole.parameters()), list(eager.parameters()), rtol=on.exact)
    net.close()


def test_the_measured_choice_equals_eager() -> None:
    found, net, eager = prepared("resnet", Options(budget_s=1.0))
    inputs, targets = found.draw()
    for model in (net, eager):
        loss_of(found, model, inputs, targets).backward()
    assert_same_gradients(found.model, eager, rtol=1e-5)
    (engine,) = net.engines
    assert engine.backward is not None
    assert len(engine.backward.tuned.candidates) > 1
    net.close()


def test_dropout_draws_fresh_masks(on: Place) -> None:
    model = on(nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 4)))
    net, _ = pair(model, on(torch.ones(5000, 4)).requires_grad_())
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        x = on(torch.ones(5000, 4)).requires_grad_()
        net(x).sum().backward()
        masks.append(x.grad != 0)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert masks[0].float().mean().item() == pytest.approx(0.75, abs=0.015)
    net.close()


def test_other_kernels_keep_strides_that_address_nothing() -> None:
    """Of weights and images of one pixel, in a model channels last: as eager has them, or no kernels fit."""
    inner = [nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Flatten()]
    model = nn.Sequential(*inner, nn.Linear(8, 4)).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    net, eager = pair(model, x, options=Options(fuse="library", tune="off", policy="single"))
    backward = net.engines[0].backward
    assert backward is not None
    assert {half.recording.program.fuse for half in (net.engines[0].recorded, backward.recorded)} == {"library"}
    for one in (net, eager):
        one(x).sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-12)
    for one in net.parameters():
        assert one.grad is not None
        assert one.grad.stride() == one.stride()
    net.close()
