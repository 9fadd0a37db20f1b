from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BatchEncoding

from nimble_core.tracing.signature import Signature, require_plain, take_apart
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


PLAIN = [torch.clone, nn.Parameter, nn.Buffer, torch.Tensor.detach]
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
        ((X, torch.zeros(2)), {"m": X}, ["args[1]", "[2, 3]", "[2]"]),
        ((X.double(), X), {"m": X}, ["args[0]", "expected float32", "given float64"]),
        ((X, X.to("meta")), {"m": X}, ["args[1]", "on cpu", "on meta"]),
        ((X,), {"m": X}, ["expected 2 positional", "given 1"]),
        ((X, X, X), {"m": X}, ["expected 2 positional", "given 3"]),
        ((X, X), {}, ["expected keyword 'm'"]),
        ((X, X), {"m": X, "n": X}, ["keyword 'n' given"]),
        ((X, X), {"n": X}, ["'m'", "'n'"]),
        ((X, 3), {"m": X}, ["args[1]", "expected a tensor", "given 3"]),
        ((X, None), {"m": X}, ["args[1]", "expected a tensor", "given None"]),
        ((X, [X]), {"m": X}, ["args[1]", "expected a tensor", "given list"]),
        ((X, X), {"m": {"a": X}}, ["kwargs['m']", "expected a tensor", "given dict"]),
    ],
)
def test_flat_inputs_that_do_not_fit_are_explained(args: Any, kwargs: Any, words: list[str]) -> None:
    text = refused(Signature((X.clone(), X.clone()), {"m": X.clone()}), args, kwargs)
    for word in words:
        assert word in text


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: X.to_sparse(), "given a sparse_coo one"),
        (lambda: X.to_sparse_csr(), "given a sparse_csr one"),
        (lambda: X.to_mkldnn(), "given a _mkldnn one"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]]), "given a nested one"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), "given a nested one"),
    ],
)
@pytest.mark.parametrize("nest", [lambda one: one, lambda one: [one]])
def test_what_is_not_dense_does_not_fit(make: Any, word: str, nest: Any) -> None:
    text = refused(Signature((nest(X.clone()),), {}), (nest(make()),), {})
    assert "expected a dense tensor, float32[2, 3] on cpu" in text
    assert word in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (({"a": X, "b": [X, 2]}, 5), ["args[1]", "expected 4", "given 5"]),
        (({"a": X, "b": [X, 3]}, 4), ["args[0]['b'][1]", "expected 2", "given 3"]),
        (({"a": X, "b": [X, 2, X]}, 4), ["args[0]['b']", "expected", "given"]),
        (({"a": X, "b": (X, 2)}, 4), ["args[0]['b']", "expected list", "given tuple"]),
        (({"a": X, "c": [X, 2]}, 4), ["args[0]", "expected keys ['a', 'b']", "given ['a', 'c']"]),
        (({"a": X, "b": [torch.zeros(3), 2]}, 4), ["args[0]['b'][0]", "[2, 3]", "[3]"]),
        ((X, 4), ["args[0]", "expected dict", "given a tensor"]),
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


@given(
    st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4),
    st.lists(st.sampled_from([*PLAIN, *CLASSES.values()]), min_size=4, max_size=4),
    st.booleans(),
)
def test_bind_takes_plain_tensors_only(prepared: list[Any], given: list[Any], nested: bool) -> None:
    def inputs(makes: list[Any]) -> tuple[Any, ...]:
        made = [make(X) for make in makes]
        return (made,) if nested else tuple(made)

    signature, given = Signature(inputs(prepared), {}), given[: len(prepared)]
    others = [(at, name) for at, make in enumerate(given) for name, other in CLASSES.items() if make is other]
    now = inputs(given)
    bound = signature.bind(now, {})
    assert (bound is None) == bool(others)
    for at, name in others[:1]:
        words = f"{signature.paths[at]}: expected a torch.Tensor, given a {name}"
        assert words in signature.explain(now, {})


@pytest.mark.parametrize("make", PLAIN)
def test_plain_tensors_are_let_through(make: Any) -> None:
    require_plain(make(X), "x")


@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_are_refused_by_name(name: str) -> None:
    other = CLASSES[name](X)
    with pytest.raises(InputError, match=f"x is a {name}, a class of its own") as caught:
        require_plain(other, "x")
    assert ("as_subclass" in caught.value.fix) == (name == "Doubles"), "the others stand for tensors elsewhere"
    if name == "Doubles":
        require_plain(other.as_subclass(torch.Tensor), "x")


def holding_itself(kind: str) -> Any:
    value: Any = {"x": X} if kind == "dict" else [X]
    if kind == "dict":
        value["more"] = [0, value]
    else:
        value.append({"more": value})
    return value


