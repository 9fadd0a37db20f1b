"""What a whole step refuses, and how it says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.tracing.provenance import label_of
from nimble_core.utils.errors import CaptureError, InputError, NimbleError
from tests.support.training_problems import OPTIMIZERS, Problem, Recomputed, perceptron, vectors
from tests.support.training_steps import assert_same, assert_untouched, both, everything, one_thread, state_of

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")


def test_recomputing_what_draws_numbers_is_refused() -> None:
    """The state that is set back for it is no call: what is recomputed would draw other masks."""
    given = Problem(Recomputed(0.5), F.cross_entropy, vectors)
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK)
    with pytest.raises(CaptureError, match="draws random numbers in the backward"):
        step.prepare(*given.draw())


def test_a_loss_of_a_target_needs_one() -> None:
    model = nn.Linear(4, 4)
    step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"mse_loss cannot be called with the model's output alone.*target") as caught:
        step.prepare(torch.randn(2, 4))
    assert "prepare(inputs, targets)" in caught.value.fix


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"model": torch.relu}, "not a torch.nn.Module"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"loss_fn": 3}, "loss_fn is a int"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss(.|\n)*loss_fn=MSELoss\(\)"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_grad_norm": 0.0}, "not positive"),
        ({"options": "fast"}, "not an Options"),
        ({"autocast": torch.float64}, "no type to compute in"),
        ({"autocast": True}, "no type to compute in"),
        ({"scaler": 2.0}, "scaler is a float"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_bad_arguments(bad: dict[str, Any], match: str) -> None:
    model = perceptron()
    good = {"model": model, "loss_fn": F.cross_entropy, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(InputError, match=match):
        TrainStep(**{**good, **bad})


def _by_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(*vectors())


def _by_drop_in(model: nn.Module) -> None:
    Nimble(model, QUICK).prepare(vectors()[0], training=True)


WAYS = {"step": _by_step, "drop-in": _by_drop_in}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_prepared_to_train_is_so_outside_of_modes_without_a_backward(way: str) -> None:
    """Said by name; the step refuses ``inference_mode`` when it is made, before it has tensors of that mode."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = copy.deepcopy(state_of(model))
    with torch.inference_mode(), pytest.raises(InputError, match=r"torch\.inference_mode is on"):
        WAYS[way](model)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(InputError, match=r"torch\.autograd\.detect_anomaly is on") as refused,
    ):
        WAYS[way](model)
    assert "check_nan=False" in refused.value.fix
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=False):
        WAYS[way](model)
    assert_same(before, state_of(model))


