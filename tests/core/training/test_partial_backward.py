"""Outputs without a gradient: what leads to them alone adds nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from nimble_core.utils.errors import InputError
from tests.support.drop_in import Place, assert_same_gradients, pair
from tests.support.training_problems import Nested, Two
from tests.support.training_steps import assert_values


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@settings(max_examples=25)
@given(
    wanted=st.sets(st.sampled_from(["logits", "first", "second", "best"]), min_size=1),
    of_input=st.booleans(),
    rounds=st.integers(1, 3),
)
def test_any_outputs_may_be_used_and_gradients_add_up(wanted: set[str], of_input: bool, rounds: int) -> None:
    """Some outputs of several, inputs with gradients or without, on top of gradients that are there."""
    torch.manual_seed(0)
    model = Nested()
    model.a.bias.requires_grad_(False)
    net, eager = pair(model, torch.randn(6, 8, requires_grad=of_input))
    for _ in range(rounds):
        x = torch.randn(6, 8)
        found = []
        for one in (net, eager):
            given_x = x.clone().requires_grad_(of_input)
            out = one(given_x)
            assert type(out) is Two
            assert out.extra["none"] is None
            assert out.extra["name"] == "two"
            assert not out.extra["best"].requires_grad
            assert not out.extra["pair"][1].requires_grad
            parts = {"logits": out.logits, "first": out.extra["pair"][0], "second": out.extra["pair"][1]}
            used = [parts[name] for name in sorted(wanted & parts.keys())]
            loss = sum((used[at] * (at + 1)).sin().sum() for at in range(len(used))) if used else out.logits.sum()
            if loss.requires_grad:
                loss.backward()
            found.append((out, given_x.grad if given_x.grad is not None else torch.zeros(0)))
        assert_values(found[0], found[1])
        assert_same_gradients(model, eager)
    net.close()


class Turned(nn.Module):
    """Outputs that are views of others' memory, so that gradients come in other strides than were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x).transpose(1, 2), self.b(x), self.a(x).mean((1, 2), keepdim=True).expand(2, 3, 8)


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_may_come_in_any_strides(trained: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, eager = pair(model := Turned(), x := torch.randn(2, 3, 8))
    for one in (net, eager):
        out = one(x)
        sum(F.mse_loss(out[at], torch.zeros(out[at].shape)) for at in trained).backward()
    assert_same_gradients(model, eager)
    net.close()


class Poles(nn.Module):
    """Outputs whose derivatives are infinite where the forward is not, and where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, (h * h).sum(-1).sqrt(), (h * 1000).exp(), F.gelu(h[:2]) @ self.linear.weight


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("kept", [False, True], ids=["once", "retained"])
@pytest.mark.parametrize("used", [(0,), (3,), (0, 3), (1,), (0, 1), (2, 3), (0, 1, 2, 3)])
def test_branches_without_a_gradient_add_nothing(used: tuple[int, ...], kept: bool, on: Place) -> None:
    """A row of zeros: its square root has an infinite derivative, which zeros make NaN of where they are run."""
    model = on(Poles())
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    x = x.clone()
    x[-1] = 0
    for one in (net, eager):
        loss = sum(part.sum() for at, part in enumerate(one(x)) if at in used)
        loss.backward(retain_graph=kept)
        if kept:
            loss.backward()
    mine, theirs = model.linear.weight.grad, eager.linear.weight.grad
    assert theirs.isnan().any() == (not {1, 2}.isdisjoint(used))
    torch.testing.assert_close(mine, theirs, rtol=on.near, atol=on.near, equal_nan=True)
    net.close()


class Adding(torch.autograd.Function):
    """A backward that adds to the gradient, and counts in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, seen)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, seen = ctx.saved_tensors
        seen.add_(gradient.abs().mean(0) + 1)
        return gradient + x.sign(), None


class OwnBackward(nn.Module):
    """Two outputs; the second, or both, through a function of the user's own, or through a hook.

    Args:
        through: "function" or "hook": what adds to the gradient.
        both: whether both outputs come from it.
    """

    def __init__(self, through: str, both: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.full((8,), 7.0))
        self.through, self.both = through, both

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        own = Adding.apply(h, self.seen) if self.through == "function" else h * 1
        if self.through == "hook":
            own.register_hook(lambda gradient: gradient + 1)
        return (own.sin() if self.both else h.sin()), own.cos()


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize(("through", "both"), [("hook", False), ("hook", True), ("function", True)])
def test_backwards_that_add_something_of_their_own(through: str, both: bool, on: Place) -> None:
    model = on(OwnBackward(through, both))
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    for _ in range(2):
        for one in (net, eager):
            one(x)[0].sum().backward()
    assert_same_gradients(model, eager, rtol=on.near)
    torch.testing.assert_close(model.seen, eager.seen)
    net.close()


def test_an_autograd_function_that_only_outputs_without_a_gradient_come_from_is_refused() -> None:
    model = OwnBackward("function", both=False)
    net, eager = pair(model, torch.randn(6, 8))
    x = torch.randn(6, 8)
    with pytest.raises(InputError, match="no gradient came for output 1, which an autograd function") as refused:
        net(x)[0].sum().backward()
    assert "detach outputs" in refused.value.fix
    assert all(one.grad is None for one in model.parameters())
    for one in (net, eager):
        sum(part.sum() for part in one(x)).backward()
    assert_same_gradients(model, eager)
    net.close()


class TwoSided(torch.autograd.Function):
    """Two outputs, whose backward makes something of a gradient that is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + (3 * second + 1)


def test_a_function_of_which_one_output_alone_gets_a_gradient_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return TwoSided.apply(self.linear(x))  # type: ignore[no-untyped-call]

    net, eager = pair(Model(), torch.randn(6, 8))
    x = torch.randn(6, 8)
    with pytest.raises(InputError, match="no gradient came for output 1, which an autograd function"):
        net(x)[0].sum().backward()
    for one in (net, eager):
        sum(part.sin().sum() for part in one(x)).backward()
    assert_same_gradients(net, eager)
    net.close()


def test_branches_that_run_call_by_call_are_told_of_once() -> None:
    net, _ = pair(Poles(), torch.randn(6, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            net(torch.randn(6, 8))[0].sum().backward()
        net(torch.randn(6, 8))[0].sum().backward()
    assert ["output 1, 2, 3" in str(one.message) for one in told] == [True]
    net.close()


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_hook_of_a_parameter_that_no_gradient_reaches_is_refused(used: tuple[int, ...]) -> None:
    net, eager = pair(Nested(), torch.randn(6, 8))
    for model in (net, eager):
        for name in ("body.weight", "b.bias"):
            model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)
    x = torch.randn(6, 8)
    losses = []
    for model in (net, eager):
        out = model(x)
        losses.append(sum((out.logits, out.extra["pair"][0])[at].sin().sum() for at in used))
    if used == (0,):
        with pytest.raises(InputError, match=r"b\.bias, which only leads there, has a hook"):
            losses[0].backward()
        assert all(one.grad is None for one in net.parameters())
    else:
        for loss in losses:
            loss.backward()
        assert_same_gradients(net, eager, rtol=1e-6)
    net.close()
