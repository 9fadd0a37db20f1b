"""The table of bounds: what each precision allows, and which precision counts."""

from __future__ import annotations

import doctest

import pytest
import torch

from nimble_core.ir.program import Access, Call, Program, TensorRef
from nimble_core.validation import bounds
from nimble_core.validation.bounds import BOUNDS, lowest_precision, product_precision, tolerance_for, working_precision


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


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(bounds).failed == 0
