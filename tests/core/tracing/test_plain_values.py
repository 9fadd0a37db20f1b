"""Values that are no tensors: which cannot change, which are equal, what they hold."""

from __future__ import annotations

import itertools
import types
from collections import Counter, OrderedDict, UserDict
from datetime import date
from enum import Enum
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from nimble_core.tracing.plain_values import attributes, equal, frozen, is_iterator, is_opaque, is_plain, shown


class Colour(Enum):
    RED = 1


class Slots:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class Odd:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError

    __hash__ = None  # type: ignore[assignment]  # of no use here


PLAIN = [None, ..., True, 1, 2.5, 1j, "a", b"a", slice(1), range(3), int, Colour.RED, date(2020, 1, 1)]
PLAIN += [torch.float16, torch.device("cpu"), torch.Size([1]), torch.strided, torch.channels_last]
PLAIN += [numpy.float32(3), numpy.dtype("f4")]
OPAQUE = [len, torch.relu, lambda: 1, torch.nn.Linear(1, 1), torch.Generator(), {1: 2}.values(), ValueError("a")]
OPAQUE += [types.MappingProxyType({}), itertools.count(), memoryview(b"a"), torch.ones(1).untyped_storage()]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: Any) -> None:
    assert is_plain(value)
    assert equal(value, value)
    assert shown(value) == repr(value)[:80]


@pytest.mark.parametrize("value", OPAQUE, ids=lambda value: type(value).__name__)
def test_opaque_values(value: Any) -> None:
    assert not is_plain(value)
    assert is_opaque(value)


@pytest.mark.parametrize("value", [Slots(1), UserDict(a=1), Counter("a"), OrderedDict(a=1), type("Row", (list,), {})()])
def test_values_that_can_be_looked_into(value: Any) -> None:
    assert not is_plain(value)
    assert not is_opaque(value)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        (1, 1.0, False),
        (0, 0, True),
        ((1, "a"), (1, "a"), True),
        (Odd(), Odd(), False),
        (numpy.float32("nan"), numpy.float32("nan"), True),
    ],
)
def test_equality_of_values(a: Any, b: Any, same: bool) -> None:
    assert equal(a, b) == equal(b, a) == same
    assert equal(a, a)


@given(arrays(st.sampled_from(["f4", "f8", "i8", "?", "c8"]), array_shapes(min_side=0, max_side=3)), st.data())
def test_arrays_are_compared_with_what_was_in_them(array: Any, data: Any) -> None:
    was = frozen(array)
    assert equal(was, frozen(array.copy()))
    assert not equal(was, frozen(numpy.zeros(array.shape, "f2")))
    assert not equal(was, frozen(array[None]))
    assert str(list(array.shape)) in shown(was)
    assume(array.size)
    at = data.draw(st.integers(0, array.size - 1))
    array.flat[at] = not array.flat[at] if array.dtype == bool else 7 if array.flat[at] != 7 else 8
    assert not equal(was, frozen(array))


@pytest.mark.parametrize(
    ("value", "change"), [({1}, lambda s: s.add(2)), (bytearray(b"a"), lambda b: b.extend(b"b"))], ids=["set", "bytes"]
)
def test_what_was_changed_in_place_is_another(value: Any, change: Any) -> None:
    was = frozen(value)
    assert equal(was, frozen(value))
    change(value)
    assert not equal(was, frozen(value))


def test_attributes_in_slots_and_dicts() -> None:
    both = type("Both", (Slots,), {})(1)
    both.more = 2
    assert attributes(both) == {"more": 2, "held": 1}
    assert attributes(3) == {}


def test_iterators() -> None:
    assert all(map(is_iterator, (iter([1]), (one for one in [1]), map(str, [1]), zip([1], [2], strict=True))))
    with open(__file__) as file:
        assert not any(map(is_iterator, ([1], "a", {1: 2}.values(), range(3), file)))
