"""Two recordings are compared in full: what was read on the host shows, and nothing static is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core import Nimble, NotStaticError, Options
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import check_static, on_other_values, other_values
from tests.support.recordings import recorded

Y = torch.randn(3, 8, 4)


Model = Callable[..., Any]


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, 3))

    def forward(self, key: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        at = position.tolist()[0]
        self.cache[:, at : at + 1] = key
        return self.cache.sum(1)


def last_of_each(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([y[i, n - 1] for i, n in enumerate(lengths.tolist())])


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.conj() if x.numpy().real.sum() > 0 else x, x)


WINDOW = "begins elsewhere"

READ: dict[str, tuple[Model, tuple[torch.Tensor, ...], str]] = {
    "first position": (Cache(), (torch.randn(2, 1, 3), torch.tensor([0])), WINDOW),
    "lengths of one": (last_of_each, (Y, torch.tensor([1, 1, 1])), WINDOW),
    "conjugated": (conjugated, (torch.randn(3, 3, dtype=torch.complex64),), "conjugated or negated"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", READ)
def test_what_was_read_on_the_host_and_moves_a_window_is_refused(case: str, strict: bool) -> None:
    model, args, said = READ[case]
    with pytest.raises(NotStaticError, match=said) as caught:
        Nimble(model, Options(fuse="none", tune="off", strict=strict)).prepare(*args)
    assert "read on the host" in caught.value.what
    assert "test_static_check.py:" in caught.value.what, "the line that reads"
    assert caught.value.fix


MOVES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "slice": lambda x, n: x[n % max(len(x), 1) :],
    "transpose": lambda x, n: x.transpose(0, -1),
    "select": lambda x, n: x.select(-1, n % x.shape[-1])[..., None] if x.shape[-1] else x,
    "flatten": lambda x, n: x.reshape(-1)[None],
    "strided": lambda x, n: x.as_strided((1, 2), (1, 1), int(x.storage_offset()) + n % 2) if x.numel() > 3 else x,
    "in place": lambda x, n: (x * 2).add_(n),
    "multiply": lambda x, n: x * (n + 1),
    "constant": lambda x, n: x + torch.arange(x.shape[-1], dtype=x.dtype)[torch.tensor([n % max(x.shape[-1], 1)])],
}


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 5)), max_size=8),
    starts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    whole=st.booleans(),
)
def test_where_an_input_begins_in_larger_memory_counts_for_nothing(
    steps: list[tuple[str, int]], starts: tuple[int, int], whole: bool
) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        made = [x, y]
        for what, number in steps:
            one = MOVES[what](made[number % len(made)], number)
            made.append(one if one.dim() > 1 else one[None])
        return made[2:] if whole else made[-1:]

    found = []
    for start in starts:
        both = torch.randn(40)[start:]
        x, y = both[:12].view(3, 4), both[6:18].view(4, 3)  # a part of each is one of the other
        found.append(record(forward, Signature((x, y), {}), args=(x, y), kwargs={}))
    check_static(*found)


@given(
    numbers=st.lists(st.integers(-9, 9), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.int64, torch.int8, torch.float32, torch.float16, torch.bool, torch.complex64]),
)
def test_contrary_values_differ_at_every_place(numbers: list[int], dtype: torch.dtype) -> None:
    tensor = torch.tensor(numbers).to(dtype)
    (other,) = other_values([tensor, torch.ones(1)], how="contrary")[:1]
    assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
    assert bool((other != tensor).all())
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        assert other.max() <= max(tensor.max(), 1), "indices stay in range"
        assert other.min() >= min(tensor.min(), 0)


@pytest.mark.gpu
def test_constants_and_windows_on_a_gpu() -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        on_host, there = torch.zeros(3), torch.zeros(3, device="cuda")
        found = [on_host.to("cuda"), there.clone(), x * on_host.sum()]
        on_host += 1
        there += 1
        return [*found, on_host.to("cuda"), x[1:] * there[:1], x.view(3, 1).T]

    net = Nimble(forward, Options(fuse="none", tune="off")).prepare(torch.randn(9, device="cuda")[4:7])
    for start in (0, 5):
        x = torch.randn(9, device="cuda")[start : start + 3]
        torch.testing.assert_close(net(x), forward(x))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int8", "bool", "float8_e5m2", "float8_e4m3fn"])
def test_other_values_of_any_type(dtype: str) -> None:
    ascending = torch.arange(6).to(getattr(torch, dtype))
    other = other_values([ascending], 1)[0]
    assert (other.dtype, other.shape) == (ascending.dtype, ascending.shape)
    if "int" in dtype:
        assert sorted(other.tolist()) == ascending.tolist(), "none is out of range"
    elif "float" in dtype:
        assert not torch.equal(other.float(), ascending.float())


def test_a_branch_on_values_is_not_static() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Through a path that torch does not show: the list is read from memory.
            return torch.relu(x) if sum(x.detach().numpy().tolist()) > 0 else torch.tanh(x)

    model = nn.Sequential(Branch())
    first = recorded(model, torch.ones(3))
    second = recorded(model, -torch.ones(3))
    with pytest.raises(NotStaticError, match=r"relu.*tanh") as caught:
        check_static(first, second)
    assert "in 0 at" in caught.value.where
    assert "test_static_check.py" in caught.value.where


def test_another_argument_is_not_static() -> None:
    x = torch.ones(3)
    with pytest.raises(NotStaticError, match="other=1 / 2"):
        check_static(recorded(lambda x: x + 1, x), recorded(lambda x: x + 2, x))
    with pytest.raises(NotStaticError, match="shapes"):
        check_static(recorded(lambda x: x + 1, x), recorded(lambda x: x + 1, torch.ones(4)))


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    turned=st.booleans(),
    seed=st.integers(0, 5),
)
def test_other_values_are_of_the_same_kind(shape: list[int], dtype: torch.dtype, turned: bool, seed: int) -> None:
    tensor = (torch.randn(shape) * 5).abs().to(dtype)
    tensor = tensor.transpose(0, -1) if turned and tensor.dim() else tensor
    kept = tensor.clone()
    (other,) = other_values([tensor], seed)
    assert (other.shape, other.dtype, other.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert torch.equal(tensor, kept)
    if not (dtype.is_floating_point or dtype.is_complex):
        assert sorted(other.reshape(-1).tolist()) == sorted(tensor.reshape(-1).tolist())
    assert torch.equal(other_values([tensor], seed)[0], other)


@given(
    numbers=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    how=st.sampled_from(["", "scaled", "moved"]),
    seed=st.integers(0, 5),
)
def test_probabilities_stay_probabilities(numbers: list[float], dtype: torch.dtype, how: Any, seed: int) -> None:
    for tensor in (torch.tensor(numbers, dtype=dtype), torch.tensor(numbers, dtype=dtype).abs()):
        (other,) = other_values([tensor], seed, how)
        assert other.abs().max() <= tensor.abs().max()
        assert not (tensor >= 0).all() or (other >= 0).all()


def test_what_has_an_inverse_keeps_it_where_that_is_asked_for() -> None:
    matrix = torch.eye(4)
    seen: list[torch.Tensor] = []

    def factored(given: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(given[0])
        return torch.linalg.cholesky(given[0])

    values, factor = on_other_values(factored, [matrix])
    assert len(seen) == 2, "values in another order have no such factor"
    assert torch.equal(values[0], seen[1])
    torch.testing.assert_close(factor @ factor.T, values[0])
    assert not torch.equal(values[0], matrix)
    assert torch.equal(values[0], matrix * values[0][0, 0])


def test_a_model_that_takes_no_other_values_is_refused() -> None:
    def only(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x[0] == 0.25)
        return x * 2

    with pytest.raises(
        NotStaticError, match=r"not on the same in another order or scaled.*: RuntimeError: E"
    ) as caught:
        Nimble(only).prepare(torch.tensor([0.25, 0.75]))
    assert caught.value.where.startswith("tests/core/tracing/test_static_check.py:")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_values_share_memory_where_the_inputs_do() -> None:
    base = torch.randn(10)
    a, b, c, again = base[:6], base[4:], torch.randn(3), base[:6]
    others = other_values([a, b, c, c, again])
    assert torch.equal(others[0][4:], others[1][:2])
    assert others[2] is others[3]
    assert others[0].data_ptr() == others[4].data_ptr()
    assert not torch.equal(others[0], a)


def test_other_values_keep_expanded_inputs_expanded() -> None:
    (other,) = other_values([torch.randn(1, 3).expand(4, 3)])
    assert other.stride() == (0, 1)
    assert torch.equal(other[0], other[3])


@pytest.mark.parametrize(
    ("tensor", "looks"),
    [
        (torch.randn(60_000, 8), lambda x: (x.argmax(1) == 0).sum()),
        (torch.randint(0, 20, (65_536, 4)), lambda x: (x == 0).any(1).sum()),
    ],
)
def test_what_is_seen_within_rows_of_large_tensors_is_another(tensor: torch.Tensor, looks: Callable[..., Any]) -> None:
    found = [int(looks(other_values([tensor, torch.ones(1)], seed)[0])) for seed in range(8)]
    assert found.count(int(looks(tensor))) < 3
