"""What modules keep in containers and objects is put back after preparing; what steps carry there is refused."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, NimbleWarning, NotStaticError, Options, TrainStep
from nimble_core.preserve import preserved

OPTIONS = Options(fuse="none", tune="off")


@dataclass(slots=True)
class Slotted:
    v: Any


class Guarded(dict[str, Any]):
    """Refuses what dicts allow, and shows entries as attributes, as outputs of Hugging Face's models do."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError


class Named(list[Any]):
    """Has an attribute beside its items."""

    def __init__(self, v: Any) -> None:
        super().__init__()
        self.v = v


class Hidden(nn.Module):
    def __init__(self, v: Any) -> None:
        super().__init__()
        self.register_buffer("v", v)


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
    "subclass": (lambda v: Guarded(v=v), *at("v"), "state['v']"),
    "attribute of a list": (
        lambda v: [Named(v)],
        lambda net: net.state[0].v,
        lambda net, new: setattr(net.state[0], "v", new),
        "state[0].v",
    ),
    "object": (lambda v: SimpleNamespace(v=v), *attribute("v"), "state.v"),
    "slots": (lambda v: Slotted(v), *attribute("v"), "state.v"),
    "objects": (lambda v: SimpleNamespace(a=SimpleNamespace(v=v)), *attribute("a", "v"), "state.a.v"),
    "user dict": (lambda v: UserDict(v=v), *at("v"), "state.data['v']"),
    "hidden module": (
        lambda v: [Hidden(v)],
        lambda net: net.state[0].v,
        lambda net, new: setattr(net.state[0], "v", new),
        "state[0]._buffers['v']",
    ),
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


def circle() -> Any:
    one: dict[str, Any] = {"n": [1]}
    one["self"], one["object"] = one, SimpleNamespace(back=one)
    return one


CHANGES: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], Any]]] = {
    "filled": ({"a": {}}, lambda s: s["a"].update(b=1), lambda s: s["a"]),
    "emptied": ([[1, 2]], lambda s: s[0].clear(), lambda s: s[0]),
    "rotated": ([deque([1, 2, 3], maxlen=3)], lambda s: s[0].append(4), lambda s: s[0]),
    "order": ([OrderedDict(a=1, b=2)], lambda s: s[0].move_to_end("a"), lambda s: list(s[0].items())),
    "member": ([{1, 2}], lambda s: s[0].add(3), lambda s: s[0]),
    "attribute added": (SimpleNamespace(a=1), lambda s: setattr(s, "b", 1), vars),
    "attribute deleted": (SimpleNamespace(a=1, b=2), lambda s: delattr(s, "a"), lambda s: list(vars(s).items())),
    "slot emptied": ([Slotted(1)], lambda s: delattr(s[0], "v"), lambda s: s[0].v),
    "entry deleted": ([Guarded(a=1)], lambda s: s[0].pop("a"), lambda s: s[0]),
    "entry added": ([Guarded(a=1)], lambda s: s[0].__setitem__("b", 2), lambda s: (dict(s[0]), vars(s[0]))),
    "circle": (circle(), lambda s: s["self"]["object"].back["n"].append(2), lambda s: s["n"]),
}


@pytest.mark.parametrize("way", CHANGES)
def test_what_is_deeper_is_put_back_and_told_by_its_attribute(way: str) -> None:
    state, change, shown = CHANGES[way]
    net, before = nn.Sequential(Changing(state, change)), deepcopy(shown(state))
    with preserved(net) as guard:
        assert not guard.changed_attributes()
        net[0]()
        with suppress(AttributeError):
            assert shown(state) != before
        assert {one.attribute for one in guard.changed_attributes().values()} == {"0.state"}
    assert shown(state) == before
    assert not hasattr(shown(state), "maxlen") or shown(state).maxlen == 3


def test_what_several_modules_share_is_told_once() -> None:
    shared = SimpleNamespace(calls=0)
    net = nn.Sequential(*(Changing(shared, lambda s: setattr(s, "calls", 1)) for _ in range(3)))
    with preserved(net) as guard:
        net[1]()
        assert list(guard.changed_attributes()) == ["0.state.calls"]
    assert shared.calls == 0


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


class Shows(list[int]):
    """Shows other items than it has."""

    def __iter__(self) -> Any:
        return iter([0])


class Locked:
    def __init__(self) -> None:
        self.lock, self.items = threading.Lock(), [1]


@pytest.mark.parametrize(
    ("state", "change", "after"),
    [
        (Locked(), lambda s: s.items.append(2), lambda s: s.items == [1, 2]),
        ([Shows([1, 2])], lambda s: s[0].append(3), lambda s: len(s[0]) == 3),
    ],
)
def test_what_other_threads_work_with_or_hides_its_items_is_left_alone(state: Any, change: Any, after: Any) -> None:
    net = Changing(state, change)
    with preserved(net) as guard:
        net()
        assert guard.changed_attributes() == {}
    assert after(state)


def test_no_more_is_looked_at_than_can_be_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.preserve._REACH", 2)
    net = Changing([[1], [2], [3]], lambda s: [one.append(4) for one in s])
    with preserved(net):
        net()
    assert net.state == [[1], [2], [3, 4]]
