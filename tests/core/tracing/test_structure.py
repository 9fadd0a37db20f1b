"""Structures of nested values: which are the same, and where two of them first differ."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nimble_core.tracing.pytree import flatten, reader
from nimble_core.tracing.structure import Difference, same_structure, structure_difference

X = torch.ones(1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    a: Any


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slots:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class Named(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


def named(held: Any) -> Named:
    value = Named(a=1)
    value.held = held  # type: ignore[attr-defined]  # beside its items
    return value


def same(a: Any, b: Any) -> bool:
    was, now = flatten(a)[1], flatten(b)[1]
    found = same_structure(was, now)
    assert (reader(was)(b) is not None) == found
    return found


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([1], [2], ("[0]", "1", "2")),
        ([1], (1,), ("", "list", "tuple")),
        ([1], [1, 1], ("", "keys [0]", "[0, 1]")),
        ([True], [1], ("[0]", "True", "1")),
        ([1.0], [1], ("[0]", "1.0", "1")),
        ({"a": 1}, {"b": 1}, ("", "keys ['a']", "['b']")),
        ({"a": 1}, OrderedDict(a=1), ("", "dict", "OrderedDict")),
        (Record(1), Box(1), ("", "Record", "Box")),
        (Record([1]), Record([2]), (".a[0]", "1", "2")),
        ([None], [X], ("[0]", "None", "a tensor")),
        ([X], [[X]], ("[0]", "a tensor", "list")),
        (Pair(1, 2), (1, 2), ("", "Pair", "tuple")),
        ({1}, {2}, ("", "frozenset({1})", "frozenset({2})")),
        (Box({"a": [1]}), Box({"a": [2]}), (".held['a'][0]", "1", "2")),
        (Box(1), Box([1]), (".held", "1", "list")),
        (named(1), named(2), (".held", "1", "2")),
        (Row([1]), Row([1, 2]), ("", "keys ['[0]']", "['[0]', '[1]']")),
        (UserDict(a=1), UserDict(a=2), (".data['a']", "1", "2")),
    ],
)
def test_structures_that_differ(a: Any, b: Any, difference: tuple[str, str, str]) -> None:
    assert same(a, copy.deepcopy(a))
    assert not same(a, b)
    assert structure_difference(flatten(a)[1], flatten(b)[1], "x") == Difference(f"x{difference[0]}", *difference[1:])


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(torch.float16)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.frozensets(st.integers(), max_size=3),
        *(st.builds(make, inner) for make in (Box, Slots, Record, named, lambda held: Row([held]))),
    ),
    max_leaves=8,
)


@given(values)
def test_a_copy_holds_the_same(value: Any) -> None:
    assert same(value, value)
    assert same(value, copy.deepcopy(value))


@given(st.lists(st.sampled_from([Box, Slots, named, Record]), max_size=2), st.integers(), st.integers())
def test_what_was_changed_in_place_is_found_where_it_is(around: list[Any], before: int, after: int) -> None:
    assume(before != after)
    inmost = Box(before)
    value: Any = inmost
    for make in around:
        value = make(value)
    was = flatten(value)[1]
    inmost.held = after
    path = "".join(".a" if make is Record else ".held" for make in reversed(around))
    assert structure_difference(was, flatten(value)[1]) == Difference(f"{path}.held", str(before), str(after))


def test_an_attribute_that_comes_later_is_no_change_and_one_that_goes_is() -> None:
    box = Box(1)
    was = flatten(box)[1]
    box.more = 2  # type: ignore[attr-defined]  # beside its own
    assert same_structure(was, flatten(box)[1])
    del box.held
    assert not same_structure(was, flatten(box)[1])


@pytest.mark.parametrize(
    "make", [torch.Generator, lambda: torch.nn.Linear(1, 1), lambda: lambda: X, lambda: Box(dict.fromkeys(range(2000)))]
)
def test_what_cannot_be_looked_into_or_is_large_counts_as_itself(make: Callable[[], Any]) -> None:
    one = make()
    assert same(one, one)
    assert same(one, make()) == isinstance(one, Box)  # its dict is equal


def test_circles_and_deep_objects_end() -> None:
    circle: Any = Box(None)
    circle.held = [circle]
    deep: Any = Box(1)
    for _ in range(2_000):
        deep = Box(deep)
    assert same(circle, copy.deepcopy(circle))
    assert same(deep, deep)
    assert same(circle.held, copy.deepcopy(circle.held))
