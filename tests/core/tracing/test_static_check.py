"""Two recordings are compared in full: what was read on the host shows, and nothing static is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core import Nimble, NotStaticError, Options
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import check_static, identical, other_values

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


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.a if x.numpy().mean() > 0 else self.b)


def last_of_each(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([y[i, n - 1] for i, n in enumerate(lengths.tolist())])


def up_to(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return y[:, : max(lengths.tolist())]


def another_output(x: torch.Tensor) -> torch.Tensor:
    a, b = x * 2, x * 3
    return a if x.numpy().mean() > 0 else b


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.conj() if x.numpy().real.sum() > 0 else x, x)


WINDOW, OUTPUT = "begins elsewhere", "another tensor"
READ: dict[str, tuple[Model, tuple[torch.Tensor, ...], str]] = {
    "position": (Cache(), (torch.randn(2, 1, 3), torch.tensor([3])), f"buffer cache, which {WINDOW}"),
    "first position": (Cache(), (torch.randn(2, 1, 3), torch.tensor([0])), WINDOW),
    "lengths": (last_of_each, (Y, torch.tensor([2, 5, 8])), WINDOW),
    "lengths that are alike": (last_of_each, (Y, torch.tensor([5, 5, 5])), WINDOW),
    "lengths of one": (last_of_each, (Y, torch.tensor([1, 1, 1])), WINDOW),
    "longest": (up_to, (Y, torch.tensor([3, 7])), r"of shape \[3, 7, 4\] / "),
    "longest of one": (up_to, (Y, torch.tensor([1, 1])), r"of shape \[3, 1, 4\] / "),
    "mean": (another_output, (torch.randn(8),), OUTPUT),
    "mean of nothing": (another_output, (torch.full((8,), 1e-9),), OUTPUT),
    "a parameter": (Choice(), (torch.rand(3),), "parameter a in one run, parameter b in the other"),
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


def test_identical_tensors() -> None:
    nan, x = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 2.0])
    assert identical(nan, nan.clone())
    assert not identical(x, x.double())
    assert not identical(x, x + 1e-6)
    assert identical(x, x + 1e-3, 0.01)
    assert not identical(x, x + 0.1, 0.01)


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
