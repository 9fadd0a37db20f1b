"""State and learning rates of a captured optimizer: followed, refused where they do not fit, left alone by prepare."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.optim.swa_utils import SWALR

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError, NimbleError
from tests.support.optimizers import (
    Kind,
    Replayed,
    assert_same,
    eager,
    everything,
    gradients_of,
    members,
    parameters,
    twins,
)

QUICK = Options(tune="off", policy="single")

cross_entropy = torch.nn.functional.cross_entropy


# -- learning rates ----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda one: optim.lr_scheduler.StepLR(one, 3, 0.5),
    "LambdaLR": lambda one: optim.lr_scheduler.LambdaLR(one, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda one: optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=10, cycle_momentum=False),
    "SWALR": lambda one: SWALR(one, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_followed(name: str, attached: str) -> None:
    mine, other = twins(optim.SGD, {"lr": 0.1, "momentum": 0.9})
    schedules = [SCHEDULERS[name](one) for one in (mine, other)] if attached == "before" else []
    replayed = Replayed(CapturedOptimizer(mine, "cpu"))
    schedules = schedules or [SCHEDULERS[name](one) for one in (mine, other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers ask whether a step was taken
        for step in range(6):
            replayed.step(gradients_of(members(mine), step))
            eager(other, gradients_of(members(other), step))
            for schedule in schedules:
                schedule.step()
    assert_same(mine, other)
    replayed.captured.sync()
    assert replayed.captured.rates[0].item() == pytest.approx(mine.param_groups[0]["lr"])
    assert replayed.captured.rates[1].item() == pytest.approx(mine.param_groups[1]["lr"])


def test_a_scheduler_that_cycles_momentum_is_refused() -> None:
    mine, _ = twins(optim.Adam, {"lr": 0.01})
    cycling = optim.lr_scheduler.OneCycleLR(mine, max_lr=0.1, total_steps=10)
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    captured.sync()
    cycling.step()
    with pytest.raises(InputError, match=r"betas was \(0.95.*\n.*\n.*cycle_momentum=False"):
        captured.sync()


def test_rates_that_are_tensors() -> None:
    rate = torch.tensor(0.1)
    mine = optim.Adam(parameters(), lr=rate, capturable=False)
    captured = CapturedOptimizer(mine, "cpu")
    assert captured.rates[0].item() == pytest.approx(0.1)
    rate.fill_(0.25)
    captured.sync()
    assert captured.rates[0].item() == 0.25
    assert captured.rates[0] is not rate
    assert mine.param_groups[0]["lr"] is rate
    mine.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(InputError, match="lr has 2 elements"):
        captured.sync()


# -- what a replay would miss ------------------------------------------------------------------------------------------


def add_group(optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": parameters([(2,)])})


def replace_parameter(optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = parameters([(4, 3)])[0]


def drop_state(optimizer: optim.Optimizer) -> None:
    del optimizer.state[members(optimizer)[2]]["exp_avg"]


def reshape_state(optimizer: optim.Optimizer) -> None:
    optimizer.state[members(optimizer)[2]]["exp_avg"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_group, "has 3 parameter groups; it had 2"),
        (replace_parameter, "other parameters than it had"),
        (lambda o: o.param_groups[1]["params"].pop(), "other parameters than it had"),
        (lambda o: members(o)[2].requires_grad_(False), "frozen or unfrozen"),
        (lambda o: o.param_groups[1].update(weight_decay=0.5), r"weight_decay was 0 and is 0.5 now.*\n.*groups\[1\]"),
        (lambda o: o.param_groups[0].update(betas=(torch.tensor(0.9), torch.tensor(0.9))), "betas was"),
        (lambda o: o.param_groups[0].pop("eps"), "eps was"),
        (lambda o: o.param_groups[1].update(lr="0.5"), r"lr is '0.5', which is no number\n.*groups\[1\]"),
        (lambda o: o.param_groups[1].update(lr=None), "lr is None"),
        (lambda o: o.register_step_post_hook(lambda *_: None), "step hooks"),
        (lambda o: setattr(o, "step", lambda: None), "replaced by another function"),
        (drop_state, r"has no tensor exp_avg\n.*param_groups\[1\]\['params'\]\[0\]"),
        (reshape_state, r"exp_avg in the optimizer's state has shape \[7\]"),
    ],
)
def test_sync_refuses_what_a_replay_would_miss_and_changes_nothing(
    change: Callable[[optim.Optimizer], Any], message: str
) -> None:
    mine, _ = twins(optim.Adam, {})
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    captured.sync()
    mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    mine.param_groups[0]["lr"] = 0.5
    change(mine)
    before = everything(mine)
    ours = [(tensor._version, tensor.tolist()) for _, _, tensor in captured.named_state()]
    for follow in (captured.sync, captured.refresh):
        with pytest.raises(InputError, match=message):
            follow()
    assert everything(mine) == before
    assert [(tensor._version, tensor.tolist()) for _, _, tensor in captured.named_state()] == ours
    assert captured.rates[0].item() == pytest.approx(1e-3)


def test_what_no_step_reads_may_change() -> None:
    mine, _ = twins(optim.Adam, {})
    captured = CapturedOptimizer(mine, "cpu")
    mine.param_groups[0].update(foreach=True, initial_lr=3.0, name="free", betas=(0.9, 0.999))
    mine.epoch = 3  # type: ignore[attr-defined]
    captured.sync()


# -- a preparation leaves the optimizer as it is -----------------------------------------------------------------------


def kept_by(optimizer: optim.Optimizer) -> Any:
    """Each tensor of the state, and where and what it is; parameters and hyperparameters."""
    entries = [(id(entry), key, value) for entry in optimizer.state.values() for key, value in entry.items()]
    settings = [{**group, "params": [one.tolist() for one in group["params"]]} for group in optimizer.param_groups]
    return [(at, key, id(one), one.dtype, one.device, one.tolist()) for at, key, one in entries], settings


def problem(
    device: str = "cpu", kind: Kind = optim.AdamW, steps: int = 2, **options: Any
) -> tuple[torch.nn.Module, optim.Optimizer]:
    """Make a model and an optimizer that has made ``steps`` eager steps; the same each time."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    with torch.no_grad():
        for seed, one in enumerate(model.parameters()):
            one.copy_(parameters([tuple(one.shape)], seed)[0])
    model.to(device)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        eagerly(model, optimizer, *batch(step, device))
    return model, optimizer