def test_a_step_calls_its_data_inputs_and_targets() -> None:
    given, step, _ = both("keywords")
    inputs, targets = given.draw()
    engine = step.engine
    assert engine is not None
    program = engine.recorded.recording.program
    names = [program.storages[ref.storage].name for ref in program.inputs]
    assert names == [f"{of}[{name!r}]" for of, one in (("inputs", inputs), ("targets", targets)) for name in one]
    step.close()

    model = perceptron()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), options=QUICK)
    x, y = vectors()
    with pytest.raises(InputError, match="inputs is on cpu, targets on meta"):
        step.prepare(x, y.to("meta"))
    step.prepare(x, y)
    for bad, words in (
        ((x[:2], y), "inputs: expected"),
        ((x, y.double()), "targets: expected"),
        ((x, None), "targets:"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            step(*bad)
        assert refused.value.where == f"prepared: {step.engine.signature}"  # type: ignore[union-attr]
        assert "args" not in str(refused.value)
    step.close()


def _reading(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, target) * out.mean().item()  # read in the loss


class _ReadsBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * gradients[0].sum().item()  # read in the backward


class _Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ReadsBehind.apply(self.head(x))  # type: ignore[no-untyped-call,no-any-return]


class _Ahead(_Behind):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * x.mean().item()  # read in the forward


def _line(marked: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{label_of(__file__)}:{next(at for at, line in enumerate(lines, 1) if line.endswith('# ' + marked))}"


@pytest.mark.parametrize(
    ("model", "loss_fn", "where", "marked"),
    [
        (perceptron, _reading, "in the loss at", "read in the loss"),
        (_Behind, F.cross_entropy, "in the backward at", "read in the backward"),
        (_Ahead, F.cross_entropy, "in the model at", "read in the forward"),
    ],
    ids=lambda one: one if isinstance(one, str) and one.count(" ") > 1 and not one.startswith("in ") else "",
)
def test_a_refusal_says_which_part_of_the_step_it_is_about(
    model: Callable[[], nn.Module], loss_fn: Any, where: str, marked: str
) -> None:
    net = model()
    with pytest.raises(NimbleError) as refused:
        TrainStep(
            net,
            loss_fn,
            torch.optim.SGD(net.parameters(), lr=0.1),
            options=QUICK,
        ).prepare(*vectors())
    assert refused.value.where.endswith(f"{where} {_line(marked)}".strip())


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (lambda out: out, "shape"),
        (lambda out: out.detach().sum(), "no gradient"),
        (lambda out: 0.5, "float"),
        (lambda out: None, "NoneType"),
        (lambda out: torch.complex(out.sum(), out.mean()), r"complex \(torch.complex64\)"),
    ],
    ids=["a vector", "detached", "a number", "nothing", "complex"],
)
def test_a_loss_that_cannot_be_differentiated(loss_fn: Callable[..., Any], match: str) -> None:
    model = perceptron()
    optimizer, x = OPTIMIZERS["momentum"](model.parameters()), vectors()[0]
    before = everything(model, optimizer)
    with pytest.raises(InputError, match=match):
        TrainStep(model, loss_fn, optimizer, options=QUICK).prepare(x)
    assert_untouched(before, everything(model, optimizer))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="would train nothing"):
        TrainStep(perceptron(), F.cross_entropy, torch.optim.SGD(perceptron().parameters(), lr=0.1))
    loss = nn.Sequential(nn.Linear(4, 1))
    TrainStep(perceptron(), loss, torch.optim.SGD(loss.parameters(), lr=0.1))  # a loss may have parameters


class Summed(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * F.cross_entropy(output, target)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(
    "name", ["4.weight", "0.weight", "loss_fn.scale"], ids=["trained", "not trained", "of the loss"]
)
def test_hooks_of_parameters_are_refused_whenever_they_come(name: str, kind: str) -> None:
    model, loss_fn = perceptron(), Summed()
    hooked = {**dict(model.named_parameters()), "loss_fn.scale": loss_fn.scale}[name]
    x, y = vectors()
    step = TrainStep(model, loss_fn, OPTIMIZERS["momentum"](model[4].parameters()), options=QUICK)
    handle = getattr(hooked, kind)(lambda *given: None)
    with pytest.raises(InputError, match=f"^{name} has a hook") as error:
        step.prepare(x, y)
    assert "prepare(x, training=True)" in error.value.fix
    handle.remove()
    step.prepare(x, y)
    step(x, y)
    nn.Linear(2, 2).register_forward_hook(lambda *given: None)  # of somebody else
    step(x, y)
    before = copy.deepcopy(state_of(model))
    handle = getattr(hooked, kind)(lambda *given: None)
    for _ in range(2):
        with pytest.raises(InputError, match=f"^{name} has a hook"):
            step(x, y)
    assert_same(state_of(model), before)
    handle.remove()
    step(x, y)
    step.close()


def test_hooks_of_inputs_are_refused() -> None:
    """Inputs that require a gradient may come; in eager their hooks would be called."""

    def given(hooked: bool) -> Any:
        x = torch.randn(6, 8, requires_grad=True)
        if hooked:
            x.register_hook(lambda gradient: None)
        return {"input": x}

    model, (_, y) = perceptron(), vectors()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=QUICK)
    with pytest.raises(InputError, match=r"^inputs\['input'\] has a hook"):
        step.prepare(given(hooked=True), y)
    step.prepare(given(hooked=False), y)
    step(given(hooked=False), y)
    before = copy.deepcopy(state_of(model))
    with pytest.raises(InputError, match=r"^inputs\['input'\] has a hook"):
        step(given(hooked=True), y)
    assert_same(state_of(model), before)
    step.close()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with pytest.raises(InputError, match="a gradient is sparse"):
        step.prepare(torch.randint(0, 10, (3,)), torch.randn(3, 1))
