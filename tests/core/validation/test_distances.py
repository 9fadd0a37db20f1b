"""Distances of many tensors, as they are of each."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.validation import distances
from nimble_core.validation.distances import Gap, all_finite, comparable, gaps, numbers, relative_error

FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8"))
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool),
    *FLOAT8,
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    one, other = [], []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=6)):
        shape = draw(st.sampled_from([(), (3,), (2, 0), (2, 3)]))
        torch.manual_seed(draw(st.integers(0, 99)))
        for made in (one, other):
            made.append(
                (3 * torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)).to(dtype)
            )
    return one, other


@given(pairs())
def test_each_pair_is_measured_like_alone(given: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    one, other = given
    assert gaps(one, other) == [gaps([a], [b])[0] for a, b in zip(one, other, strict=True)]
    for a, b, gap, size in zip(one, other, gaps(one, other), gaps(one), strict=True):
        if not a.numel():
            assert gap == size == Gap(0.0, 0.0)
        elif a.is_floating_point() or a.is_complex():
            wide = torch.complex128 if a.is_complex() else torch.float64
            apart = a.to(wide) - b.to(wide)
            assert gap == Gap(float(apart.norm()), float(apart.abs().max()))
            assert size == Gap(float(a.to(wide).norm()), float(a.to(wide).abs().max()))
        else:
            share = float((a != b).sum()) / a.numel()
            assert gap == Gap(pytest.approx(share), pytest.approx(share))
            assert size == Gap(1.0, 1.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_infinitely_far(value: float) -> None:
    broken, fine = torch.tensor([1.0, value]), torch.ones(2)
    assert gaps([broken, fine], [fine, fine]) == [Gap(math.inf, math.inf), Gap(0.0, 0.0)]
    assert gaps([broken])[0].norm == math.inf
    assert not all_finite([fine, broken])
    assert all_finite([fine, torch.tensor([1, 2]), torch.empty(0)])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_of_float8_stays_what_it_is(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    same = comparable(every)
    torch.testing.assert_close(same.double(), every.double(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(same.to(dtype).view(torch.uint8)[~same.isnan()], every.view(torch.uint8)[~same.isnan()])
    assert [all_finite([one]) for one in every] == every.double().isfinite().tolist()
    assert all_finite([every[every.double().isfinite()]])
    assert not all_finite([every])


def test_scalars_keep_their_order_whatever_their_types() -> None:
    scalars = [torch.tensor(2.5), torch.tensor(3), torch.tensor(True), torch.tensor([4.0], dtype=torch.float64)]
    assert numbers(scalars) == [2.5, 3.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("out", "reference", "error"),
    [
        ([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])], 0.25),
        ([torch.tensor([True])], [torch.tensor([True])], 0),
        ([torch.tensor([1 + 1j])], [torch.tensor([1 + 1j])], 0),
        ([torch.empty(0), torch.empty(0, dtype=torch.long)], [torch.empty(0), torch.empty(0, dtype=torch.long)], 0),
        ([torch.ones(2)], [torch.zeros(2)], math.sqrt(2)),
        ([torch.full((4,), 60000.0).half()], [torch.full((4,), 60000.0).half()], 0),
        ([torch.ones(2), torch.ones(1) * 3], [torch.ones(2), torch.ones(1)], 2),
        ([torch.ones(2)], [torch.ones(3)], math.inf),
        ([torch.ones(2)], [], math.inf),
        ([torch.ones(2) * math.nan], [torch.ones(2)], math.inf),
        ([], [], 0),
    ],
)
def test_relative_errors(out: list[torch.Tensor], reference: list[torch.Tensor], error: float) -> None:
    assert relative_error(out, reference) == pytest.approx(error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_scalars_of_two_devices_are_read_together() -> None:
    scalars = [torch.tensor(1.0, device="cuda"), torch.tensor(2.0), torch.tensor(3, device="cuda")]
    assert numbers(scalars) == [1.0, 2.0, 3.0]
    assert gaps([torch.ones(2, device="cuda"), torch.empty(0)], [torch.zeros(2, device="cuda"), torch.empty(0)]) == [
        Gap(pytest.approx(2**0.5), 1.0),
        Gap(0.0, 0.0),
    ]


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(distances).failed == 0