@pytest.mark.parametrize(("kind", "path"), [("list", "[1]['more']"), ("dict", "['more'][1]")])
@pytest.mark.parametrize("keyword", [False, True])
def test_inputs_that_contain_themselves_are_an_error_that_says_where(kind: str, path: str, keyword: bool) -> None:
    signature = Signature((X,), {"m": [X, 3]}) if keyword else Signature((X, [X, 3]), {})
    value = holding_itself(kind)
    args, kwargs = ((X,), {"m": value}) if keyword else ((X, value), {})
    name = "kwargs['m']" if keyword else "args[1]"
    assert signature.bind(args, kwargs) is None
    for ask in (Signature, signature.explain, take_apart):
        with pytest.raises(InputError) as caught:
            ask(args, kwargs)
        assert caught.value.what == f"{name} is a {kind} that contains itself"
        assert caught.value.where == name + path


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
    "no tensor": (lambda: ((1, "a", [], {}), {}), "^no tensor among the inputs", "at least one"),
    "devices": (lambda: ((X,), {"y": X.to("meta")}), r"args\[0\] is on cpu, kwargs\['y'\] on meta", "move every input"),
    "sparse": (lambda: ((X,), {"x": X.to_sparse()}), DENSE, "to_dense"),
    "compressed": (lambda: ((X,), {"x": torch.eye(3).to_sparse_csr()}), DENSE, "to_dense"),
    "blocked": (lambda: ((X,), {"x": X.to_mkldnn()}), DENSE, "to_dense"),
    "quantized": (
        lambda: ((torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),), {}),
        r"args\[0\] is quantized",
        "dequantize",
    ),
    "nested": (lambda: ((X, torch.nested.nested_tensor([X, X])), {}), NESTED, "to_padded_tensor"),
    "jagged": (
        lambda: ((X, torch.nested.nested_tensor([X, X], layout=torch.jagged)), {}),
        NESTED,
        "to_padded_tensor",
    ),
    "iterator": (lambda: ((X, [iter([X])]), {}), ITERATOR, "pass a list"),
    "generator": (lambda: ((X, [(one for one in [X])]), {}), ITERATOR, "pass a list"),
    "hidden tensor": (lambda: ((Box(X),), {}), r"args\[0\] is a Box, which holds tensors", "dataclass"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", REFUSED)
def test_inputs_that_are_refused(way: str) -> None:
    make, words, fix = REFUSED[way]
    args, kwargs = make()
    with pytest.raises(InputError, match=words) as caught:
        Signature(args, kwargs)
    assert fix in caught.value.fix


def test_a_hidden_tensor_is_no_match_in_a_call() -> None:
    assert Signature((X, [3]), {}).bind((X, [Box(X)]), {}) is None


def test_an_object_that_was_changed_in_place_is_another() -> None:
    class Config:
        def __init__(self) -> None:
            self.sizes, self.more = [1, 2], {"a": 3}

    config = Config()
    signature = Signature((X, config), {})
    assert signature.bind((X, config), {}) is not None
    assert signature.bind((X, Config()), {}) is not None
    config.more["a"] = 4
    assert "args[1].more['a']: expected 3, given 4" in refused(signature, (X, config), {})


def test_zero_dimensional_and_empty_tensors() -> None:
    signature = Signature((torch.tensor(1.0), torch.zeros(0, 3)), {})
    assert signature.bind((torch.tensor(2.0), torch.zeros(0, 3)), {}) is not None
    assert signature.bind((torch.zeros(1), torch.zeros(0, 3)), {}) is None
    assert signature.bind((torch.tensor(2.0), torch.zeros(3, 0)), {}) is None


def test_a_hugging_face_encoding_is_taken_unpacked() -> None:
    def encoding(length: int) -> BatchEncoding:
        return BatchEncoding({"ids": torch.zeros(1, length, dtype=torch.long), "mask": torch.ones(1, length)})

    unpacked = Signature((), dict(**encoding(4)))
    assert unpacked.paths == ["kwargs['ids']", "kwargs['mask']"]
    assert unpacked.bind((), dict(**encoding(4))) is not None
    assert "kwargs['ids']" in refused(unpacked, (), dict(**encoding(5)))
    with pytest.raises(InputError, match=r"args\[0\] is a BatchEncoding") as caught:
        Signature((encoding(4),), {})
    assert caught.value.where == "args[0].data['ids']"


def test_as_text() -> None:
    assert str(Signature((X,), {"m": X[0].long()})) == "args[0]: float32[2, 3] on cpu, kwargs['m']: int64[3] on cpu"


@given(
    depth=st.integers(0, 3),
    wide=st.integers(0, 11),
    at=st.integers(0, 1),
    called=st.lists(st.sampled_from("abc"), max_size=2),
)
def test_positional_inputs_go_by_the_names_that_users_know(depth: int, wide: int, at: int, called: list[str]) -> None:
    """In paths, in what differs, and in what is no input; those without a name are numbered."""

    def inputs(value: Any) -> tuple[Any, ...]:
        for _ in range(depth):
            value = [*[0] * wide, value]
        return (value, X) if at == 0 else (X, value)

    signature = Signature(inputs(torch.zeros(1)), {"m": X[0]}, called)
    root = called[at] if at < len(called) else f"args[{at}]"
    path = root + f"[{wide}]" * depth
    assert path in signature.paths
    assert "kwargs['m']" in signature.paths
    assert f"{path}: expected float32[1]" in refused(signature, inputs(torch.zeros(2)), {"m": X[0]})
    assert f"{path}: expected a tensor, given 7" in refused(signature, inputs(7), {"m": X[0]})
    with pytest.raises(InputError) as caught:
        signature.explain(inputs(Box(X)), {"m": X[0]})
    assert caught.value.what.startswith(f"{path} is a Box")
    assert caught.value.where == f"{path}.held"
