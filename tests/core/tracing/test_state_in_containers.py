"""What modules keep in containers and objects is put back after preparing; what steps carry there is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, NimbleWarning, NotStaticError, Options, TrainStep

OPTIONS = Options(fuse="none", tune="off")


Place = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any, Any], Any], str]


def at(*keys: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    def inner(state: Any) -> Any:
        for key in keys[:-1]:
            state = state[key]
        return state

    return lambda net: inner(net.state)[keys[-1]], lambda net, new: inner(net.state).__setitem__(keys[-1], new)


def attribute(*names: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    def inner(state: Any) -> Any:
        for name in names[:-1]:
            state = getattr(state, name)
        return state

    return lambda net: getattr(inner(net.state), names[-1]), lambda net, new: setattr(inner(net.state), names[-1], new)


def whole(net: Any, new: Any) -> None:
    net.state = (new, 1)


PLACES: dict[str, Place] = {
    "attribute": (lambda v: v, lambda net: net.state, lambda net, new: setattr(net, "state", new), "state"),
    "dict": (lambda v: {"v": v}, *at("v"), "state['v']"),
    "list": (lambda v: [0, v], *at(1), "state[1]"),
    "tuple": (lambda v: (v, 1), at(0)[0], whole, "state[0]"),
    "deque": (lambda v: deque([v]), *at(0), "state[0]"),
    "shifted": (
        lambda v: deque([v, v + 1], maxlen=2),
        at(0)[0],
        lambda net, new: net.state.append(new),
        "state[0]",
    ),
    "in a tuple": (lambda v: ([v],), *at(0, 0), "state[0][0]"),
    "object": (lambda v: SimpleNamespace(v=v), *attribute("v"), "state.v"),
}


class Keeping(nn.Module):
    """Keeps an average in one of the places, and replaces it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        make, self.get, self.put, self.named = PLACES[place]
        self.linear = nn.Linear(4, 4)
        self.state = make(torch.zeros(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.put(self, 0.9 * self.get(self) + y.detach().mean(0))
        if self.fails:
            raise ArithmeticError
        return y * (1 + self.get(self))


def trained(net: nn.Module) -> TrainStep:
    return TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), options=OPTIONS)


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_the_next_step_reads_elsewhere_is_refused_with_its_place(place: str) -> None:
    net, x = nn.Sequential(Keeping(place)), torch.randn(3, 4)
    before, state, named = net[0].get(net[0]), net[0].state, net[0].named
    for prepare in (
        lambda: trained(net).prepare(x, x),
        lambda: Nimble(net, OPTIONS).prepare(x, training=True),
    ):
        with pytest.raises(NotStaticError) as caught:
            prepare()
        text = str(caught.value)
        assert f"0.{named} is read and then replaced" in text
        assert f"self.{named}.copy_(...)" in text
        assert "test_state_in_containers.py" in caught.value.where
    assert net[0].get(net[0]) is before
    assert net[0].state is state


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fails", [False, True])
def test_preparing_leaves_what_modules_keep_as_it_was(place: str, fails: bool) -> None:
    net, x = Keeping(place).eval(), torch.randn(3, 4)
    before, state, net.fails = net.get(net), net.state, fails
    if fails:
        with pytest.raises(ArithmeticError):
            Nimble(net, OPTIONS).prepare(x)
    else:
        with pytest.warns(NimbleWarning) as given:
            Nimble(net, OPTIONS).prepare(x).close()
        assert any(f"{net.named} is read and then replaced" in str(one.message) for one in given)
    assert net.state is state
    assert net.get(net) is before
    assert torch.equal(before, torch.zeros(4))
