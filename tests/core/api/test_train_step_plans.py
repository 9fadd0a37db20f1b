"""Whole steps that follow a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import Plan, load_plan
from nimble_core.utils.errors import InputError
from tests.support.training_problems import OPTIMIZERS, Problem, made
from tests.support.training_steps import Eager, assert_untouched, both, everything, one_thread, train_both

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


STREAMS = Options(fuse="none", policy="nimble", tune="off")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of a step on several streams, as a file gives it back."""
    _, step, _ = both("resnet", options=STREAMS)
    assert step.engine is not None
    assert step.engine.plan is not None
    found = load_plan(step.engine.plan.save(tmp_path / "step.json"))
    step.close()
    return found


def stepping(given: Problem, optimizer: str = "momentum", **more: Any) -> TrainStep:
    """Not prepared, and on one stream if it is without a plan."""
    trained = OPTIMIZERS[optimizer](given.model.parameters())
    return TrainStep(given.model, given.loss_fn, trained, **{"options": QUICK, **more})


def test_a_plan_is_followed_and_trains_as_eager(plan: Plan) -> None:
    given = made("resnet")
    eager, step = Eager(given, OPTIMIZERS["momentum"]), stepping(given)
    inputs, targets = given.draw()
    before = everything(given.model, step.optimizer)
    assert step.prepare(inputs, targets, plan=plan) is step
    assert_untouched(before, everything(given.model, step.optimizer))
    assert step.engine is not None
    assert step.engine.plan == plan
    assert plan.policy == "nimble"
    assert step.engine.schedule.streams > 1
    assert step.engine.candidates == ()
    train_both(given, step, eager)
    step.close()


def _other_model(given: Problem) -> TrainStep:
    given.model.head = nn.Linear(8, 10, bias=False)
    return stepping(given)


def _other_loss(given: Problem) -> TrainStep:
    return stepping(Problem(given.model, nn.CrossEntropyLoss(label_smoothing=0.1), given.draw))


OTHERS: dict[str, tuple[Callable[[Problem], TrainStep], str]] = {
    "model": (_other_model, r"call \d+"),
    "loss": (_other_loss, r"call \d+"),
    "optimizer": (lambda given: stepping(given, "adamw"), r"call \d+"),
    "autocast": (lambda given: stepping(given, autocast=torch.bfloat16), r"call \d+"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_step_is_refused_and_nothing_is_replaced(other: str, plan: Plan) -> None:
    given = made("resnet")
    make, match = OTHERS[other]
    step = make(given)
    data = given.draw()
    step.prepare(*data)
    prepared, before = step.engine, everything(given.model, step.optimizer)
    with pytest.raises(InputError, match=f"the plan was made for another program: .*{match}"):
        step.prepare(*data, plan=plan)
    assert_untouched(before, everything(given.model, step.optimizer))
    assert step.engine is prepared
    step(*data)
    step.close()


def test_a_plan_for_other_data_is_refused(plan: Plan) -> None:
    given = made("resnet")
    inputs, targets = given.draw()
    with pytest.raises(InputError, match="is float32"):
        stepping(given).prepare(inputs[:2], targets[:2], plan=plan)
    with pytest.raises(InputError, match="plan is a str"):
        stepping(given).prepare(inputs, targets, plan="step.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_accumulation_a_plan_is_of_the_step_that_updates(accumulate: int) -> None:
    _, first, _ = both("mlp", options=STREAMS, accumulate=accumulate)
    assert first.engine is not None
    plan = first.engine.plan
    given = made("mlp")
    eager = Eager(given, OPTIMIZERS["momentum"], accumulate=accumulate)
    step = stepping(given, accumulate=accumulate).prepare(*given.draw(), plan=plan)
    assert step.engine is not None
    assert step.engine.plan == plan
    train_both(given, step, eager, 2 * accumulate)
    with pytest.raises(InputError, match="another program"):
        stepping(made("mlp")).prepare(*given.draw(), plan=plan)


def test_the_plan_of_a_report_is_followed() -> None:
    from nimble_viz.collect.compare import compare

    given = made("resnet")
    inputs, targets = given.draw()
    step = stepping(given, autocast=torch.bfloat16, clip_grad_norm=1.0)
    report = compare(
        given.model,
        inputs,
        training=True,
        loss_fn=given.loss_fn,
        target=targets,
        optimizer=step.optimizer,
        autocast=torch.bfloat16,
        clip_grad_norm=1.0,
        options=Options(fuse="none", budget_s=0.05),
    )
    step.prepare(inputs, targets, plan=report.plan)
    assert step.engine is not None
    assert step.engine.plan is not None
    assert step.engine.plan.fingerprint == report.plan.fingerprint
    assert step.engine.schedule.stream == report.plan.schedule.stream


def test_forward_and_backward_in_place_of_the_model_follow_no_plan(plan: Plan) -> None:
    given = made("resnet")
    net = Nimble(given.model, QUICK)
    with pytest.raises(InputError, match=r"makes two(.|\n)*TrainStep"):
        net.prepare(given.draw()[0], training=True, plan=plan)
    assert net.engines == ()
