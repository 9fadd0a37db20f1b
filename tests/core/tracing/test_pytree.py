from __future__ import annotations

import operator
import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput

from nimble_core.tracing.pytree import builder, flatten, leaf_paths, passed_on, reader, same_structure
from nimble_core.utils.errors import InputError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    a: Any
    b: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any = 3


@dataclass
class Late:
    a: Any
    made: Any = field(default=None, init=False)


class Registered:
    def __init__(self, tensors: list[torch.Tensor], name: str) -> None:
        self.tensors, self.name = tensors, name


_pytree.register_pytree_node(
    Registered, lambda v: (v.tensors, v.name), lambda tensors, name: Registered(list(tensors), name)
)


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just(torch.float16), st.just(slice(1))
)
leaves = st.one_of(constants, st.builds(lambda n: torch.full((2,), n), st.integers(0, 9)))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=2).map(OrderedDict),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
    ),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (Plain, Frozen)):
        return equal(a.a, b.a) and equal(a.b, b.b)
    return bool(a == b)


@given(values)
def test_what_was_taken_apart_is_put_together_again(value: Any) -> None:
    tensors, structure = flatten(value)
    built = builder(structure)(tensors)
    assert equal(built, value)
    again, second = flatten(built)
    assert all(x is y for x, y in zip(tensors, again, strict=True))
    assert same_structure(structure, second)
    assert len(leaf_paths(structure)) == len(tensors)


@given(values, values)
def test_a_reader_finds_the_tensors_of_its_own_structure_only(a: Any, b: Any) -> None:
    read = reader(flatten(a)[1])
    for value in (a, b):
        tensors, structure = flatten(value)
        found = read(value)
        assert (found is not None) == same_structure(structure, flatten(a)[1])
        if found is not None:
            assert len(found) == len(tensors)
            assert all(one is other for one, other in zip(found, tensors, strict=True))


def test_a_reader_of_another_type_than_it_knows() -> None:
    x = torch.ones(1)
    read = reader(flatten(([x, 1], {"a": x, "b": Plain(x)}))[1])
    assert read(([x, 1], {"a": x, "b": Plain(x)})) is not None
    others: list[Any] = [None, x, ([x, 1], {"b": Plain(x), "a": x}), ((x, 1), {"a": x, "b": Plain(x)}), ([x, 2], {})]
    others += [([x, True], {"a": x, "b": Plain(x)}), ([1, 1], {"a": x, "b": Plain(x)}), ([x, 1], {"a": x, "b": x})]
    assert [read(other) for other in others] == [None] * len(others)


@given(values)
def test_paths_lead_to_the_tensors(value: Any) -> None:
    tensors, structure = flatten(value)
    for tensor, path in zip(tensors, leaf_paths(structure, "value"), strict=True):
        assert eval(path, {"value": value}) is tensor


def test_a_tensor_in_a_field_that_the_constructor_does_not_take_is_not_lost() -> None:
    value = Late(torch.ones(1))
    value.made = torch.ones(2)
    tensors, structure = flatten(value)
    assert leaf_paths(structure, "value") == ["value.a", "value.made"]
    assert torch.equal(builder(structure)(tensors).made, torch.ones(2))


def test_attributes_beside_the_fields_are_part_of_an_output_alone() -> None:
    value = Plain(torch.ones(1))
    value.more = torch.ones(2)  # type: ignore[attr-defined]  # as a cached property would
    tensors, structure = flatten(value, what="output")
    assert builder(structure)(tensors).more is value.more
    assert flatten(value)[0] == [value.a]
    assert reader(flatten(Plain(value.a))[1])(value) == [value.a]


def test_a_registered_type() -> None:
    value = [Registered([torch.ones(1), torch.zeros(2)], "name")]
    tensors, structure = flatten(value)
    assert len(tensors) == 2
    (built,) = builder(structure)(tensors)
    assert isinstance(built, Registered)
    assert (built.tensors[1] is tensors[1], built.name) == (True, "name")


