"""Whole steps: what a prepared step leaves behind is what eager training would."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import NimbleWarning
from tests.support.drop_in import CLOSE
from tests.support.training_problems import OPTIMIZERS, PROBLEMS, Aliases, Problem, Recomputed, made, vectors
from tests.support.training_steps import (
    ROUNDED,
    Eager,
    assert_same,
    assert_values,
    both,
    one_thread,
    state_of,
    train_both,
)

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


@pytest.mark.parametrize("name", PROBLEMS)
def test_steps_equal_eager(name: str) -> None:
    given, step, eager = both(name)
    train_both(given, step, eager)
    assert all(one.grad is None for one in given.model.parameters())
    step.close()


def test_gradients_that_are_one_memory_are_updated_apart() -> None:
    """Nesterov's momentum is added to gradients in place by torch's for-each form, which makes the first step."""
    model = Aliases()
    eager = copy.deepcopy(model)
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    ours, theirs = nesterov(model.parameters()), nesterov(eager.parameters())
    step = TrainStep(model, F.mse_loss, ours, options=QUICK).prepare(torch.randn(6, 4), torch.randn(6, 4))
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        step(x, y)
        theirs.zero_grad()
        F.mse_loss(eager(x), y).backward()
        theirs.step()
    assert_values(list(model.parameters()), list(eager.parameters()), rtol=1e-5)
    step.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_eager(optimizer: str) -> None:
    given, step, eager = both("mlp", OPTIMIZERS[optimizer])
    train_both(given, step, eager, rtol=ROUNDED if optimizer.startswith("adam") else 0.0)
    step.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_and_accumulating_equal_eager(clip: float | None, accumulate: int, device: str) -> None:
    given, step, eager = both("mlp", clip=clip, accumulate=accumulate, device=device)
    rtol = 1e-5 if device == "cpu" else CLOSE
    for _ in range(2 * accumulate + 1):
        inputs, targets = given.draw()
        assert_values(step(inputs, targets), eager(inputs, targets), rtol=rtol)
        assert_same(state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer), rtol=rtol)
    step.close()


def test_the_measured_choice_equals_eager() -> None:
    given, step, eager = both("resnet", options=Options(budget_s=1.0))
    assert step.engine is not None
    assert [one.name for one in step.engine.candidates if one.chosen] == [step.engine.schedule.policy]
    train_both(given, step, eager, rtol=1e-4)
    step.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_of_probabilities_equal_eager(device: str) -> None:
    """One out of range is an error on the host, and on CUDA the end of all work on the device."""

    def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12), nn.Sigmoid()).to(device)
        with torch.no_grad():
            net[2].bias += 30 * torch.tensor([1.0, 0.0, -1.0]).repeat(4).to(device)
        return net, torch.optim.Adam(net.parameters(), lr=1e-2)

    (net, optimizer), (twin, other) = problem(), problem()
    x, ones = torch.rand(16, 12, device=device), torch.ones(16, 12, device=device)
    assert twin(x).max() == 1, "a sigmoid is saturated"
    step = TrainStep(net, nn.BCELoss(), optimizer).prepare(x, x.clone())
    for target in (x.clone(), ones, x.round()):
        mine = step(x, target)
        other.zero_grad()
        theirs = nn.functional.binary_cross_entropy(twin(x), target)
        theirs.backward()
        other.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_steps_train_a_generator_and_its_critic_as_in_eager(device: str) -> None:
    """Each reads the network that the other one trains."""
    torch.manual_seed(3)
    nets = nn.Linear(4, 2).to(device), nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
    (generator, critic), (other, judge) = nets, copy.deepcopy(nets)
    rates = [torch.optim.Adam(one.parameters(), lr=2e-3, fused=True) for one in (generator, critic, other, judge)]

    def fools(of: nn.Module, fake: torch.Tensor) -> torch.Tensor:
        return F.softplus(-of(fake)).mean()

    def tells(scores: torch.Tensor) -> torch.Tensor:
        return F.softplus(-scores[:16]).mean() + F.softplus(scores[16:]).mean()

    near = 1e-5 if device == "cpu" else 2e-2
    noise = torch.randn(16, 4, device=device)
    g_step = TrainStep(generator, partial(fools, critic), rates[0], options=QUICK).prepare(noise)
    d_step = TrainStep(critic, tells, rates[1], options=QUICK).prepare(torch.randn(32, 2, device=device))
    for _ in range(20):
        noise, real = torch.randn(16, 4, device=device), torch.rand(16, 2, device=device)
        mine = [d_step(torch.cat([real, generator(noise).detach()])), g_step(noise)]
        rates[3].zero_grad()
        told = tells(judge(torch.cat([real, other(noise).detach()])))
        told.backward()
        rates[3].step()
        rates[2].zero_grad()
        fooled = fools(judge, other(noise))
        fooled.backward()
        rates[2].step()
        torch.testing.assert_close(torch.stack(mine), torch.stack([told, fooled]).detach(), rtol=near, atol=near)
    g_step.close()
    d_step.close()


def test_recomputing_in_the_backward_equals_eager() -> None:
    given = Problem(Recomputed(0.0), F.cross_entropy, vectors)
    eager = Eager(given, OPTIMIZERS["momentum"])
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK).prepare(*given.draw())
    train_both(given, step, eager)
    step.close()


def test_large_models_are_updated_in_parts() -> None:
    """Neighbours together, everyone once; all at once where all wait for the norm of all."""
    wide = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 4))
    for clip, parts in ((None, 4), (1.0, 1)):
        given = Problem(copy.deepcopy(wide), F.cross_entropy, vectors)
        optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK, clip_grad_norm=clip)
        engine = step.prepare(*given.draw()).engine
        assert engine is not None
        updates = [call for call in engine.recorded.recording.program.calls if call.label == "_fused_sgd_"]
        storages = engine.recorded.recording.program.storages
        written = [{storages[ref.storage].name for ref in call.writes} for call in updates]
        owned = [{name for name in names if name and " " not in name} for names in written]
        assert 1 < len(updates) <= parts or len(updates) == parts == 1
        assert sorted(name for names in owned for name in names) == sorted(dict(wide.named_parameters()))
        step.close()


class Numpy(nn.Module):
    """Computes a factor out of torch's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.from_numpy(x.detach().numpy().mean(keepdims=True))


