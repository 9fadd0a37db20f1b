"""Whole steps in mixed precision and float64: autocast, gradient scalers, rates and counters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.training.whole_step import WholeStep
from nimble_core.utils.errors import InputError
from tests.support.training_problems import OPTIMIZERS, Island, perceptron, vectors
from tests.support.training_steps import assert_same, both, one_thread, scaler_on_host, state_of, train_both

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_float64_is_trained_with_the_rates_of_eager(name: str) -> None:
    """0.01 in float32 is 2e-8 off: bit for bit shows it."""
    model = nn.Linear(8, 4).double()
    other = copy.deepcopy(model)
    rates = [OPTIMIZERS[name](one.parameters()) for one in (model, other)]
    step = TrainStep(model, lambda output: output.square().mean(), rates[0], options=QUICK)
    step.prepare(torch.randn(3, 8, dtype=torch.float64))
    for _ in range(3):
        x = torch.randn(3, 8, dtype=torch.float64)
        rates[1].zero_grad()
        other(x).square().mean().backward()
        rates[1].step()
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    step.close()


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_autocast_equals_eager(name: str) -> None:
    given, step, eager = both(name, autocast=torch.bfloat16)
    train_both(given, step, eager, 3)
    assert step.engine is not None
    dtypes = {ref.dtype for call in step.engine.recorded.recording.program.calls for ref in call.writes}
    assert "bfloat16" in dtypes
    step.close()


def test_the_backward_of_a_step_is_no_part_of_the_autocast_around_it() -> None:
    torch.manual_seed(0)
    model, x, y = Island().train(), torch.randn(4, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK).prepare(x, y)
        step(x, y)
    for (name, found), one in zip(step.gradients.items(), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0.0, atol=0.0, msg=name)
    step.close()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_grows_and_leaves_steps_out_as_in_eager(clip: float | None) -> None:
    # Not fused in eager: there a step that is left out makes no state.
    given, step, eager = both(
        "mlp", lambda parameters: torch.optim.Adam(parameters, lr=0.01), scaler=scaler_on_host, clip=clip
    )
    scales = []
    for at in range(7):
        inputs, targets = given.draw()
        if at in (0, 3):  # the first step makes the optimizer's state: it is left out, and so makes none
            inputs[0, 0] = float("inf")
        before = copy.deepcopy(given.model.state_dict())
        step(inputs, targets)
        eager(inputs, targets)
        assert_same(
            state_of(given.model, step.optimizer, step.scaler),
            state_of(eager.model, eager.optimizer, eager.scaler),
            rtol=2e-5,
        )
        unchanged = all(torch.equal(one, before[name]) for name, one in given.model.state_dict().items())
        assert unchanged == (at in (0, 3))
        assert step.scaler is not None
        scales.append(step.scaler.get_scale())
    assert {128.0, 256.0} == set(scales)
    step.close()


def test_a_scaler_needs_a_fused_optimizer() -> None:
    model = perceptron()
    with pytest.raises(InputError, match="leave out a step"):
        TrainStep(model, F.cross_entropy, torch.optim.RMSprop(model.parameters()), scaler=scaler_on_host())


def test_a_disabled_scaler_is_none() -> None:
    def off() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=False)

    given, step, eager = both("mlp", lambda parameters: torch.optim.RMSprop(parameters, lr=0.01), scaler=off)
    train_both(given, step, eager, rtol=1e-5)
    assert step.scaler is not None
    assert step.scaler.state_dict() == {}
    whole = WholeStep(given.model, given.loss_fn, None, scaler=off())
    assert whole.scaler is None
    assert not any("loss scale" in name for name, _ in whole.named_buffers())


def test_other_growth_settings_of_a_scaler_are_noticed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = perceptron()
    x, y = vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK, scaler=scaler).prepare(x, y)
    step(x, y)
    before = copy.deepcopy(state_of(model))
    scaler.set_growth_interval(7)
    with pytest.raises(InputError, match="grows or backs off"):
        step(x, y)
    assert_same(state_of(model), before)
    step.prepare(x, y)
    step(x, y)
    step.close()


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("then", [None, torch.bfloat16])
def test_another_autocast_than_around_the_preparation_is_refused(then: torch.dtype | None, warm: int) -> None:
    def casting(to: torch.dtype | None) -> torch.autocast:
        return torch.autocast("cpu", dtype=to or torch.bfloat16, enabled=to is not None)

    model, (x, y) = perceptron(), vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with casting(then):
        step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
        for _ in range(warm):
            step(x, y)
    before = copy.deepcopy(state_of(model, optimizer))
    with casting(torch.float16 if then else torch.bfloat16), pytest.raises(InputError, match="autocast was") as error:
        step(x, y)
    assert "the same torch.autocast" in error.value.fix
    assert_same(state_of(model, optimizer), before)
    with casting(then):
        step(x, y)
        assert step.outputs.dtype is (then or torch.float32)
    step.close()


def test_a_scaler_works_whatever_torchs_default_type_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, x, y = nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4)
        eager = copy.deepcopy(model)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, F.mse_loss, optimizer, options=QUICK, scaler=scaler).prepare(x, y)
        step(x, y)
        F.mse_loss(eager(x), y).backward()
        torch.optim.SGD(eager.parameters(), lr=0.1).step()
        torch.testing.assert_close(model.weight, eager.weight)
        step.close()
    finally:
        torch.set_default_dtype(before)
