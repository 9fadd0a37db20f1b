"""Attributes and tensors that a run replaces, in containers too: noted, refused in training, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from nimble_core import Nimble, NimbleWarning, NotStaticError, Options, TrainStep
from tests.support.recordings import owned, recorded, reissued, same


class Binary(nn.Module):
    """As in binary networks: what it multiplies by is put in the weight's place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.kept.sign()
        self.last.data = x * self.weight
        return self.last + 1


@pytest.mark.parametrize("error", [None, KeyError("the model's own")])
def test_memory_given_to_the_models_own_tensors_is_put_back_and_noted(error: Exception | None) -> None:
    model, x = Binary(), torch.randn(3)
    before, was = [tensor.detach() for tensor in owned(model)], [tensor.detach().clone() for tensor in owned(model)]
    right = x * 2 * model.kept.sign() + 1

    def fails(*args: Any) -> None:
        if error:
            raise error

    model.register_forward_hook(fails)
    with pytest.raises(KeyError) if error else nullcontext():
        recording = recorded(model, x)
    assert all(now.is_set_to(then) for now, then in zip(owned(model), before, strict=True))
    assert same(owned(model), was)
    if not error:
        assert recording.changed == ("weight.data", "last.data")
        assert same(reissued(recording, [x * 2]), [right])
        assert same(owned(model), was)


class Replacing(nn.Module):
    """Replaces a buffer and a plain tensor, as ``replace`` does."""

    def __init__(self, replace: Callable[[Replacing, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.state = torch.zeros(4)
        self.replace = replace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.replace(self, y.detach().mean(0))
        return y + self.average + self.state


def swap(net: Replacing, new: torch.Tensor) -> None:
    net.average, net.other = net.other + new, net.average * 2


def flatten_weights(net: Replacing, new: torch.Tensor) -> None:
    """As cuDNN's recurrent layers do: one piece of memory for several tensors."""
    flat = torch.empty(8)
    for at, one in enumerate((net.average, net.other)):
        part = flat[4 * at : 4 * at + 4]
        part.copy_(one)
        one.data = part


CARRIED: dict[str, tuple[Callable[[Replacing, torch.Tensor], object], str]] = {
    "another": (lambda net, new: setattr(net, "average", net.average * 0.9 + new), "buffer average"),
    "other memory": (lambda net, new: setattr(net.average, "data", net.average * 0.9 + new), "buffer average"),
    "exchanged": (swap, "buffer average"),
    "reset to another": (
        lambda net, new: (net.average + new, setattr(net, "average", torch.ones_like(new))),
        "buffer average",
    ),
    "plain": (lambda net, new: setattr(net, "state", net.state * 0.9 + new), "attribute state"),
    "from numpy": (
        lambda net, new: setattr(net, "average", net.average * torch.from_numpy(net.other.numpy())),
        "buffer average",
    ),
}


NOT_CARRIED: dict[str, tuple[Callable[[Replacing, torch.Tensor], object], str]] = {
    "in place": (lambda net, new: net.average.mul_(0.9).add_(new), ""),
    "never read": (lambda net, new: setattr(net, "average", new), "average"),
    "converted": (lambda net, new: setattr(net, "average", net.average.double()), "average"),
    "moved together": (flatten_weights, "average.data, other.data"),
    "first made": (lambda net, new: setattr(net, "later", new), "later"),
    "reset": (lambda net, new: (net.average + new, setattr(net, "average", torch.zeros_like(new))), "average"),
    "made again": (lambda net, new: (net.average + new, setattr(net, "average", torch.zeros(4))), "average"),
}


@pytest.mark.parametrize("way", CARRIED)
def test_what_the_next_run_reads_elsewhere_is_refused(way: str) -> None:
    replace, named = CARRIED[way]
    net, x = Replacing(replace), torch.randn(3, 4)
    said, fix = f"{named} is read and then replaced", f"self.{named.split()[1]}.copy_(...)"
    before = [net.average, net.other, net.state, net.average.data_ptr()]
    step = TrainStep(net, torch.Tensor.sum, torch.optim.SGD(net.parameters(), lr=0.1), options=Options(tune="off"))
    for prepare in (
        lambda: Nimble(net, Options(tune="off")).prepare(x),
        lambda: Nimble(net, Options(tune="off")).prepare(x, training=True),
        lambda: step.prepare(x),
    ):
        with pytest.raises(NotStaticError, match=said) as caught:
            prepare()
        assert "test_run_effects.py" in caught.value.where
        assert fix in caught.value.fix
    assert all(map(is_, before[:3], [net.average, net.other, net.state]))
    assert net.average.data_ptr() == before[3]


class Averaging(nn.Module):
    """Keeps state between runs, from its first one on."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap, self.state = nn.Linear(4, 4), wrap, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        average = y if self.state is None else (y + (self.state if torch.is_tensor(self.state) else self.state[0])) / 2
        self.state = self.wrap(average.detach())
        return average


@pytest.mark.parametrize("warm", [False, True], ids=["first run", "later"])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: (one,)], ids=["tensor", "tuple"])
def test_state_that_the_first_run_makes_is_refused(wrap: Any, warm: bool) -> None:
    x = torch.randn(3, 4)
    for training in (False, True):
        net = Averaging(wrap)
        if warm:
            net(x)
        with pytest.raises(NotStaticError, match=r"attribute state(\[0\])? is read and then replaced"):
            Nimble(net, Options(tune="off")).prepare(x, training=training)


def test_what_the_first_run_makes_and_no_later_one_reads_is_said() -> None:
    class Shown(nn.Linear):
        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last * 2

    net, x = Shown(4, 4), torch.randn(3, 4)
    with pytest.warns(NimbleWarning, match="changes attributes, which a replay does not repeat: last"):
        prepared = Nimble(net, Options(tune="off")).prepare(x)
    assert torch.equal(prepared(x), net(x))
    prepared.close()


@pytest.mark.parametrize("way", NOT_CARRIED)
def test_what_the_next_run_reads_as_this_one_does_is_no_error(way: str) -> None:
    replace, named = NOT_CARRIED[way]
    net, x = Replacing(replace), torch.randn(3, 4)
    said = (f"the forward changes attributes, which a replay does not repeat: {named}",) if named else ()
    assert recorded(net, x).program.notes == said
    with pytest.warns(NimbleWarning, match=named) if named else nullcontext():
        Nimble(net, Options(tune="off")).prepare(x, training=True).close()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "normed",
    [
        lambda part: prune.l1_unstructured(part, "weight", 2),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,  # whose weight at first is the memory of the parameter that it is computed of
    ],
)
def test_weights_that_are_computed_anew_are_not_carried(normed: Callable[[nn.Module], nn.Module]) -> None:
    (note,) = recorded(nn.Sequential(normed(nn.Linear(4, 4))), torch.randn(3, 4)).program.notes
    assert note == "the forward changes attributes, which a replay does not repeat: 0.weight"


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.put(self, 0.9 * self.get(self) + y.detach().mean(0))
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
        assert "test_run_effects.py" in caught.value.where
    assert net[0].get(net[0]) is before
    assert net[0].state is state
