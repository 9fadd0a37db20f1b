from __future__ import annotations

import copy
import itertools
import types
from collections import OrderedDict
from datetime import date
from enum import Enum
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from nimble_core.tracing.snapshot import Hidden, difference, is_iterator, remember

X = torch.ones(2)


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


class Colour(Enum):
    RED = 1


def named(held: Any) -> Named:
    value = Named(a=1)
    value.held = held  # type: ignore[attr-defined]  # beside its fields
    return value


def closing_over(held: Any) -> Any:
    return lambda: held


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(Colour.RED), st.just(X.dtype)
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.frozensets(st.integers(), max_size=3),
        *(st.builds(make, inner) for make in (Box, Slots, named, lambda held: Row([held]), ValueError)),
    ),
    max_leaves=8,
)


@given(values, st.booleans())
def test_a_copy_holds_the_same(value: Any, of_run: bool) -> None:
    assert difference(remember(value, of_run=of_run), value) is None
    assert difference(remember(value, of_run=of_run), copy.deepcopy(value)) is None


@given(st.lists(st.sampled_from([Box, Slots, named]), max_size=2), st.integers(), st.integers())
def test_what_was_changed_in_place_is_found_where_it_is(around: list[Any], before: int, after: int) -> None:
    assume(before != after)
    inmost = Box(before)
    value: Any = inmost
    for make in around:
        value = make(value)
    was = remember(value, of_run=False)
    inmost.held = after
    found = difference(was, value)
    assert found is not None
    assert (found.path, found.was, found.now) == (".held" * (len(around) + 1), str(before), str(after))


@given(arrays(st.sampled_from(["f4", "f8", "i8", "?", "c8"]), array_shapes(min_side=0, max_side=3)), st.data())
def test_arrays_are_held_against_what_was_in_them(array: Any, data: Any) -> None:
    was = remember([array], of_run=False)
    assert difference(was, [array.copy()]) is None
    assert difference(was, [numpy.zeros(array.shape, "f2")]) is not None
    assert difference(was, [array[None]]) is not None
    assume(array.size)
    at = data.draw(st.integers(0, array.size - 1))
    array.flat[at] = not array.flat[at] if array.dtype == bool else 7 if array.flat[at] != 7 else 8
    found = difference(was, [array])
    assert found is not None
    assert found.path == "[0]"
    assert str(list(array.shape)) in found.was


def test_an_attribute_that_comes_later_is_no_change_and_one_that_goes_is() -> None:
    box = Box(1)
    was = remember(box, of_run=False)
    box.more = 2  # type: ignore[attr-defined]  # beside its own
    assert difference(was, box) is None
    del box.held
    found = difference(was, box)
    assert found is not None
    assert found.path == ".held"


@pytest.mark.parametrize(("before", "after"), [([1], [1, 2]), ({1}, {1, 2}), ({"a": 1}, {"a": 1, "b": 2})])
def test_an_item_more_is_a_change(before: Any, after: Any) -> None:
    assert difference(remember(Box(before), of_run=False), Box(after)) is not None


def test_inputs_that_cannot_be_looked_into_are_remembered_as_themselves() -> None:
    for one, other in ((torch.Generator(), torch.Generator()), (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))):
        was = remember(one, of_run=False)
        assert difference(was, one) is None
        assert difference(was, other) is not None
    function = closing_over(X)  # whose tensors a replay reads live
    assert difference(remember(function, of_run=False), function) is None


def test_large_inputs_are_remembered_as_themselves_and_small_parts_of_them_are_searched() -> None:
    box = Box(list(range(2000)))
    was = remember(box, of_run=False)
    assert difference(was, box) is None
    assert difference(was, Box([])) is not None
    with pytest.raises(Hidden):
        remember(Box([X, *range(2000)]), of_run=False)
    deep: Any = Box(1)
    for _ in range(30):
        deep = Box(deep)
    assert difference(remember(deep, of_run=False), deep) is None
    with pytest.raises(Hidden):
        remember(deep, of_run=True)


def test_circles_end() -> None:
    box = Box(None)
    box.held = [box]
    assert difference(remember(box, of_run=True), box) is None


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Slots(X), ".held"),
        (Box([Slots(X)]), ".held[0].held"),
        (named(X), ".held"),
        (Row([X]), "[0]"),
        (ValueError(X), ".args[0]"),
        (partial(torch.add, X), ".args[0]"),
        (closing_over(X), ".held"),
        (X.sum, ".__self__"),
        (lambda y=X: y, ".__defaults__[0]"),
        (types.SimpleNamespace(a=X), ".a"),
    ],
)
def test_a_tensor_of_a_run_is_found_behind_anything(value: Any, path: str) -> None:
    with pytest.raises(Hidden) as caught:
        remember(value, of_run=True)
    assert caught.value.value is X
    assert caught.value.path == path


@pytest.mark.parametrize(
    "value",
    [
        numpy.ones(2),
        numpy.array([None, X], dtype=object),
        memoryview(b"a"),
        bytearray(b"a"),
        {1: X}.values(),
        types.MappingProxyType({"a": X}),
        torch.nn.Linear(1, 1),
        X.untyped_storage(),
        (one for one in [X]),
        itertools.count(),
        torch.Generator(),
    ],
)
def test_what_cannot_be_looked_into_may_carry_something_of_a_run(value: Any) -> None:
    with pytest.raises(Hidden) as caught:
        remember(Box([value]), of_run=True)
    assert caught.value.path == ".held[0]"


def test_what_carries_nothing_of_a_run() -> None:
    values: list[Any] = [X.dtype, X.device, X.shape, X.layout, torch.channels_last, Colour.RED, slice(1), range(3), int]
    values += [
        len,
        torch.relu,
        numpy.float32(3),
        numpy.dtype("f4"),
        date(2020, 1, 1),
        closing_over(3),
        OrderedDict(a=1),
    ]
    values += [
        object(),
        partial(torch.add, 3),
        types.SimpleNamespace(a=1),
        Slots(1),
        Row([1]),
        named(1),
    ]
    for value in values:
        assert difference(remember(value, of_run=True), value) is None


def test_iterators() -> None:
    assert all(map(is_iterator, (iter([1]), (one for one in [1]), map(str, [1]), zip([1], [2], strict=True))))
    with open(__file__) as file:
        assert not any(map(is_iterator, ([1], "a", {1: 2}.values(), range(3), file)))
