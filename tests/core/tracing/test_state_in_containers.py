"""What modules keep in containers and objects is put back after preparing; what steps carry there is refused."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

from nimble_core import Nimble, NimbleWarning, NotStaticError, Options, TrainStep
from nimble_core.tracing.side_effects import preserved

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
    "ordered": (lambda v: OrderedDict(v=v), *at("v"), "state['v']"),
    "default": (lambda v: defaultdict(list, {3: v}), *at(3), "state[3]"),
    "deque": (lambda v: deque([v]), *at(0), "state[0]"),
    "shifted": (
        lambda v: deque([v, v + 1], maxlen=2),
        at(0)[0],
        lambda net, new: net.state.append(new),
        "state[0]",
    ),
    "dicts": (lambda v: {"a": {"v": v}}, *at("a", "v"), "state['a']['v']"),
    "lists": (lambda v: [[v]], *at(0, 0), "state[0][0]"),
    "in a tuple": (lambda v: ([v],), *at(0, 0), "state[0][0]"),
    "object": (lambda v: SimpleNamespace(v=v), *attribute("v"), "state.v"),
    "objects": (lambda v: SimpleNamespace(a=SimpleNamespace(v=v)), *attribute("a", "v"), "state.a.v"),
}


class Keeping(nn.Module):
    """Keeps an average in one of the places, replaced or written in place."""

    def __init__(self, place: str, in_place: bool = False) -> None:
        super().__init__()
        make, self.get, self.put, self.named = PLACES[place]
        self.linear = nn.Linear(4, 4)
        self.in_place = in_place
        self.state = make(torch.zeros(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.in_place:
            self.get(self).mul_(0.9).add_(y.detach().mean(0))
        else:
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


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_written_in_place_trains_as_in_eager(place: str) -> None:
    net, steps = Keeping(place, in_place=True), torch.randn(5, 3, 4)
    reference = deepcopy(net)
    optimizer, step = torch.optim.SGD(reference.parameters(), lr=0.1), trained(net)
    step.prepare(steps[0], steps[0])
    for x in steps:
        step(x, x)
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), x).backward()
        optimizer.step()
    torch.testing.assert_close(net.linear.weight, reference.linear.weight)
    torch.testing.assert_close(net.get(net), reference.get(reference))


class Changing(nn.Module):
    """Does something to its state."""

    def __init__(self, state: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.state, self.change = state, change

    def forward(self) -> None:
        self.change(self.state)


ONE, OTHER = torch.zeros(1), torch.ones(1)


def circle() -> Any:
    one: dict[str, Any] = {"n": [ONE]}
    one["self"], one["object"] = one, SimpleNamespace(back=one)
    return one


def ids(state: Any) -> list[Any]:
    """What is there, by identity."""
    return [(key, id(one)) for key, one in (state.items() if isinstance(state, dict) else enumerate(state))]


CHANGES: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], Any]]] = {
    "filled": ({"a": {}}, lambda s: s["a"].update(b=ONE), lambda s: ids(s["a"])),
    "emptied": ([[ONE, OTHER]], lambda s: s[0].clear(), lambda s: ids(s[0])),
    "rotated": ([deque([ONE, ONE, ONE], maxlen=3)], lambda s: s[0].append(OTHER), lambda s: (ids(s[0]), s[0].maxlen)),
    "order": ([OrderedDict(a=ONE, b=OTHER)], lambda s: s[0].move_to_end("a"), lambda s: ids(s[0])),
    "member": ([{ONE}], lambda s: s[0].add(OTHER), lambda s: sorted(map(id, s[0]))),
    "attribute added": (SimpleNamespace(a=ONE), lambda s: setattr(s, "b", OTHER), lambda s: ids(vars(s))),
    "attribute deleted": (SimpleNamespace(a=ONE, b=1), lambda s: delattr(s, "a"), lambda s: ids(vars(s))),
    "circle": (circle(), lambda s: s["self"]["object"].back["n"].append(OTHER), lambda s: ids(s["n"])),
    "in tuples": ((1, (2, [ONE])), lambda s: s[1][1].append(OTHER), lambda s: ids(s[1][1])),
}


@pytest.mark.parametrize("way", CHANGES)
def test_what_is_deeper_is_put_back_and_told_by_its_attribute(way: str) -> None:
    state, change, shown = CHANGES[way]
    net, before = nn.Sequential(Changing(state, change)), shown(state)
    with preserved(net) as guard:
        assert not guard.changed_attributes()
        net[0]()
        assert shown(state) != before
        assert {one.attribute for one in guard.changed_attributes().values()} == {"0.state"}
    assert shown(state) == before


def test_what_several_modules_share_is_told_once() -> None:
    shared = SimpleNamespace(calls=ONE)
    net = nn.Sequential(*(Changing(shared, lambda s: setattr(s, "calls", OTHER)) for _ in range(3)))
    with preserved(net) as guard:
        net[1]()
        assert list(guard.changed_attributes()) == ["0.state.calls"]
    assert shared.calls is ONE


def test_of_private_containers_only_tensors_that_are_replaced_are_told() -> None:
    net = nn.Sequential(nn.ReLU())
    net[0]._state = {"v": torch.zeros(1), "n": 1}
    with preserved(net) as guard:
        net[0]._state.update(n=2)
        assert guard.changed_attributes() == {}
        net[0]._state.update(v=torch.ones(1))
        ((name, change),) = guard.changed_attributes().items()
        assert (name, change.attribute, change.name) == ("0._state['v']", "", "_state['v']")
    assert net[0]._state["n"] == 1


def test_a_submodule_in_a_list_is_told_by_its_own_name() -> None:
    net = nn.Sequential(nn.ReLU())
    net.listed = [net[0]]
    with preserved(net) as guard:
        net[0].number = 1
        assert list(guard.changed_attributes()) == ["0.number"]


class Proxy:
    """Runs code of its own, and fails, wherever somebody looks."""

    __slots__ = ("inner",)

    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(name)


class Bunch(dict[str, Any]):
    """Shows items as attributes, and no others."""

    __getattr__ = dict.__getitem__


class Unhashable:
    """A key whose hash is gone."""

    hashes = True

    def __hash__(self) -> int:
        if not self.hashes:
            raise TypeError
        return 1


class Worker:
    def __init__(self) -> None:
        self.ready, self.items = threading.Condition(), [ONE]


def deep(depth: int) -> Any:
    found: Any = ONE
    for _ in range(depth):
        found = (1, found)
    return found


@pytest.mark.parametrize(
    ("state", "change", "kept"),
    [
        (Worker(), lambda s: s.items.append(OTHER), lambda s: len(s.items) == 2),
        ([[1]], lambda s: s[0].append(2), lambda s: s == [[1, 2]]),
        ({"a": Bunch(b=[ONE])}, lambda s: s["a"]["b"].append(OTHER), lambda s: len(s["a"]["b"]) == 2),
        ([Proxy()], lambda s: None, lambda s: len(s) == 1),
        (WeakSet([nn.ReLU]), lambda s: s.add(nn.Tanh), lambda s: len(s) == 2),
        ({"long": [ONE] * 1_001}, lambda s: s["long"].append(OTHER), lambda s: len(s["long"]) == 1_002),
        ([deep(1_000)], lambda s: None, lambda s: True),
    ],
)
def test_objects_numbers_and_what_is_long_are_left_alone(state: Any, change: Any, kept: Any) -> None:
    """Others may be working with them."""
    net = Changing(state, change)
    with preserved(net) as guard:
        net()
        assert guard.changed_attributes() == {}
    assert kept(state)


def test_chains_of_tuples_end() -> None:
    net = Changing(deep(2_000), lambda s: None)
    with preserved(net) as guard:
        net.state = (1, net.state)
        assert {one.attribute for one in guard.changed_attributes().values()} == {"state"}


def test_keys_need_no_hash_any_more() -> None:
    key = Unhashable()
    net = Changing([{key: ONE}], lambda s: None)
    key.hashes = False
    with preserved(net) as guard:
        net()
        assert guard.changed_attributes() == {}


def test_no_more_is_looked_at_than_can_be_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.tracing.side_effects._REACH", 2)
    net = Changing([[ONE], [ONE], [ONE]], lambda s: [one.append(OTHER) for one in s])
    with preserved(net):
        net()
    assert list(map(len, net.state)) == [1, 1, 2]
