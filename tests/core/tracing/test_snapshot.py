"""Snapshots of modules: what differs later is named as users name it, and put back."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nimble_core.tracing.snapshot import Snapshot

ONE, OTHER = torch.zeros(1), torch.ones(1)


def taken(net: nn.Module) -> Snapshot:
    return Snapshot(dict(net.named_modules()))


def keeping(state: Any) -> nn.Module:
    """A module in another one that keeps ``state``."""
    net = nn.Sequential(nn.ReLU())
    net[0].state = state
    return net


def messy() -> nn.Module:
    """A module with a submodule, and containers of every kind in both, filled and empty."""
    net = nn.Sequential(nn.BatchNorm1d(2))
    for part in (net, net[0]):
        part.listed, part.none, part.named, part.unnamed = [1, [2]], [], {"a": 1.5, "b": (3,)}, {}
        part.members, part.ordered = {"x", "y"}, OrderedDict(first=1, second=2)
        part.counted, part.number = defaultdict(list, {"k": [1]}), 1000
    return net


def held(net: nn.Module) -> list[Any]:
    """All attributes, and what containers among them hold, by identity and in order (of sets: what they hold)."""
    found: list[Any] = []
    for part in net.modules():
        found += [(name, id(value)) for name, value in vars(part).items()]
        for value in vars(part).values():
            if isinstance(value, dict):
                found += [(key, id(entry)) for key, entry in value.items()]
            elif isinstance(value, (list, set)):
                found += [set(value)] if isinstance(value, set) else map(id, value)
    return found


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (lambda part: setattr(part, "number", int("1000")), "number"),  # equal, and another object
    "added": (lambda part: setattr(part, "added", 1), "added"),
    "deleted": (lambda part: delattr(part, "number"), "number"),
    "container": (lambda part: setattr(part, "listed", list(part.listed)), "listed"),
    "append": (lambda part: part.listed.append(3), "listed"),
    "inside": (lambda part: part.listed[1].append(3), "listed[1]"),
    "fill": (lambda part: part.none.append(3), "none"),
    "entry": (lambda part: part.named.update(a=float("1.5")), "named['a']"),
    "entries": (lambda part: part.unnamed.update(a=1), "unnamed"),
    "clear": (lambda part: part.named.clear(), "named"),
    "member": (lambda part: part.members.add("z"), "members"),
    "order": (lambda part: part.ordered.move_to_end("first"), "ordered"),
    "default": (lambda part: part.counted["made by a look"], "counted"),
    "buffer": (lambda part: part.register_buffer("later", torch.ones(1)), "later"),
    "tensor": (lambda part: part.register_parameter("weights", nn.Parameter(torch.ones(1))), "weights"),
    "module": (lambda part: part.add_module("child", nn.ReLU()), "child"),
    "mode": (lambda part: part.train(not part.training), "training"),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from([0, 1])), max_size=4, unique=True))
def test_changes_are_found_and_put_back(changes: list[tuple[str, int]]) -> None:
    net = messy()
    parts, before = list(net.modules()), held(net)
    snapshot = taken(net)
    assert not snapshot.changes()
    for name, at in changes:
        with suppress(AttributeError):  # deleted before
            CHANGES[name][0](parts[at])
    assert bool(snapshot.changes()) >= (held(net) != before)
    snapshot.restore()
    assert held(net) == before
    assert not snapshot.changes()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_as_users_name_it(name: str) -> None:
    net = messy()
    snapshot = taken(net)
    change, place = CHANGES[name]
    change(net[0])
    ((path, found),) = snapshot.changes().items()
    assert (path, found.name) == (f"0.{place}", place)
    assert found.attribute == f"0.{place.partition('[')[0]}"


def circle() -> Any:
    one: dict[str, Any] = {"n": [ONE]}
    one["self"], one["object"] = one, SimpleNamespace(back=one)
    return one


def ids(state: Any) -> list[Any]:
    """What is there, by identity."""
    return [(key, id(one)) for key, one in (state.items() if isinstance(state, dict) else enumerate(state))]


DEEPER: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], Any]]] = {
    "emptied": ([[ONE, OTHER]], lambda s: s[0].clear(), lambda s: ids(s[0])),
    "rotated": ([deque([ONE, ONE, ONE], maxlen=3)], lambda s: s[0].append(OTHER), lambda s: (ids(s[0]), s[0].maxlen)),
    "order": ([OrderedDict(a=ONE, b=OTHER)], lambda s: s[0].move_to_end("a"), lambda s: ids(s[0])),
    "member": ([{ONE}], lambda s: s[0].add(OTHER), lambda s: sorted(map(id, s[0]))),
    "attribute added": (SimpleNamespace(a=ONE), lambda s: setattr(s, "b", OTHER), lambda s: ids(vars(s))),
    "circle": (circle(), lambda s: s["self"]["object"].back["n"].append(OTHER), lambda s: ids(s["n"])),
    "in tuples": ((1, (2, [ONE])), lambda s: s[1][1].append(OTHER), lambda s: ids(s[1][1])),
}


@pytest.mark.parametrize("way", DEEPER)
def test_containers_in_containers_are_put_back_and_named_by_their_attribute(way: str) -> None:
    state, change, shown = DEEPER[way]
    before, snapshot = shown(state), taken(keeping(state))
    change(state)
    assert shown(state) != before
    assert {one.attribute for one in snapshot.changes().values()} == {"0.state"}
    snapshot.restore()
    assert shown(state) == before


def test_of_private_containers_only_tensors_that_are_replaced_are_named() -> None:
    net = nn.ReLU()
    net._state = {"v": torch.zeros(1), "n": 1}
    snapshot = taken(net)
    net._state.update(n=2)
    assert snapshot.changes() == {}
    net._state.update(v=torch.ones(1))
    ((name, change),) = snapshot.changes().items()
    assert (name, change.attribute, change.name) == ("_state['v']", "", "_state['v']")
    snapshot.restore()
    assert net._state["n"] == 1


class Proxy:
    """Runs code of its own, and fails, wherever somebody looks."""

    __slots__ = ("inner",)

    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(name)


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
        ([Proxy()], lambda s: None, lambda s: len(s) == 1),
        ({"long": [ONE] * 20_001}, lambda s: s["long"].append(OTHER), lambda s: len(s["long"]) == 20_002),
        ([deep(1_000)], lambda s: None, lambda s: True),
    ],
)
def test_objects_and_long_containers_are_left_alone(state: Any, change: Any, kept: Any) -> None:
    """Others may be working with them."""
    snapshot = taken(keeping(state))
    change(state)
    assert snapshot.changes() == {}
    snapshot.restore()
    assert kept(state)
