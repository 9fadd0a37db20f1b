"""Mistakes in a call are refused with what to write instead; models that take such inputs go on taking them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nimble_core import Nimble, Options, TrainStep
from nimble_core.utils.errors import InputError
from nimble_viz import compare

OPTIONS = Options(fuse="none", tune="off")
MODEL = torch.nn.Linear(4, 4).eval()
X = torch.ones(2, 4)


def shows(x: Any) -> torch.Tensor:
    return x.shape[0] * torch.ones(1)


class Loose(torch.nn.Module):
    """Takes any keywords, as Hugging Face's models do."""

    def forward(self, x: torch.Tensor, strict: bool = True, **more: Any) -> torch.Tensor:
        return x + strict


class TwoInputs(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Batch(torch.nn.Module):
    """Takes its inputs as one dict, which it misspells."""

    def __init__(self, misspelt: bool) -> None:
        super().__init__()
        self.layer, self.misspelt = torch.nn.Linear(4, 4), misspelt

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch["x"])
        return found.reshpe(8) if self.misspelt else found  # type: ignore[attr-defined, no-any-return]  # its slip


def stepped(model: torch.nn.Module) -> TrainStep:
    return TrainStep(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), options=OPTIONS)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a tuple": (lambda: compare(MODEL, (X,), options=OPTIONS), r"separately: .*compare\(model, \*inputs\)"),
    "a list, asked for an attribute": (lambda: Nimble(shows, OPTIONS).prepare([X]), "separately"),
    "a dict": (lambda: Nimble(MODEL, OPTIONS).prepare({"input": X}), r"by name: prepare\(\*\*inputs\)"),
    "a dict that a step takes apart": (lambda: stepped(Batch(False)).prepare({"x": X}, X), r"prepare\(\(x,\), y\)"),
    "another batch, to train": (
        lambda: Nimble(torch.nn.Linear(4, 4), OPTIONS).prepare(X, training=True)(X[:1]),
        r"prepare\(\.\.\., training=True\)",
    ),
    "an array to compare": (lambda: compare(MODEL, X.numpy()), r"torch\.from_numpy\(x\)"),
    "an array later": (lambda: Nimble(MODEL, OPTIONS).prepare(X)(X.numpy()), r"torch\.from_numpy\(x\)"),
    "an input less": (lambda: Nimble(TwoInputs(), OPTIONS).prepare(X), "an example of each input"),
    "no inputs": (lambda: Nimble(MODEL, OPTIONS).prepare(X)(), r"net\(x\)"),
    "an option that is swallowed": (lambda: Nimble(Loose()).prepare(X, max_stream=1), r"Options\(max_streams="),
    "an option of Nimble": (lambda: Nimble(MODEL, max_stream=1), r"Nimble\(model, Options\(max_streams="),  # type: ignore[arg-type]
    "a keyword of nothing": (lambda: Nimble(MODEL, x=X), r"prepare\(\*inputs\)"),  # type: ignore[arg-type]
    "inputs as options": (lambda: Nimble(MODEL, X), r"prepare\(\*inputs\)"),  # type: ignore[arg-type]
    "an option of compare": (lambda: compare(MODEL, X, max_stream=1), r"options=Options\(max_streams="),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_hint_mends_it(name: str) -> None:
    make, fix = MISTAKES[name]
    with pytest.raises(InputError) as caught:
        make()
    assert re.search(fix, caught.value.fix), caught.value.fix


def test_models_that_take_these_go_on_taking_them() -> None:
    lists = Nimble(lambda xs, scale: xs[0] * scale["by"], OPTIONS).prepare([X], {"by": X.clone()})
    assert torch.equal(lists([X * 2], {"by": X * 3}), X * 6)
    named = Nimble(Loose(), OPTIONS).prepare(X, strict=False, colour="red")
    assert torch.equal(named(X, strict=False, colour="red"), X)


@pytest.mark.parametrize(
    "make", [lambda: Nimble(Batch(True)).prepare({"x": X}), lambda: compare(Batch(True), {"x": X})]
)
def test_a_slip_in_the_model_is_not_blamed_on_its_inputs(make: Callable[[], object]) -> None:
    with pytest.raises(AttributeError, match="reshpe"):
        make()


def test_a_dict_in_a_tuple_reaches_the_model_of_a_step() -> None:
    step = stepped(Batch(False)).prepare(({"x": X},), X)
    assert float(step(({"x": X},), X)) > 0


def test_errors_of_the_model_itself_pass() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        Nimble(broken, OPTIONS).prepare(X)
