"""Drop-in training: hooks that no gradient reaches, what a backward adds by itself, and gradients sought at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from nimble_core import Nimble, Options
from nimble_core.training import autograd_hooks
from nimble_core.utils.errors import InputError
from tests.core.api.test_train_step import one_thread

__all__ = ["one_thread"]  # a fixture

QUICK = Options(fuse="none", tune="off", policy="single")


class Heads(nn.Module):
    """Two layers of one input, an output each."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def hooks_of(one: torch.Tensor) -> list[Callable[..., Any]]:
    return list((one._backward_hooks or {}).values())


def nothing(gradient: torch.Tensor) -> None:
    assert gradient is not None


# -- hooks where no gradient comes -------------------------------------------------------------------------------------


def test_hooks_are_put_back_after_several_replays_in_one_backward() -> None:
    model, x = Heads(), torch.randn(3, 4)
    model.b.weight.register_hook(nothing)
    net = Nimble(model, QUICK).prepare(x, training=True)
    for _ in range(3):
        (net(x)[0].sum() + net(2 * x)[0].sum()).backward()
        assert hooks_of(model.b.weight) == [nothing]
    net(x)[1].sum().backward()
    assert model.b.weight.grad is not None
    net.close()


def test_hooks_are_put_back_where_another_hook_fails() -> None:
    model, x = Heads(), torch.randn(3, 4)
    model.b.weight.register_hook(nothing)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("mine")

    failing = model.a.weight.register_hook(fail)
    net = Nimble(model, QUICK).prepare(x, training=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            net(x)[0].sum().backward()
        assert hooks_of(model.b.weight) == [nothing]
    failing.remove()
    net(x)[0].sum().backward()
    assert hooks_of(model.b.weight) == [nothing]
    net.close()


def test_a_hook_is_spared_until_the_last_of_several_backwards_has_ended() -> None:
    """The inner one, of the same parameters, ends before the outer one hands None on."""
    model, x = Heads(), torch.randn(3, 4)
    model.b.weight.register_hook(nothing)
    net = Nimble(model, QUICK).prepare(x, training=True)
    seen: list[bool] = []

    def within(gradient: torch.Tensor) -> None:
        if not seen:
            seen.append(True)
            with torch.enable_grad():
                net(x)[0].sum().backward()

    model.a.weight.register_hook(within)
    net(x)[0].sum().backward()
    assert seen
    assert hooks_of(model.b.weight) == [nothing]
    net.close()


class Gate(torch.autograd.Function):
    """Nothing, but for what its backward does first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: Callable[[], None]) -> torch.Tensor:
        ctx.first = first
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.first()
        return gradient, None


def test_a_hook_is_spared_on_one_thread_after_a_backward_on_another_has_ended() -> None:
    model, x = Heads(), torch.randn(3, 4)
    model.b.weight.register_hook(nothing)
    net = Nimble(model, QUICK).prepare(x, training=True)
    begun, ended, passed = threading.Event(), threading.Event(), []

    def run(between: Callable[[], None]) -> None:
        """One replay, ``between``, and another one: hooks are called after both."""
        (Gate.apply(net(x)[0], between).sum() + net(x)[0].sum()).backward()
        passed.append(between)

    def other() -> None:
        begun.set()
        assert ended.wait(60)

    thread = threading.Thread(target=run, args=(other,))

    def this() -> None:
        thread.start()
        assert begun.wait(60)

    run(this)
    ended.set()
    thread.join()
    assert passed == [this, other]
    assert hooks_of(model.b.weight) == [nothing]
    net.close()


def test_a_hook_that_is_removed_in_the_backward_stays_removed() -> None:
    model, x = Heads(), torch.randn(3, 4)
    handle = model.b.weight.register_hook(nothing)
    model.a.weight.register_hook(lambda gradient: handle.remove())
    net = Nimble(model, QUICK).prepare(x, training=True)
    net(x)[0].sum().backward()
    assert not hooks_of(model.b.weight)
    net.close()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("over", ["both", "second", "second and elsewhere"])
def test_hooks_of_several_parameters_are_called_as_in_eager(used: tuple[int, ...], mode: Any, over: str) -> None:
    model, x = Heads(), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    other = nn.Parameter(torch.ones(4))
    hooked = [*(model if over == "both" else model.b).parameters(), other]
    seen: list[list[int]] = []

    def count(gradients: Any) -> None:
        seen.append([at for at, one in enumerate(gradients) if one is not None] if mode == "all" else [])

    register_multi_grad_hook(hooked, count, mode=mode)
    for _ in range(2):
        told = []
        for one in (net, model):
            seen.clear()
            outputs = one(x)
            more = other.sum() if over.endswith("elsewhere") else 0
            (sum(outputs[at].sum() for at in used) + more).backward()
            told.append(list(seen))
        assert told[0] == told[1]
        assert len(told[0]) == (over != "second" or 1 in used)
    net.close()


# -- what a backward adds by itself ------------------------------------------------------------------------------------


class Signs(torch.autograd.Function):
    """A penalty in the backward, which is nothing while a weight is zero."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return gradient + 0.1 * weight.sign()


class Penalized(nn.Module):
    """One output, or both, through the penalty."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.both = both

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = Signs.apply(self.w)
        return x * (own if self.both else self.w), x * self.v + own


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
def test_a_branch_that_adds_nothing_at_first_adds_nothing_later() -> None:
    model, x = Penalized(both=False), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    for value in (0.0, 1.0):
        model.w.data.fill_(value)
        model.zero_grad()
        net(x)[0].sum().backward()
        assert model.w.grad is not None
        torch.testing.assert_close(model.w.grad, x.sum(0))
    net.close()


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
def test_what_a_backward_comes_to_add_by_itself_is_refused_then() -> None:
    model, x = Penalized(both=True), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    net(x)[0].sum().backward()
    assert model.w.grad is not None
    torch.testing.assert_close(model.w.grad, x.sum(0))
    model.w.data.fill_(1.0)
    model.zero_grad()
    with pytest.raises(InputError, match="no gradient came for output 1, and this backward adds something of its own"):
        net(x)[0].sum().backward()
    assert model.w.grad is None
    model.w.data.fill_(0.0)
    net(x)[0].sum().backward()
    torch.testing.assert_close(model.w.grad, x.sum(0))
    net.close()


def test_judging_draws_no_random_numbers_and_looks_once_where_values_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Heads(), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    half = net.engines[0].backward
    assert half is not None
    looked: list[Any] = []
    adds = type(half)._adds
    monkeypatch.setattr(type(half), "_adds", lambda *args: looked.append(args) or adds(*args))
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            net(x)[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(looked) == 1
    net.close()


# -- gradients of some tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_parameter_that_is_sought_twice_gets_its_gradient_once(accumulated: bool) -> None:
    model, x = Heads(), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    weight, found = model.a.weight, []
    for one in (net, model):
        weight.grad = torch.ones_like(weight) if accumulated else None
        one(x)[0].sum().backward(inputs=[weight, model.a.bias, weight])
        found.append(weight.grad)
    torch.testing.assert_close(*found)
    net.close()


def test_gradients_that_are_sought_are_added_while_no_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    add = autograd_hooks._accumulate

    def seen(*given: Any) -> None:
        held.append(autograd_hooks.ACCUMULATING._is_owned())
        add(*given)

    monkeypatch.setattr(autograd_hooks, "_accumulate", seen)
    model, x = Heads(), torch.randn(3, 4)
    net = Nimble(model, QUICK).prepare(x, training=True)
    net(x)[0].sum().backward(inputs=[model.a.weight, model.a.bias])
    assert held == [True, True]
    net.close()


def test_gradients_that_are_sought_on_several_threads_add_up() -> None:
    model, x = nn.Linear(512, 512), torch.ones(2, 512)
    net = Nimble(model, QUICK).prepare(x, training=True)
    rounds = 50
    for _ in range(4):
        net.zero_grad()

        def work() -> None:
            for _ in range(rounds):
                net(x).sum().backward(inputs=[model.weight])

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.full((512, 512), 2.0 * 2 * rounds))
    net.close()
