"""Eager training to compare with: step by step, everything that it changes, and the two side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import flatten
from tests.support.training_problems import OPTIMIZERS, Problem, made, twin

QUICK = Options(tune="off", policy="single")
ROUNDED = 1e-5
"""Relative: Adam's learning rate is a float32 tensor in a captured step, a double in eager."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Give each test the same random numbers, on one thread: tensors this small gain nothing from more threads."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Eager:
    """Eager training of a copy of ``model``, step by step as a user writes it."""

    def __init__(
        self,
        given: Problem,
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> None:
        self.model, self.loss_fn = twin(given.model), given.loss_fn
        self.optimizer = optimizer(self.model.parameters())
        self.autocast, self.scaler, self.clip, self.accumulate = autocast, scaler, clip, accumulate
        self.done = 0
        self.output: Any = None
        self.gradients: dict[str, torch.Tensor] = {}

    def __call__(self, inputs: Any, targets: Any) -> torch.Tensor:
        if self.done % self.accumulate == 0:
            self.optimizer.zero_grad()
        kind = next(self.model.parameters()).device.type
        casting = torch.autocast(kind, dtype=self.autocast) if self.autocast else nullcontext()
        with casting:
            if isinstance(inputs, dict):
                self.output = self.model(**inputs)
            else:
                self.output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
            loss = self.loss_fn(self.output) if targets is None else self.loss_fn(self.output, targets)
        share = loss / self.accumulate if self.accumulate > 1 else loss
        (self.scaler.scale(share) if self.scaler else share).backward()
        self.done += 1
        if self.done % self.accumulate == 0:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        self.gradients = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
        return loss.detach()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> list[Any]:
    """Everything that training changes: names, and the tensors or numbers behind them."""
    kept: list[Any] = [(name, one) for name, one in model.state_dict().items()]
    if optimizer is not None:
        saved = optimizer.state_dict()
        for index, entry in sorted(saved["state"].items()):
            kept += [(f"{index} {key}", value) for key, value in sorted(entry.items())]
        kept += [(f"lr {at}", float(group["lr"])) for at, group in enumerate(saved["param_groups"])]
    if scaler is not None:
        kept += sorted(scaler.state_dict().items())
    return kept


def assert_same(a: Sequence[tuple[str, Any]], b: Sequence[tuple[str, Any]], *, rtol: float = 0.0) -> None:
    """Assert the same names with the same values; bit for bit if ``rtol`` is 0."""
    assert [name for name, _ in a] == [name for name, _ in b]
    for (name, mine), (_, theirs) in zip(a, b, strict=True):
        if isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor):
            mine, theirs = torch.as_tensor(mine), torch.as_tensor(theirs)
            mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
            assert mine.shape == theirs.shape, name
            torch.testing.assert_close(
                mine, theirs, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert mine == pytest.approx(theirs, rel=rtol or None, abs=rtol or None), name


def assert_values(a: Any, b: Any, *, rtol: float = 0.0) -> None:
    """Equal tensors in equal structures."""
    (mine, _), (theirs, _) = flatten(a), flatten(b)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=rtol, atol=rtol, equal_nan=True)


def both(
    name: str,
    optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["momentum"],
    *,
    options: Options = QUICK,
    autocast: torch.dtype | None = None,
    scaler: Callable[[], torch.amp.GradScaler] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    device: str = "cpu",
) -> tuple[Problem, TrainStep, Eager]:
    """Make a problem with a prepared step and its eager twin."""
    given = made(name, device)
    scalers = (scaler(), scaler()) if scaler else (None, None)
    eager = Eager(given, optimizer, autocast=autocast, scaler=scalers[0], clip=clip, accumulate=accumulate)
    step = TrainStep(
        given.model,
        given.loss_fn,
        optimizer(given.model.parameters()),
        options=options,
        autocast=autocast,
        scaler=scalers[1],
        clip_grad_norm=clip,
        accumulate=accumulate,
    ).prepare(*given.draw())
    return given, step, eager


def train_both(given: Problem, step: TrainStep, eager: Eager, count: int = 4, *, rtol: float = 0.0) -> None:
    """Train both on the same data and random numbers; compare after each step."""
    for seed in range(count):
        inputs, targets = given.draw()
        theirs = copy.deepcopy((inputs, targets))
        torch.manual_seed(seed)
        loss = step(inputs, targets)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = eager(*theirs)
        assert torch.equal(after, torch.get_rng_state())
        assert_values(loss, expected, rtol=rtol)
        assert_values(step.outputs, eager.output, rtol=rtol)
        assert step.gradients.keys() == eager.gradients.keys()
        assert_values(step.gradients, {name: eager.gradients[name] for name in step.gradients}, rtol=rtol)
        assert_same(
            state_of(given.model, step.optimizer, step.scaler),
            state_of(eager.model, eager.optimizer, eager.scaler),
            rtol=rtol,
        )


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> list[Any]:
    """State, gradients, random state, by value; identities of the tensors."""
    held = [*model.parameters(), *model.buffers()]
    return [
        copy.deepcopy(state_of(model, optimizer, scaler)),
        [None if one.grad is None else (id(one.grad), one.grad.clone()) for one in model.parameters()],
        torch.get_rng_state(),
        [(id(one), one.data_ptr(), one.requires_grad, one._version) for one in held],
        [(key, value) for group in optimizer.param_groups for key, value in group.items() if key != "params"],
        model.training,
    ]


def assert_untouched(before: list[Any], after: list[Any]) -> None:
    assert_same(before[0], after[0])
    for a, b in zip(before[1], after[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a[0] == b[0]
            assert torch.equal(a[1], b[1])
    assert torch.equal(before[2], after[2])
    assert before[3:] == after[3:]


def scaler_on_host() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def prepare(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Prepare a whole step, or the module alone."""
    if way == "step":
        TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    else:
        Nimble(model, QUICK).prepare(x, training=True)