def test_a_model_that_computes_out_of_sight_equals_eager() -> None:
    """On the host such a step runs as it is."""
    pytest.importorskip("numpy")
    given = Problem(Numpy(), F.cross_entropy, vectors)
    eager = Eager(given, OPTIMIZERS["momentum"])
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    with pytest.warns(NimbleWarning, match="called as it is") as caught:
        step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK).prepare(*given.draw())
    assert [one.filename for one in caught] == [__file__]
    train_both(given, step, eager)
    step.close()


def test_a_loss_may_have_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output * self.temperature, targets)

    given, loss_fn = made("mlp"), Scaled()
    mine = nn.ModuleList([given.model, loss_fn])
    theirs = copy.deepcopy(mine)
    optimizers = [OPTIMIZERS["momentum"](one.parameters()) for one in (mine, theirs)]
    step = TrainStep(given.model, loss_fn, optimizers[0], options=QUICK).prepare(*given.draw())
    for _ in range(3):
        inputs, targets = given.draw()
        step(inputs, targets)
        optimizers[1].zero_grad()
        theirs[1](theirs[0](inputs), targets).backward()
        optimizers[1].step()
    assert "loss_fn.temperature" in step.gradients
    assert_values(list(mine.parameters()), list(theirs.parameters()))


def test_the_loss_is_the_callers_own() -> None:
    given, step, _ = both("mlp")
    first = step(*given.draw())
    kept = first.clone()
    step(*given.draw())
    assert first.shape == ()
    assert not first.requires_grad
    assert torch.equal(first, kept)
    step.close()


def test_gradients_of_the_users_own_are_left_alone() -> None:
    given, step, _ = both("mlp")
    grads = [torch.randn_like(one) for one in given.model.parameters()]
    for one, grad in zip(given.model.parameters(), grads, strict=True):
        one.grad = grad
    kept = [grad.clone() for grad in grads]
    step(*given.draw())
    step(*given.draw())
    assert all(one.grad is grad for one, grad in zip(given.model.parameters(), grads, strict=True))
    assert_values(grads, kept)
    step.close()


def test_a_parameter_written_into_the_input_leaves_the_callers_tensor_without_history() -> None:
    """As a class token is: in eager the input carries the graph of that step from then on."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] = self.token
            return self.head(x)

    torch.manual_seed(0)
    model = Token()
    other = copy.deepcopy(model)
    rates = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    example = torch.randn(2, 3, 4)
    kept = example.clone()
    step = TrainStep(model, lambda output: output.square().mean(), rates[0], options=Options(tune="off"))
    step.prepare(example)
    assert torch.equal(example, kept)
    assert not example.requires_grad
    for _ in range(3):
        given = torch.randn(2, 3, 4)
        theirs = given.clone()
        rates[1].zero_grad()
        loss = other(theirs).square().mean()
        loss.backward()
        rates[1].step()
        torch.testing.assert_close(step(given), loss.detach())
        torch.testing.assert_close(given, theirs.detach())
        assert not given.requires_grad
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
    step.close()


def test_a_frozen_parameter_keeps_its_value_whatever_gradient_an_earlier_step_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    F.mse_loss(model(x), y).backward()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weight, left = model[0].weight.clone(), model[0].weight.grad
    step = TrainStep(model, F.mse_loss, optimizer, options=QUICK).prepare(x, y)
    for _ in range(2):
        step(x, y)
    assert torch.equal(model[0].weight, weight)
    assert model[0].weight.grad is left
    step.close()
