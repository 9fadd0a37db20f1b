"""The table of bounds: what each precision allows, and which precision counts."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.program import Access, Call, Program, TensorRef
from nimble_core.validation import bounds
from nimble_core.validation.bounds import (
    BOUNDS,
    Verdict,
    allowed_error,
    allowed_noise,
    lowest_precision,
    product_precision,
    tolerance_for,
    working_precision,
)

NORMS = st.floats(0.0, 1e6)
COUNTS = st.integers(1, 1_000_000)


@pytest.mark.parametrize(
    ("dtypes", "lowest", "precision"),
    [
        ([torch.float32], "", "float32"),
        ([torch.float32, torch.float16], "", "float16"),
        ([torch.float32], "bfloat16", "bfloat16"),
        ([torch.float64], "tf32", "tf32"),
        ([torch.complex64, torch.float64], "", "float32"),
        ([torch.float8_e4m3fn, torch.float32], "", "float8_e4m3"),
        ([torch.int64, torch.float8_e5m2fnuz], "", "float8_e5m2"),
        ([torch.int64, torch.bool], "float16", ""),
        ([], "float16", ""),
    ],
)
def test_the_lowest_precision_at_work_decides(dtypes: list[torch.dtype], lowest: str, precision: str) -> None:
    outputs = [torch.ones(1).to(dtype) for dtype in dtypes]
    assert working_precision(outputs, lowest) == precision
    assert tolerance_for(outputs, lowest) == BOUNDS[precision].tolerance
    assert (tolerance_for(outputs, lowest) == 0) == (precision == "")


@pytest.mark.parametrize(
    ("dtypes", "lowest"),
    [
        ([], ""),
        (["int64", "bool"], ""),
        (["float32", "float64", "int8"], "float32"),
        (["bfloat16", "float16"], "bfloat16"),
        (["complex64", "float64"], "float32"),
        (["float32", "float8_e5m2", "float8_e4m3fn"], "float8_e5m2"),
        (["bfloat16", "float8_e4m3fnuz", "float8_e8m0fnu"], "float8_e4m3"),  # the last holds scales
        (["float8_e8m0fnu"], ""),
    ],
)
def test_the_lowest_precision_of_a_program(dtypes: list[str], lowest: str) -> None:
    accesses = tuple(Access(TensorRef(0, 0, (1,), (1,), dtype, 1), False) for dtype in dtypes)
    assert lowest_precision(Program((Call(0, "aten.mm.default", (), accesses),), (), (), ())) == lowest


def test_float32_products_follow_the_users_switches() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for word, precision in (("tf32", "tf32"), ("bf16", "bfloat16"), ("ieee", "float32")):
            matmul.fp32_precision = word
            assert product_precision("cpu") == precision
            assert tolerance_for([torch.ones(1)]) == BOUNDS[precision].tolerance
            assert tolerance_for([torch.ones(1).double()]) == BOUNDS["float64"].tolerance
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("precision", [name for name in BOUNDS if name != "tf32" and name])
def test_bounds_are_above_one_rounding_and_below_what_is_wrong(precision: str) -> None:
    dtype = getattr(torch, precision + "fn" * (precision == "float8_e4m3"))
    one_rounding = torch.finfo(dtype).eps / 2
    for bound in (BOUNDS[precision].tolerance, BOUNDS[precision].floor):
        assert one_rounding < bound < 0.5


@given(NORMS, COUNTS, NORMS, st.sampled_from(sorted(BOUNDS)))
def test_more_noise_and_fewer_elements_allow_more(known: float, count: int, size: float, precision: str) -> None:
    assert 3 * known <= allowed_error(known, count) <= 15 * known
    assert allowed_error(known, count) >= allowed_error(known, count + 1)
    noise = allowed_noise(known, count, size, precision)
    drowned = 2 * known >= size and precision in ("float64", "float32", "tf32")
    assert noise == pytest.approx((100 if drowned else 1) * allowed_error(known, count))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_verdict_shows_something_only_where_inputs_matter(error: float, bound: float, effect: float) -> None:
    found = Verdict(error, bound, effect)
    assert found.right == (error <= bound)
    if bound > 1e-300:
        assert found.margin == pytest.approx(error / bound)
    assert found.telling == (effect > 0 and effect >= 10 * bound)
    assert found.followed == (effect > 0 and effect >= 10 * error)
    assert found.followed or not (found.right and found.telling)


def test_an_exact_bound_is_used_up_by_any_error() -> None:
    assert Verdict(0.0, 0.0, 1.0).margin == 0
    assert Verdict(1e-9, 0.0, 1.0).margin == math.inf


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(bounds).failed == 0
