"""Whole steps over time: checkpoints, schedulers, other shapes, accumulation, copies, modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError
from tests.support.training_problems import OPTIMIZERS, perceptron, vectors
from tests.support.training_steps import (
    assert_same,
    assert_untouched,
    assert_values,
    both,
    everything,
    one_thread,
    state_of,
    train_both,
)

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


def test_a_short_last_batch_follows_on_new_shape() -> None:
    def short(batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return batch[0][:3], batch[1][:3]

    given, step, eager = both("resnet")
    train_both(given, step, eager, 1)
    before = copy.deepcopy(state_of(given.model, step.optimizer))
    with pytest.raises(InputError, match="no engine is prepared for these inputs"):
        step(*short(given.draw()))
    assert_same(state_of(given.model, step.optimizer), before)
    for answer in ("eager", "prepare"):
        given, step, eager = both("resnet", options=Options(tune="off", policy="single", on_new_shape=answer))
        train_both(given, step, eager, 1)
        for _ in range(2):
            inputs, targets = short(given.draw())
            assert_values(step(inputs, targets), eager(inputs, targets))
        train_both(given, step, eager, 2)
        step.close()


class Heads(nn.Module):
    """One of several heads is used, and trained, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


@settings(max_examples=25)
@given(
    used=st.text("ab", min_size=2, max_size=10),
    answer=st.sampled_from(["eager", "prepare", "error"]),
    accumulate=st.integers(1, 3),
    kind=st.sampled_from(["adam", "momentum", "sgd"]),
)
def test_parameters_that_other_data_are_the_first_to_train(used: str, answer: Any, accumulate: int, kind: str) -> None:
    torch.manual_seed(0)
    model = Heads()
    eager = copy.deepcopy(model)
    make: Any = {
        "adam": partial(torch.optim.Adam, lr=0.01),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
        "sgd": partial(torch.optim.SGD, lr=0.1),
    }[kind]
    mine, theirs = make(model.parameters()), make(eager.parameters())
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.mse_loss, mine, options=options, accumulate=accumulate)
    step.prepare({"x": torch.randn(8, 4), "head": "a"}, torch.randn(8, 2))
    if answer == "error":  # both are prepared
        step.prepare({"x": torch.randn(8, 4), "head": "b"}, torch.randn(8, 2))
    for at, head in enumerate(one for one in used for _ in range(accumulate)):
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        step({"x": x, "head": head}, y)
        if at % accumulate == 0:
            theirs.zero_grad()
        (F.mse_loss(eager(x, head), y) / accumulate).backward()
        if at % accumulate == accumulate - 1:
            theirs.step()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.state[one].keys() == theirs.state[other].keys()
    step.close()


class Either(nn.Module):
    """One branch or the other, by the size of the batch; some parameters are in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.idle = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.few if len(x) == 3 else self.many)(x)
        return found


@pytest.mark.parametrize("answer", ["eager", "error"])
def test_steps_of_one_update_that_train_other_parameters_are_refused(answer: Any) -> None:
    model = Either()
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), options=options, accumulate=2)
    batches = {size: (torch.randn(size, 8), torch.randint(3, (size,))) for size in (3, 5)}
    step.prepare(*batches[3])
    if answer == "error":
        step.prepare(*batches[5])
    step(*batches[3])
    before = copy.deepcopy(state_of(model))
    with pytest.raises(InputError, match=r"few\.bias got a gradient in some steps of this update only") as refused:
        step(*batches[5])
    assert "prepare(x, training=True)" in refused.value.fix
    assert_same(state_of(model), before)
    step(*batches[3])  # the update goes on
    assert not torch.equal(model.few.weight, before[0][1])
    step.close()


def test_a_step_under_inference_mode_trains_nothing_and_under_anomaly_detection_what_it_did() -> None:
    model = perceptron()
    optimizer, (x, y) = OPTIMIZERS["momentum"](model.parameters()), vectors()
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    step(x, y)
    before = everything(model, optimizer)
    with torch.inference_mode():
        for use in (step, step.prepare):
            with pytest.raises(InputError, match="inference_mode is on"):
                use(x, y)
    assert_untouched(before, everything(model, optimizer))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert step(x, y) > step(x, y)
    step.close()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_copy_of_a_step_starts_unprepared_and_goes_on_alike(
    way: Callable[[TrainStep], TrainStep], steps: int
) -> None:
    model = perceptron()
    x, y = vectors()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=QUICK).prepare(x, y)
    for _ in range(steps):
        step(x, y)
    other = way(step)
    assert other.outputs is None
    with pytest.raises(InputError, match="not prepared"):
        other(x, y)
    other.prepare(x, y)
    for _ in range(3):
        assert torch.equal(other(x, y), step(x, y))
    assert_same(state_of(other.model), state_of(model))
    assert other.optimizer.param_groups[0]["params"][0] is next(other.model.parameters())
    other.close()
    step.close()


@pytest.mark.parametrize("answer", ["error", "eager", "prepare"])
def test_a_step_in_evaluation_mode_trains_nothing_whatever_new_shapes_do(answer: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x, y = vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.cross_entropy, optimizer, options=options).prepare(x, y)
    model.eval()
    before = everything(model, optimizer)
    with pytest.raises(InputError, match="evaluation mode"):
        step(x, y)
    with pytest.raises(InputError, match="evaluation mode"):
        step.prepare(x, y)
    assert_untouched(before, everything(model, optimizer))
    model.train()
    step(x, y)
    step.close()
