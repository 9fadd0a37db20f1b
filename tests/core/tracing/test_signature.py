from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nimble_core.tracing.signature import Signature, require_plain
from nimble_core.utils.errors import InputError

X = torch.zeros(2, 3)


class Doubles(torch.Tensor):
    """Whatever is computed of it is twice as much."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if isinstance(result, torch.Tensor) else result


class Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


CLASSES = {
    "Doubles": lambda x: x.as_subclass(Doubles),
    "Wrapper": Wrapper,
    "FakeTensor": lambda x: FakeTensorMode().from_tensor(x),
}


def refused(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    assert signature.bind(args, kwargs) is None
    return signature.explain(args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.zeros(2, 4), X), {"m": X}, ["args[0]", "float32[2, 3] on cpu", "float32[2, 4] on cpu"]),
        ((X.double(), X), {"m": X}, ["args[0]", "expected float32", "given float64"]),
        ((X, X.to("meta")), {"m": X}, ["args[1]", "on cpu", "on meta"]),
        ((X,), {"m": X}, ["expected 2 positional", "given 1"]),
        ((X, X), {}, ["expected keyword 'm'"]),
        ((X, X), {"m": X, "n": X}, ["keyword 'n' given"]),
        ((X, 3), {"m": X}, ["args[1]", "expected a tensor", "given 3"]),
        ((X, X), {"m": {"a": X}}, ["kwargs['m']", "expected a tensor", "given dict"]),
    ],
)
def test_flat_inputs_that_do_not_fit_are_explained(args: Any, kwargs: Any, words: list[str]) -> None:
    text = refused(Signature((X.clone(), X.clone()), {"m": X.clone()}), args, kwargs)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (({"a": X, "b": [X, 3]}, 4), ["args[0]['b'][1]", "expected 2", "given 3"]),
        (({"a": X, "b": (X, 2)}, 4), ["args[0]['b']", "expected list", "given tuple"]),
        (({"a": X, "c": [X, 2]}, 4), ["args[0]", "expected keys ['a', 'b']", "given ['a', 'c']"]),
        (({"a": X, "b": [torch.zeros(3), 2]}, 4), ["args[0]['b'][0]", "[2, 3]", "[3]"]),
    ],
)
def test_nested_inputs_that_do_not_fit_are_explained(args: Any, words: list[str]) -> None:
    signature = Signature(({"a": X.clone(), "b": [X.clone(), 2]}, 4), {})
    text = refused(signature, args, {})
    for word in words:
        assert word in text
    assert signature.bind(({"a": X, "b": [X, 2]}, 4), {}) is not None


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool])
tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), shapes, dtypes)


@given(st.lists(tensors, min_size=1, max_size=3), st.lists(tensors, min_size=1, max_size=3), st.booleans())
def test_bind_takes_exactly_equal_shapes_and_dtypes(a: list[Any], b: list[Any], nested: bool) -> None:
    def wrap(values: list[Any]) -> tuple[Any, ...]:
        return (values,) if nested else tuple(values)

    signature = Signature(wrap(a), {})
    fits = [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in b]
    bound = signature.bind(wrap(b), {})
    assert (bound is not None) == fits
    if bound is None:
        assert "no difference" not in signature.explain(wrap(b), {})
    else:
        assert all(x is y for x, y in zip(bound, b, strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_are_refused_by_name(name: str) -> None:
    other = CLASSES[name](X)
    assert f"expected a torch.Tensor, given a {name}" in refused(Signature((X.clone(),), {}), (other,), {})
    with pytest.raises(InputError, match=f"x is a {name}, a class of its own") as caught:
        require_plain(other, "x")
    assert ("as_subclass" in caught.value.fix) == (name == "Doubles"), "the others stand for tensors elsewhere"
    if name == "Doubles":
        require_plain(other.as_subclass(torch.Tensor), "x")


def test_keywords_in_another_order() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    signature = Signature((), {"a": X, "b": X[0]})
    bound = signature.bind((), {"b": X[1], "a": X})
    assert bound is not None
    assert bound[0] is X
    flags = Signature((a,), {"flag": True, "b": b})
    assert flags.bind((b,), {"b": a, "flag": True}) == [b, a]
    assert "kwargs['flag']" in refused(flags, (a,), {"b": b, "flag": False})


def test_a_tensor_given_twice_has_to_be_given_twice_again() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    signature = Signature((a, a), {})
    assert signature.bind((b, b), {}) is not None
    assert "args[1]: expected the same tensor as args[0]" in refused(signature, (a, b), {})
    apart = Signature((a, b), {})
    assert apart.bind((b, b), {}) is not None
    nested = Signature(([a, a],), {"c": a})
    assert nested.bind(([b, b],), {"c": b}) is not None
    assert "kwargs['c']" in refused(nested, ([b, b],), {"c": a})


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


DENSE, NESTED, ITERATOR = (
    r"kwargs\['x'\] is .*not a dense",
    r"args\[1\] is a nested tensor",
    r"args\[1\]\[0\] is a .*cannot be",
)
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "nothing": (lambda: ((), {}), "^no tensor among the inputs", "at least one"),
    "devices": (lambda: ((X,), {"y": X.to("meta")}), r"args\[0\] is on cpu, kwargs\['y'\] on meta", "move every input"),
    "sparse": (lambda: ((X,), {"x": X.to_sparse()}), DENSE, "to_dense"),
    "quantized": (
        lambda: ((torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),), {}),
        r"args\[0\] is quantized",
        "dequantize",
    ),
    "nested": (lambda: ((X, torch.nested.nested_tensor([X, X])), {}), NESTED, "to_padded_tensor"),
    "generator": (lambda: ((X, [(one for one in [X])]), {}), ITERATOR, "pass a list"),
    "object": (lambda: ((X, [Box(X)]), {}), r"args\[1\]\[0\] is a Box, of a class that is not known", "dataclass"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", REFUSED)
def test_inputs_that_are_refused(way: str) -> None:
    make, words, fix = REFUSED[way]
    args, kwargs = make()
    with pytest.raises(InputError, match=words) as caught:
        Signature(args, kwargs)
    assert fix in caught.value.fix


def test_positional_inputs_go_by_the_names_that_users_know() -> None:
    """In paths, in what differs, and in what is no input; those without a name are numbered."""
    signature = Signature((X, [X[0], [0, X[1]]], 1), {"m": X[0]}, ("x", "rows"))
    assert signature.paths == ["x", "rows[0]", "rows[1][1]", "kwargs['m']"]
    assert "rows[1][1]: expected float32[3]" in refused(signature, (X, [X[0], [0, X]], 1), {"m": X[0]})
    assert "args[2]: expected 1, given 7" in refused(signature, (X, [X[0], [0, X[1]]], 7), {"m": X[0]})
    with pytest.raises(InputError) as caught:
        signature.explain((X, [X[0], [0, Box(X)]], 1), {"m": X[0]})
    assert caught.value.what.startswith("rows[1][1] is a Box")
