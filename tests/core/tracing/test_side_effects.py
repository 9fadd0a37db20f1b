"""Runs leave no trace; and what autograd refuses is said with its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nimble_core import CaptureError, Nimble, Options, TrainStep
from nimble_core.tracing.side_effects import run_preserved
from nimble_viz import compare

QUICK = Options(tune="off")
GENERATORS = torch.Generator(), torch.Generator()

PREPARES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "inference": lambda model, x: Nimble(model, QUICK).prepare(x),
    "in place of the model": lambda model, x: Nimble(model, QUICK).prepare(x, training=True),
    "measured": lambda model, x: Nimble(model, Options(budget_s=0.2)).prepare(x, training=True),
    "whole step": lambda model, x: TrainStep(
        model, torch.Tensor.sum, torch.optim.SGD(model.parameters(), lr=0.0), options=QUICK
    ).prepare(x),
}

# -- values, versions, memory and generators are put back ----------------------------------------------------------


class Model(nn.Module):
    """Does something to its state and its input, and fails if it is told to."""

    def __init__(self, change: Callable[[Any, torch.Tensor], object], error: Exception | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("last", torch.zeros(3))
        self.change, self.error = change, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        if self.error:
            raise self.error
        return x * self.weight


OUTSIDE = torch.ones(3)


def other_memory(net: Any, x: torch.Tensor) -> None:
    net.weight.data = net.weight.sign()
    net.last.data = x * net.weight
    x.data = x.half()


def write_through_numpy(net: Any, x: torch.Tensor) -> None:
    net.weight.detach().numpy()[:] = 2
    x.numpy()[:] = 3


def draw(net: Any, x: torch.Tensor) -> None:
    for one in (*GENERATORS, GENERATORS[0], None):
        torch.rand(3, generator=one)


CHANGES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a buffer": lambda net, x: net.last.add_(1.0),
    "a buffer and an input": lambda net, x: x.copy_(net.last.fill_(2.0)),
    "a view": lambda net, x: x[:2].view(-1).mul_(3.0),
    "an expanded input": lambda net, x: x.expand(2, 3).zero_(),
    "a closure": lambda net, x: x.mul_(OUTSIDE.view(-1).add_(1.0)),
    "other memory": other_memory,
    "through numpy": write_through_numpy,
    "generators": draw,
}


@pytest.mark.parametrize("error", [None, KeyError("its own")], ids=["", "fails"])
@pytest.mark.parametrize("way", CHANGES)
def test_what_a_run_changes_is_put_back(way: str, error: Exception | None) -> None:
    net, x = Model(CHANGES[way], error), torch.randn(3)
    tensors = [net.weight, net.last, x, OUTSIDE]
    kept = [one.detach().clone() for one in tensors]

    def seen() -> list[Any]:
        states = [one.get_state().tolist() for one in (*GENERATORS, torch.default_generator)]
        return [(one.data_ptr(), one.dtype, one._version) for one in tensors] + states

    before = seen()
    with pytest.raises(KeyError) if error else nullcontext():
        run_preserved(net, (x,), {})
    assert seen() == before
    assert all(map(torch.equal, tensors, kept))


@pytest.mark.parametrize("way", PREPARES)
def test_a_backward_of_eager_that_reads_what_the_forward_writes_may_come_after_preparing(way: str) -> None:
    model, x = Model(CHANGES["a buffer"]), torch.randn(3)
    weight = torch.randn(3, requires_grad=True)
    pending = ((model.last + 1) * weight).sum() + (model.last * weight).sum()
    before = [one._version for one in (model.weight, model.last, x)]
    net = PREPARES[way](model, x)
    assert [one._version for one in (model.weight, model.last, x)] == before
    pending.backward()
    assert torch.equal(weight.grad, torch.ones(3))
    net.close()


class Drawing(nn.Module):
    """Draws from generators of its own, each more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = GENERATORS
        noise = torch.rand(4, generator=first) + torch.randn(x.shape, generator=second)
        return self.layer(x) * noise + torch.randn(x.shape).normal_(generator=first)


@pytest.mark.parametrize("way", PREPARES)
def test_generators_of_the_users_own_draw_on_as_in_eager(way: str) -> None:
    model, x = Drawing(), torch.randn(3, 4)
    before = [one.manual_seed(7).get_state() for one in GENERATORS]
    net = PREPARES[way](model, x)
    assert all(map(torch.equal, before, (one.get_state() for one in GENERATORS)))
    state = torch.get_rng_state()
    expected = model(x)
    after = [one.get_state() for one in GENERATORS]
    torch.set_rng_state(state)
    for one, was in zip(GENERATORS, before, strict=True):
        one.set_state(was)
    torch.testing.assert_close(net(x), expected.sum() if way == "whole step" else expected)
    assert all(map(torch.equal, after, (one.get_state() for one in GENERATORS)))
    net.close()


class Forces(nn.Module):
    """The gradient of an energy, as in molecular dynamics; asks its input for a gradient, or a copy of it."""

    def __init__(self, *, on: bool = True, asks: bool = False) -> None:
        super().__init__()
        self.energy, self.on, self.asks = nn.Linear(3, 1), on, asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.on or torch.is_grad_enabled()):
            x = (x if self.asks else x.detach()).requires_grad_()
            return torch.autograd.grad(self.energy(x).tanh().sum(), x)[0]


def test_inputs_require_what_they_did() -> None:
    model, x, options = Forces(asks=True), torch.randn(2, 3), Options(fuse="none", tune="off")
    net = Nimble(model, options).prepare(x)
    assert not x.requires_grad
    compare(model, x, options=options)
    assert not x.requires_grad
    with torch.no_grad():
        found = net(x)
    torch.testing.assert_close(found, model(x))
    assert x.requires_grad, "as the model asks for"
    Nimble(model, options).prepare(x).close()
    assert x.requires_grad
    net.close()


# -- what autograd refuses -----------------------------------------------------------------------------------------


def test_an_input_that_is_written_in_place_is_named_with_its_layer() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="written in place") as caught:
        Nimble(net, QUICK).prepare(x, training=True)
    assert "test_side_effects.py:" in caught.value.where
    assert "inplace=False" in caught.value.fix
    Nimble(net, QUICK).prepare(x.detach(), training=True)  # as the fix says


class Checkpointed(nn.Module):
    def __init__(self, how: Callable[[nn.Module], Callable[..., Any]], reentrant: bool) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how, self.reentrant = how, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.how(self.block), self.stem(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (lambda block: block, "checkpoint of block"),
        (lambda block: lambda x: block(x), "checkpoint of <lambda>, test_side_effects.py:"),
    ],
)
@pytest.mark.parametrize("way", ["in place of the model", "whole step"])
def test_reentrant_checkpoints_are_refused(how: Any, where: str, way: str) -> None:
    with pytest.raises(CaptureError, match="use_reentrant=True runs a backward inside") as caught:
        PREPARES[way](Checkpointed(how, reentrant=True), torch.randn(2, 4))
    assert caught.value.where.startswith(where)
    assert "use_reentrant=False" in caught.value.fix
    PREPARES[way](Checkpointed(how, reentrant=False), torch.randn(2, 4))


def test_models_that_differentiate_are_told_to_switch_gradients_on() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match="the model differentiates in its own forward") as caught:
        Nimble(Forces(on=False), QUICK).prepare(x)
    assert caught.value.where.startswith("the model at tests/core/tracing/test_side_effects.py:")
    assert "torch.enable_grad()" in caught.value.fix
    model = Forces(on=True)
    with torch.no_grad():
        torch.testing.assert_close(Nimble(model, QUICK).prepare(x)(x), model(x))
