"""Structures of nested values: what is in them, which are the same, and where two of them first differ."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, UserDict
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from nimble_core.tracing.pytree import flatten, reader
from nimble_core.tracing.structure import (
    Difference,
    equal,
    is_iterator,
    is_plain,
    same_structure,
    shown,
    stands_for_itself,
    structure_difference,
)

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


class Colour(Enum):
    RED = 1


class Odd:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]  # of no use here


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
        ({"a": 1}, {"b": 1}, ("", "keys ['a']", "['b']")),
        ({"a": 1}, OrderedDict(a=1), ("", "dict", "OrderedDict")),
        (Record([1]), Record([2]), (".a[0]", "1", "2")),
        ([None], [X], ("[0]", "None", "a tensor")),
        ([X], [[X]], ("[0]", "a tensor", "list")),
        (Pair(1, 2), (1, 2), ("", "Pair", "tuple")),
    ],
)
def test_structures_that_differ(a: Any, b: Any, difference: tuple[str, str, str]) -> None:
    assert same(a, copy.deepcopy(a))
    assert not same(a, b)
    assert structure_difference(flatten(a)[1], flatten(b)[1], "x") == Difference(f"x{difference[0]}", *difference[1:])


PLAIN = [None, ..., 2.5, 1j, b"a", slice(1), int, Colour.RED, date(2020, 1, 1), torch.float16, torch.device("cpu")]
PLAIN += [torch.Size([1]), numpy.float32(3), numpy.dtype("f4")]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: Any) -> None:
    assert is_plain(value)
    assert equal(value, value)
    assert shown(value) == repr(value)[:80]


@pytest.mark.parametrize("value", [torch.relu, lambda: 1, torch.nn.Linear(1, 1), torch.Generator()])
def test_what_counts_as_itself_and_what_is_not_known(value: Any) -> None:
    assert not is_plain(value)
    assert stands_for_itself(value)
    for other in (Box(1), UserDict(a=1), Counter("a"), type("Row", (list,), {})(), {1}, numpy.ones(1), bytearray(b"a")):
        assert not stands_for_itself(other)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        (1, 1.0, False),
        (Odd(), Odd(), False),
        (numpy.float32("nan"), numpy.float32("nan"), True),
    ],
)
def test_equality_of_values(a: Any, b: Any, same: bool) -> None:
    assert equal(a, b) == equal(b, a) == same
    assert equal(a, a)


def test_iterators() -> None:
    assert all(map(is_iterator, (iter([1]), (one for one in [1]), zip([1], [2], strict=True))))
    with open(__file__) as file:
        assert not any(map(is_iterator, ([1], "a", {1: 2}.values(), file)))
