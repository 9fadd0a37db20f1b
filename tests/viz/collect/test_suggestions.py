"""What is said of keywords that there are not, and of models that are prepared already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nimble_core import Nimble, TrainStep
from nimble_core.utils.errors import InputError
from nimble_viz import compare, diagnose, plan
from nimble_viz.collect.suggestions import original


@pytest.mark.parametrize("function", [compare, plan])
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("input_ids", r"inputs of the model by name go into one dict: kwargs=\{'input_ids': \.\.\.\}"),
        ("policy", r"options=Options\(policy=\.\.\.\)"),
        ("optoins", r"options=\.\.\.; or, if it is an input of the model, kwargs="),
    ],
)
def test_what_to_write_instead_is_said(function: Any, name: str, fix: str) -> None:
    given = {name: torch.ones(2)}
    with pytest.raises(InputError, match=rf"{function.__name__}\(\) has no keyword '{name}'(.|\n)*{fix}"):
        function(torch.nn.Linear(2, 2), **given)


@pytest.mark.parametrize("function", [diagnose, plan])
@pytest.mark.parametrize("name", ["training", "loss_fn", "optimizer"])
def test_what_looks_at_the_forward_alone_says_what_is_for_training(function: Any, name: str) -> None:
    said = rf"(?s){function.__name__} looks at the forward pass alone; for training: compare\(.*training=True\)"
    with pytest.raises(InputError, match=said):
        function(torch.nn.Linear(2, 2), torch.ones(1, 2), **{name: True})


def test_a_prepared_model_stands_for_its_original() -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
    net = Nimble(model).prepare(x)
    assert original(net) is original(Nimble(net)) is original(model) is model
    assert compare(net, x).model == plan(net, x).model == diagnose(net, x).model == "Linear"
    assert torch.equal(net(x), model(x))


def test_a_prepared_model_can_be_compared_in_training_and_stays_prepared() -> None:
    model, x, y = torch.nn.Linear(2, 2), torch.ones(3, 2), torch.ones(3, 2)
    net, optimizer = Nimble(model).prepare(x, training=True), torch.optim.SGD(model.parameters(), 0.1)
    given = {"target": y, "loss_fn": torch.nn.functional.mse_loss, "optimizer": optimizer, "training": True}
    assert compare(net, x, **given).model == "Linear"
    assert len(net.engines) == 1
    net(x).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("function", [compare, diagnose, plan])
def test_a_prepared_step_is_no_model(function: Any) -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    step = TrainStep(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)).prepare(x, x)
    with pytest.raises(InputError, match=r"(?s)prepared already, not a model.*compare\(model, x, target=y"):
        function(step, x, x)