def batch(step: int, device: str = "cpu", size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)
    return x.to(device), y.to(device)


def eagerly(model: torch.nn.Module, optimizer: optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_counters_elsewhere(optimizer: optim.Optimizer) -> None:
    """As default Adam has them on CUDA: in a form that a replay cannot write."""
    for entry in optimizer.state.values():
        entry["step"] = entry["step"].double()


def fails(output: torch.Tensor, target: torch.Tensor) -> float:
    return output.sum().item()


def fails_late(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute what is recorded, but not the same on other inputs: the update was recorded too."""
    loss = cross_entropy(output, target)
    return loss * 2 if output[0, 0] > 0 else loss


@pytest.mark.parametrize("loss_fn", [cross_entropy, fails, fails_late])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_prepare_leaves_the_state_as_it_is_after_an_error_too(loss_fn: Any, elsewhere: bool) -> None:
    model, mine = problem()
    schedule = optim.lr_scheduler.StepLR(mine, 1)
    if elsewhere:
        with_counters_elsewhere(mine)
    before = (everything(mine), kept_by(mine))
    step = TrainStep(model, loss_fn, mine, options=QUICK)
    for _ in range(2):
        with nullcontext() if loss_fn is cross_entropy else pytest.raises(NimbleError):
            step.prepare(*batch(0))
        assert (everything(mine), kept_by(mine)) == before
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()  # no step was taken yet


ACTIONS = ["prepare", "other shape", "step", "eager", "load", "save", "rate"]


@given(st.booleans(), st.sampled_from([0, 2]), st.lists(st.sampled_from(ACTIONS), max_size=7))
@settings(max_examples=25)
def test_whatever_happens_between_preparations_and_steps_training_is_eagers(
    elsewhere: bool, steps: int, actions: list[str]
) -> None:
    model, mine = problem(steps=steps)
    peer, other = problem(steps=steps)
    if elsewhere:
        with_counters_elsewhere(mine)
    first = copy.deepcopy(mine.state_dict())
    step = TrainStep(model, cross_entropy, mine, options=QUICK)
    saved: list[tuple[Any, Any]] = []
    for number, action in enumerate(["prepare", *actions, "step", "step"]):
        before = (everything(mine), kept_by(mine))
        if action in ("prepare", "other shape"):
            step.prepare(*batch(number, size=6 if action == "prepare" else 5))
            assert (everything(mine), kept_by(mine)) == before
        if action == "step":
            step(*batch(number))
            eagerly(peer, other, *batch(number))
        if action == "eager":
            for one in ((model, mine), (peer, other)):
                eagerly(*one, *batch(number))
        if action == "load":
            for one in (mine, other):
                one.load_state_dict(copy.deepcopy(first))
        if action == "rate":
            for one in (mine, other):
                one.param_groups[0]["lr"] *= 0.5
        if action == "save":
            saved.append((copy.deepcopy(mine.state_dict()), copy.deepcopy(other.state_dict())))
    step.close()
    assert_same(mine, other)
    for one, peers in saved:
        for position, entry in one["state"].items():
            for key, value in entry.items():
                expected = peers["state"][position][key]
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam, optim.SGD])
def test_prepare_leaves_counters_on_the_host_until_the_first_step(kind: Kind) -> None:
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    model, mine = problem("cuda", kind, **options)
    peer, other = problem("cuda", kind, **options)
    counters = [entry["step"] for entry in mine.state.values() if "step" in entry]
    assert len(counters) == (0 if kind is optim.SGD else 4)
    assert all(one.device.type == "cpu" for one in counters)  # neither fused nor capturable
    torch.cuda.synchronize()
    before = kept_by(mine)
    for bad in (fails, fails_late):
        with pytest.raises(NimbleError):
            TrainStep(model, bad, mine, options=QUICK).prepare(*batch(2, "cuda"))
        gc.collect()  # of the error, which holds the graph that failed, and that nodes of the stream it was captured on
        assert kept_by(mine) == before
    step = TrainStep(model, cross_entropy, mine, options=QUICK).prepare(*batch(2, "cuda"))
    assert kept_by(mine) == before
    step.prepare(*batch(2, "cuda", size=5))
    assert kept_by(mine) == before
    resumed = copy.deepcopy(mine.state_dict())
    for number in range(2, 6):
        if number == 4:
            mine.load_state_dict(resumed)
            other.load_state_dict(copy.deepcopy(resumed))
        step(*batch(number, "cuda", size=6 - number % 2))
        eagerly(peer, other, *batch(number, "cuda", size=6 - number % 2))
    assert all(value.is_cuda for entry in mine.state.values() for value in entry.values())
    assert_same(mine, other)
    step.close()
    for number in range(6, 8):  # eager goes on with what replays have left
        eagerly(model, mine, *batch(number, "cuda"))
        eagerly(peer, other, *batch(number, "cuda"))
    assert_same(mine, other)
