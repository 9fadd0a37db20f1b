"""The passes over many objects: compiled and in Python they find the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.torch_compat import unchanged
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.torch_compat.unchanged import InPython, compiled, passes, same_objects


def _ways() -> list[Any]:
    built = compiled()
    missing = pytest.mark.skip(reason="no C++ compiler, or no headers of Python")
    return [pytest.param(InPython, id="Python"), pytest.param(built, id="compiled", marks=() if built else missing)]


ways = pytest.mark.parametrize("way", _ways())
TENSORS = [torch.zeros(2) for _ in range(3)]
LEAVES = st.sampled_from([*TENSORS, None, True, False, "a"])
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def copied(value: Any) -> Any:
    """The same objects in new containers."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


@ways
@given(now=NESTED, other=NESTED)
def test_nested_containers(way: Any, now: Any, other: Any) -> None:
    now, other = [now], [other]
    assert way.same_objects(now, copied(now))
    assert not way.same_objects(now, other) or InPython.same_objects(now, other)
    assert same_objects(now, other) == InPython.same_objects(now, other)


@ways
@pytest.mark.parametrize(
    ("now", "before"),
    [
        (TENSORS[0], TENSORS[1]),
        ([TENSORS[0]], [TENSORS[1]]),
        ({"a": TENSORS[0]}, {"a": TENSORS[1]}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ([None], []),
        ([[TENSORS[0], None]], [[TENSORS[0], TENSORS[0]]]),
        (nn.Linear(1, 1).forward, nn.Linear(1, 1).forward),
        (TENSORS[0].add, TENSORS[0].mul),
    ],
)
def test_what_differs_is_never_the_same(way: Any, now: Any, before: Any) -> None:
    assert not way.same_objects(now, before)
    assert not same_objects(now, before)


def test_what_the_compiled_pass_is_not_certain_of() -> None:
    """Equal objects, and keys in another order."""
    again = OrderedDict(a=TENSORS[0], b=TENSORS[1])
    again.move_to_end("a")
    assert same_objects(again, {"a": TENSORS[0], "b": TENSORS[1]})
    assert same_objects([1e300, "x" * 9], [1e300, "".join("x" * 9)])
    deep: Any = TENSORS[0]
    for _ in range(20):
        deep = [deep]
    assert same_objects(deep, copied(deep))


class Restless(nn.Module):
    """Its forward cannot be looked at."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    @property
    def forward(self) -> Any:
        raise self.error


@ways
def test_state(way: Any) -> None:
    net = nn.Linear(2, 2)
    owners, names = [vars(net)] * 2, ["training", "_parameters"]
    before = [net.training, dict(net._parameters), net.forward]
    assert way.same_state(owners, names, [net], before)
    assert way.same_state(owners, names, [], before[:2])
    for changed in ([False, *before[1:]], [True, {}, net.forward], [*before[:2], nn.Linear(2, 2).forward]):
        assert not way.same_state(owners, names, [net], changed)
    assert not way.same_state(owners, ["training", "no such"], [net], before)
    assert not way.same_state([], [], [Restless(AttributeError("forward"))], [net.forward])
    with pytest.raises(KeyboardInterrupt):
        way.same_state([], [], [Restless(KeyboardInterrupt())], [net.forward])


@ways
@given(changed=st.sampled_from(range(4)), what=st.sampled_from(["nothing", "in place", "data", "no memory", "swapped"]))
def test_memory_and_versions(way: Any, changed: int, what: str) -> None:
    tensors: list[torch.Tensor] = [nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3), torch.ones(6)[3:], torch.ones(4)]
    addresses, versions = [one.data_ptr() for one in tensors], [one._version for one in tensors]
    one = tensors[changed]
    with torch.no_grad():
        if what == "in place":
            one.add_(1)
        elif what == "data":
            one.data = torch.zeros_like(one)
        elif what == "no memory":
            torch.utils.swap_tensors(one, torch.eye(2).to_sparse())
        elif what == "swapped":
            torch.utils.swap_tensors(one, torch.ones(2, 3))
    if what == "no memory" and way is InPython:
        with pytest.raises(RuntimeError, match="storage"):
            way.same_memory(tensors, addresses)
    else:
        assert way.same_memory(tensors, addresses) == (what in ("nothing", "in place"))
    if what in ("nothing", "in place", "data"):
        with no_torch_function():
            assert way.same_versions(tensors, versions) == (what != "in place")
            assert not way.same_versions(tensors, versions[1:])


class Own(torch.Tensor):
    """A class of its own."""


KIND = (torch.Size([2, 3]), torch.float32, torch.device("cpu"))


@ways
@pytest.mark.parametrize(
    ("tensor", "same"),
    [
        (torch.ones(2, 3), True),
        (nn.Parameter(torch.ones(2, 3)), True),
        (torch.ones(3, 2).t(), True),
        (nn.Buffer(torch.ones(2, 3)), True),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3, 1), False),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(2, 3, device="meta"), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged), False),
        (torch.ones(2, 3).as_subclass(Own), False),
        (None, False),
        ([[1.0] * 3] * 2, False),
    ],
)
def test_kinds(way: Any, tensor: Any, same: bool) -> None:
    first = torch.zeros(2, 3)
    for found, wanted in (
        (way.inputs_like((KIND,), (), (tensor,), {}), [tensor]),
        (way.inputs_like((KIND, KIND), (), (first, tensor), {}), [first, tensor]),
        (way.inputs_like((KIND, KIND), ("y",), (first,), {"y": tensor}), [first, tensor]),
    ):
        assert found is None if not same else [*map(id, found)] == [*map(id, wanted)]


@ways
def test_inputs_of_other_names_or_number(way: Any) -> None:
    x = torch.zeros(2, 3)
    assert way.inputs_like((KIND, KIND), ("b", "a"), (), {"a": x, "b": x}) == [x, x]
    for args, kwargs in (((x, x), {}), ((x,), {}), ((), {"a": x}), ((), {"a": x, "c": x}), ((x,), {"a": x, "b": x})):
        assert way.inputs_like((KIND, KIND), ("b", "a"), args, kwargs) is None


@ways
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), max_size=12), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_copies_read_where_the_inputs_are(way: Any, calls: list[list[int]], refused: int) -> None:
    """A copy is changed where its input lies elsewhere than before; none where one is laid out otherwise."""
    kept = [torch.rand(4, 4) for _ in range(2)]
    inputs = [*kept, torch.rand(8, 4)[::2]]
    sources = [(ctypes.c_uint64 * 3)() for _ in range(2)]
    copies = tuple((i + 1, ctypes.addressof(one), ctypes.addressof(one) + 16) for i, one in enumerate(sources))
    changed: list[tuple[int, ...]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
    def change(graph: int, node: int, params: int, context: int) -> int:
        changed.append((graph, node, params, context))
        return len(changed) == refused

    assert not way.read_from(0, copies, 7, 8, (None, None), [1, 0], kept)  # off
    reading, at = [1, 1], ctypes.cast(change, ctypes.c_void_p).value
    for call in calls:
        given, before = [inputs[i] for i in call], list(reading)
        wanted = [one.data_ptr() for one in given]
        changed_before = len(changed)
        done = way.read_from(at, copies, 7, 8, (None, None), reading, given)
        moved = [i for i in range(2) if 2 not in call and wanted[i] != before[i]]
        failed = changed_before < refused <= changed_before + len(moved)
        assert done is (2 not in call and not failed)
        asked = moved[: refused - changed_before] if failed else moved
        assert changed[changed_before:] == [(7, i + 1, copies[i][1], 8) for i in asked]
        assert all(sources[i][2] == wanted[i] for i in asked)
        expected = [wanted[i] if i in asked else before[i] for i in range(2)]
        if failed:
            expected[asked[-1]] = 1
        assert reading == expected


@ways
def test_ready_is_only_what_answers_as_usual(way: Any) -> None:
    read: list[Any] = []
    asked, tensor = (lambda: 1, lambda: "a"), torch.zeros(2)

    def ready(answers: Any, bound: Any, given: Any = (1,)) -> Any:
        return way.ready(asked, answers, lambda args, kwargs: bound, lambda one: read.append(one) or True, given, {})

    assert ready((1, "a"), [tensor]) is True
    assert read.pop()[0] is tensor
    assert ready((1, "b"), [tensor]) is ready((2, "a"), [tensor]) is ready((1, "a"), None) is False
    followed = tensor.clone().requires_grad_()
    assert ready((1, "a"), [tensor, followed]) is False
    assert not read
    with torch.no_grad():
        assert ready((1, "a"), [tensor, followed]) is True
    with pytest.raises(ZeroDivisionError):
        way.ready((lambda: 1 / 0,), (0,), None, None, (), {})
    with torch.no_grad():
        bound = way.ready((), (), lambda *given: list(given), lambda one: one == [(3,), {"a": 4}], (3,), {"a": 4})
    assert bound is True


# -- compiling -----------------------------------------------------------------------------------------------------


def test_where_there_is_a_compiler_they_compile() -> None:
    """Else what follows would be skipped, and every call be slow, without a word."""
    if not (shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists()):
        pytest.skip("no C++ compiler, or no headers of Python")
    assert compiled() is not None


@pytest.fixture
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a machine that can compile them keeps them; nothing yet."""
    if compiled() is None:
        pytest.skip("no C++ compiler, or no headers of Python")
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


def test_they_are_compiled_once(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled() is not None
    (made,) = afresh.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(subprocess, "run", None)
    assert compiled() is not None
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(afresh / "damaged"))
    (afresh / "damaged" / "compiled").mkdir(parents=True, mode=0o700)
    (afresh / "damaged" / "compiled" / made.name).write_bytes(b"no library")
    assert compiled() is None


@pytest.mark.parametrize("place", ["file", "folder", "link"])
def test_what_others_could_have_put_there_is_not_run(afresh: Path, place: str) -> None:
    assert compiled() is not None
    (made,) = afresh.iterdir()
    if place == "link":
        os.replace(made, afresh.parent / "elsewhere")
        made.symlink_to(afresh.parent / "elsewhere")
    else:
        (made if place == "file" else afresh).chmod(0o777)
    assert compiled() is None


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true"])
def test_without_a_compiler_it_is_python(afresh: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert compiled() is None
    assert not any(afresh.iterdir())
    monkeypatch.setattr(unchanged, "_found", [])
    assert passes() is passes() is InPython


def test_a_torch_without_the_function_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "DATA_OF", unchanged.VERSION.__class__("torch._C:_no_such", "", ""))
    assert compiled() is None