@pytest.mark.parametrize(
    "original",
    [
        BaseModelOutputWithPooling(torch.ones(1), None, (torch.ones(2), torch.ones(3)), None),
        CLIPOutput(
            logits_per_image=torch.ones(2),
            text_model_output=BaseModelOutputWithPooling(last_hidden_state=torch.ones(1, 2)),
        ),
    ],
)
def test_hugging_face_outputs(original: Any) -> None:
    tensors, structure = flatten(original)
    built = builder(structure)(tensors)
    assert type(built) is type(original)
    assert list(built.keys()) == list(original.keys())
    assert all(getattr(built, key) is built[key] for key in original)
    for name in original.__dataclass_fields__:
        assert (getattr(built, name) is None) == (getattr(original, name) is None)
    assert all(map(operator.is_, flatten(built.to_tuple())[0], flatten(original.to_tuple())[0]))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Box(torch.ones(1)), "value"),
        ([1, {"k": Box(3)}], "value[1]['k']"),
        ({torch.float16: UserDict(a=1)}, "value[torch.float16]"),
        ({1, torch.ones(1)}, "value"),
    ],
)
def test_objects_of_unknown_classes_are_refused_with_their_path(value: Any, path: str) -> None:
    with pytest.raises(InputError, match="of a class that is not known") as caught:
        flatten(value, what="value")
    assert caught.value.where == path
    assert "register_pytree_node" in caught.value.fix
    assert reader(flatten([1, 2])[1])(value) is None


def test_functions_and_modules_are_passed_as_they_are() -> None:
    given = [torch.nn.Linear(1, 1), len, torch.Generator()]
    tensors, structure = flatten(given)
    assert tensors == []
    assert all(map(operator.is_, builder(structure)([]), given))
    with pytest.raises(InputError, match=r"output\[0\] is a Linear.* may hold values of this one run"):
        flatten(given, what="output")


def looped(kind: str) -> Any:
    """A container whose part is the container itself."""
    held: list[Any] = []
    value: Any = {
        "list": held,
        "dict": {"a": 1, "b": held},
        "Plain": Plain(held),
    }[kind]
    held.append(value)
    return value


@pytest.mark.parametrize("kind", ["list", "dict", "Plain"])
@pytest.mark.parametrize("what", ["value", "output"])
def test_what_contains_itself_is_refused_with_the_path(kind: str, what: str) -> None:
    with pytest.raises(InputError, match=f"{what}\\[0\\] is a {kind} that contains itself") as caught:
        flatten([looped(kind)], what=what)
    assert caught.value.where.startswith(f"{what}[0]")


def test_an_unknown_cache_is_refused_with_the_path() -> None:
    class OwnCache:
        def __init__(self) -> None:
            self.keys = [torch.ones(1)]

    with pytest.raises(InputError, match="OwnCache") as caught:
        flatten({"past": OwnCache()}, what="output")
    assert caught.value.where == "output['past']"
    assert "use_cache=False" in caught.value.fix


@given(values)
def test_a_tensor_that_an_output_holds_twice_is_one_when_built(value: Any) -> None:
    x = torch.ones(1)
    tensors, structure = flatten([x, value, (x, x)], what="output")
    first, _, (second, third) = builder(structure)([tensor.clone() for tensor in tensors])
    assert first is second is third
    assert len(leaf_paths(structure)) == len(tensors)


@given(values)
def test_caches_that_were_inputs_are_passed_on(value: Any) -> None:
    cache, other = DynamicCache(), DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    output = {"value": value, "past": cache, "again": [cache], "made": DynamicCache()}
    tensors, structure = flatten(output, what="output", given=((1, other), {"past": cache}))
    around, passed = passed_on(structure, len(tensors))
    assert passed == ((1, "past"),)
    found = builder(around)([*tensors, cache])
    assert found["past"] is found["again"][0] is cache
    assert type(found["made"]) is DynamicCache
    assert found["made"] is not output["made"]
    assert equal(found["value"], value)


def test_lists_are_made_anew_on_every_call() -> None:
    _, structure = flatten({"a": [torch.ones(1)], "b": []})
    build = builder(structure)
    first, second = build([1]), build([2])
    first["b"].append(3)
    assert second == {"a": [2], "b": []}


@pytest.mark.parametrize(
    ("what", "fix"),
    [("value", r"unpack it as keyword inputs, or pass dict\(\) of it; else pass"), ("output", "^return the tensors")],
)
def test_a_mapping_of_a_class_of_its_own_is_said_to_be_one(what: str, fix: str) -> None:
    """As tokenizers give it."""
    with pytest.raises(InputError, match="is a UserDict, of a class") as refused:
        flatten(UserDict(ids=torch.ones(2)), what=what)
    assert re.search(fix, refused.value.fix)
