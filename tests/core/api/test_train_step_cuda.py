"""Whole steps on a real GPU, captured, against eager."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from tests.support.drop_in import CLOSE, QUICK, STREAMS, exact, on_gpu
from tests.support.training_problems import OPTIMIZERS, PROBLEMS, RUNS, Fails, images, made, perceptron
from tests.support.training_steps import (
    Eager,
    assert_same,
    assert_untouched,
    assert_values,
    both,
    everything,
    one_thread,
    prepare,
    state_of,
    train_both,
)

__all__ = ["exact", "one_thread"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


# -- whole steps: equal to eager -------------------------------------------------------------------------------------

STEADY = [name for name in PROBLEMS if name != "dropout"]
"""Problems without random numbers: a replay draws others than eager."""


@pytest.mark.parametrize("name", STEADY)
def test_steps_equal_eager(name: str) -> None:
    given, step, eager = both(name, device="cuda", options=STREAMS)
    train_both(given, step, eager, rtol=CLOSE)
    assert all(one.grad is None for one in given.model.parameters())
    step.close()


@pytest.mark.parametrize("options", [QUICK, STREAMS, Options(budget_s=2.0)], ids=["single", "nimble", "measured"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_every_schedule_equals_eager(optimizer: str, options: Options) -> None:
    given, step, eager = both("resnet", OPTIMIZERS[optimizer], device="cuda", options=options)
    train_both(given, step, eager, rtol=CLOSE)
    step.close()


UNFUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def test_dropout_draws_fresh_masks_that_a_seed_brings_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25)).to("cuda")
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = on_gpu(torch.ones(5000, 4))
    step = TrainStep(model, lambda out: out.mean() * 0, optimizer, options=STREAMS).prepare(x)
    masks = []
    for seed in (1, None, 2, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        step(x)
        masks.append((step.outputs != 0).clone())
    assert all(not torch.equal(masks[a], masks[b]) for a in range(3) for b in range(a))
    assert torch.equal(masks[0], masks[3])
    assert torch.equal(masks[1], masks[4])
    for mask in masks:
        assert mask.float().mean().item() == pytest.approx(0.75, abs=0.015)
    step.close()


# -- whole steps: mixed precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_autocast_equals_eager(name: str) -> None:
    given, step, eager = both(name, autocast=torch.bfloat16, device="cuda", options=STREAMS)
    train_both(given, step, eager, 3, rtol=3e-2)
    step.close()


def test_float16_with_a_scaler_leaves_steps_out_as_in_eager() -> None:
    given, step, eager = both(
        "mlp",
        UNFUSED["adam"],
        autocast=torch.float16,
        scaler=lambda: torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=2),
        clip=1.0,
        device="cuda",
        options=STREAMS,
    )
    for at in range(7):
        inputs, targets = given.draw()
        if at in (0, 3):
            inputs[0, 0] = float("inf")
        before = copy.deepcopy(given.model.state_dict())
        step(inputs, targets)
        eager(inputs, targets)
        unchanged = all(torch.equal(one, before[name]) for name, one in given.model.state_dict().items())
        assert unchanged == (at in (0, 3))
        assert step.scaler is not None
        assert eager.scaler is not None
        assert step.scaler.state_dict() == eager.scaler.state_dict()
    assert_same(state_of(given.model), state_of(eager.model), rtol=3e-2)
    step.close()


# -- whole steps: a life of a training run ---------------------------------------------------------------------------


def test_schedulers_checkpoints_and_eager_steps() -> None:
    given = made("resnet", "cuda")
    eager = Eager(given, OPTIMIZERS["momentum"])
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, eager.optimizer)]
    step = TrainStep(given.model, given.loss_fn, optimizer, options=STREAMS).prepare(*given.draw())
    for _ in range(4):
        train_both(given, step, eager, 1, rtol=CLOSE)
        for one in schedules:
            one.step()
    inputs, targets = given.draw()
    optimizer.zero_grad()
    given.loss_fn(given.model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    eager(inputs, targets)
    train_both(given, step, eager, 1, rtol=CLOSE)

    file = io.BytesIO()
    torch.save({"model": given.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train_both(given, step, eager, 1, rtol=CLOSE)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for model, of in ((given.model, optimizer), (eager.model, eager.optimizer)):
        model.load_state_dict(saved["model"])
        of.load_state_dict(copy.deepcopy(saved["optimizer"]))
    train_both(given, step, eager, 2, rtol=CLOSE)
    step.close()


def test_losses_are_the_callers_own_and_need_no_wait() -> None:
    given, step, eager = both("mlp", device="cuda", options=STREAMS)
    batches = [given.draw() for _ in range(20)]
    losses = [step(*batch) for batch in batches]
    expected = [eager(*batch) for batch in batches]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=CLOSE, atol=CLOSE)
    step.close()


# -- preparing leaves no trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["step", "drop-in"])
@pytest.mark.parametrize("name", ["resnet", "dropout"])
def test_preparing_changes_nothing(name: str, way: str) -> None:
    given = made(name, "cuda")
    optimizer = OPTIMIZERS["adamw"](given.model.parameters())
    inputs, targets = given.draw()
    given.loss_fn(given.model(inputs), targets).backward()
    optimizer.step()
    before, random = everything(given.model, optimizer), torch.cuda.get_rng_state()
    if way == "step":
        step = TrainStep(given.model, given.loss_fn, optimizer, options=Options(budget_s=1.0), accumulate=2)
        step.prepare(inputs, targets).close()
    else:
        Nimble(given.model, Options(budget_s=1.0)).prepare(inputs, training=True).close()
    assert_untouched(before, everything(given.model, optimizer))
    assert torch.equal(random, torch.cuda.get_rng_state())


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("way", ["step", "drop-in"])
def test_an_error_in_the_middle_changes_nothing(way: str, at: int) -> None:
    model = Fails(at).to("cuda")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    x, y = on_gpu(*images())
    RUNS[0] = 0
    before, random = everything(model, optimizer), torch.cuda.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        prepare(way, model, optimizer, x, y)
    assert_untouched(before, everything(model, optimizer))
    assert torch.equal(random, torch.cuda.get_rng_state())
    model(x).sum().backward()  # the device is in order


def test_preparing_and_training_beside_a_data_loader_that_pins_memory() -> None:
    model = perceptron().to("cuda")
    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=6, num_workers=2, pin_memory=True, prefetch_factor=2
    )
    eager = copy.deepcopy(model)
    mine, theirs = (OPTIMIZERS["momentum"](one.parameters()) for one in (model, eager))
    step = TrainStep(model, F.cross_entropy, mine, options=replace(STREAMS, on_new_shape="eager"))
    batches = 0
    for _epoch in range(2):
        for inputs, targets in loader:
            assert inputs.is_pinned()
            here = inputs.to("cuda", non_blocking=True), targets.to("cuda", non_blocking=True)
            if not batches:
                step.prepare(*here)  # while workers and the thread that pins go on
            loss = step(*here)
            theirs.zero_grad()
            expected = F.cross_entropy(eager(here[0]), here[1])
            expected.backward()
            theirs.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=CLOSE, atol=CLOSE)
            batches += 1
    assert batches == 2 * 11  # the last of an epoch is short
    assert_values(list(model.state_dict().values()), list(eager.state_dict().values()), rtol=CLOSE)
    step.close()
