"""Preparing a whole step leaves no trace; what no longer fits is refused before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import DeviceError, InputError, NimbleError
from tests.support.training_problems import OPTIMIZERS, RUNS, Fails, images, made, perceptron, vectors
from tests.support.training_steps import (
    assert_untouched,
    assert_values,
    everything,
    one_thread,
    prepare,
    scaler_on_host,
)

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


def test_a_lazy_module_is_refused_until_it_ran() -> None:
    model, loss, x = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)), nn.LazyLinear(1), torch.randn(2, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with pytest.raises(InputError, match=r"parameter 1\.weight is not initialised") as caught:
        TrainStep(model, loss, optimizer)
    assert caught.value.fix == "run the model once on an example input first"
    model(x)
    with pytest.raises(InputError, match=r"parameter loss_fn\.weight is not initialised"):
        TrainStep(model, loss, optimizer)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("filled", "scaled"),
    [(False, False), (True, False), (True, True)],
    ids=["fresh", "amid training", "amid training, scaled"],
)
@pytest.mark.parametrize("name", ["resnet", "dropout", "shared"])
def test_preparing_changes_nothing(name: str, filled: bool, scaled: bool, accumulate: int) -> None:
    given = made(name)
    optimizer = OPTIMIZERS["adamw"](given.model.parameters())
    if filled:
        given.loss_fn(given.model(given.draw()[0]), given.draw()[1]).backward()
        optimizer.step()  # .grad stays
    scaler = scaler_on_host() if scaled else None
    if scaler is not None and filled:
        scaler.scale(torch.ones(()))  # makes its tensors
    inputs, targets = given.draw()
    kept = copy.deepcopy((inputs, targets))
    before = everything(given.model, optimizer, scaler)
    step = TrainStep(
        given.model,
        given.loss_fn,
        optimizer,
        scaler=scaler,
        clip_grad_norm=1.0,
        accumulate=accumulate,
        options=Options(budget_s=0.5),
    )
    assert_untouched(before, everything(given.model, optimizer, scaler))
    step.prepare(inputs, targets)
    assert_untouched(before, everything(given.model, optimizer, scaler))
    assert_values((inputs, targets), kept)
    step.close()


def test_preparing_counts_no_step_of_a_fresh_scaler() -> None:
    given, scaler = made("mlp"), scaler_on_host()
    before = scaler.state_dict()
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    TrainStep(given.model, given.loss_fn, optimizer, scaler=scaler, options=QUICK).prepare(*given.draw()).close()
    assert scaler.state_dict() == before


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("way", ["step", "drop-in"])
def test_an_error_in_the_middle_changes_nothing(way: str, at: int) -> None:
    model = Fails(at)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    x, y = images()
    RUNS[0] = 0
    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        prepare(way, model, optimizer, x, y)
    assert_untouched(before, everything(model, optimizer))


def replace_weight(step: TrainStep) -> None:
    step.model[0].weight = nn.Parameter(step.model[0].weight.detach().clone())


CHANGES: dict[str, Callable[[TrainStep], object]] = {
    "hyperparameter": lambda step: step.optimizer.param_groups[0].update(momentum=0.5),
    "weight": replace_weight,
    "mode of a part": lambda step: step.model[1].eval(),
    "unfrozen": lambda step: step.model[2].bias.requires_grad_(True),
    "closed": TrainStep.close,
    "another batch": lambda step: None,
}


@pytest.mark.parametrize("first", [False, True], ids=["amid training", "first step"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_refused_before_anything_is_written(change: str, first: bool) -> None:
    """What changes in the model is put back by nobody: only values that a step would write are compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].bias.requires_grad_(False)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    x, y = vectors()
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    if not first:
        step(x, y)
    values = copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    CHANGES[change](step)
    size = 2 if change == "another batch" else len(x)
    with pytest.raises(NimbleError) as error:
        step(x[:size], y[:size])
    assert error.value.fix
    assert_values({k: v.float() for k, v in model.state_dict().items()}, {k: v.float() for k, v in values.items()})
    assert_values([kept], [{key: optimizer.state_dict()["state"][key] for key in kept}])
    step.close()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_preparation_that_fails_late_replaces_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model, x, y = perceptron(), torch.randn(6, 8), torch.randint(0, 4, (6,))
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, fused=True) for one in (model, eager)]
    step = TrainStep(model, F.cross_entropy, optimizers[0], options=QUICK, accumulate=3).prepare(x, y)
    make, calls = Nimble.make_engine, 0

    def fails(net: Nimble, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise DeviceError("out of memory")
        return make(net, *args, **kwargs)

    monkeypatch.setattr(Nimble, "make_engine", fails)
    with pytest.raises(DeviceError, match="out of memory"):
        step.prepare(x, y)
    for _ in range(2):
        for _ in range(3):
            step(x, y)
            (F.cross_entropy(eager(x), y) / 3).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for one, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
    step.close()


def test_engines_for_other_shapes_go_where_casts_are_others() -> None:
    model, target = perceptron(), torch.randint(0, 4, (6,))
    x = torch.randn(6, 8)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with torch.autocast("cpu", torch.bfloat16):
        step.prepare(x, target)
    step.prepare(x[:4], target[:4]).prepare(x[:2], target[:2])
    with pytest.raises(InputError):
        step(x, target)
    for size in (4, 2):  # these two are alike
        step(x[:size], target[:size])
    step.close()
