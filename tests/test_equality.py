from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.equality import TOLERANCE, check_equality, relative_error, tolerance_for

A, B = torch.linspace(1, 2, 5), torch.linspace(-3, 1, 5)


def double(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0] * 2]


CASES = [([A], [A * 2]), ([B], [B * 2])]


def test_an_equal_replay_passes() -> None:
    check = check_equality("nimble", double, CASES)
    assert (check.name, check.passed, check.reason, check.relative_error) == ("nimble", True, "", 0.0)
    assert check.input_effect > 10 * check.tolerance


@given(st.floats(1e-8, 1.0))
def test_an_error_is_measured_relative_and_judged_by_the_tolerance(size: float) -> None:
    check = check_equality("nimble", lambda inputs: [inputs[0].double() * 2 * (1 + size)], CASES)
    assert check.relative_error == pytest.approx(size, rel=1e-3, abs=1e-9)
    assert check.passed == (check.relative_error <= TOLERANCE["float32"])
    assert bool(check.reason) != check.passed


def test_an_output_that_ignores_the_input_makes_the_check_void() -> None:
    constant = [torch.ones(3)]
    check = check_equality("nimble", lambda inputs: constant, [([A], constant), ([B], constant)])
    assert not check.passed
    assert "void" in check.reason
    assert check.input_effect == 0


def test_outputs_that_hardly_move_make_the_check_void() -> None:
    cases = [([x], [1000 + x * 1e-3]) for x in (A, B)]
    check = check_equality("nimble", lambda inputs: [1000 + inputs[0] * 1e-3], cases)
    assert not check.passed
    assert "void" in check.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_eager_outputs_that_are_not_finite_make_the_check_void(bad: float) -> None:
    cases = [([A], [A * bad]), ([B], [B * bad])]
    check = check_equality("nimble", lambda inputs: [inputs[0] * bad], cases)
    assert not check.passed
    assert "not finite" in check.reason
    assert math.isfinite(check.relative_error)
    assert math.isfinite(check.input_effect)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replay_that_is_not_finite_fails(bad: float) -> None:
    check = check_equality("nimble", lambda inputs: [inputs[0] * bad], CASES)
    assert not check.passed
    assert "differ" in check.reason


def test_a_buffer_overwritten_by_the_next_run_is_found() -> None:
    buffer = torch.empty(5)
    check = check_equality("nimble", lambda inputs: [torch.mul(inputs[0], 2, out=buffer)], CASES)
    assert not check.passed


def test_an_error_on_the_second_round_only_is_found() -> None:
    runs: list[int] = []

    def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        runs.append(1)
        return [inputs[0] * (2 if len(runs) < 4 else 3)]

    assert not check_equality("nimble", replay, CASES).passed


def test_a_stale_replay_is_found() -> None:
    assert not check_equality("nimble", lambda inputs: [A * 2], CASES).passed


def test_one_wrong_output_among_several_fails() -> None:
    cases = [([x], [x, x * 2, x.sum()]) for x in (A, B)]
    assert check_equality("n", lambda i: [i[0], i[0] * 2, i[0].sum()], cases).passed
    assert not check_equality("n", lambda i: [i[0], i[0] * 2, i[0].sum() + 1], cases).passed
    assert not check_equality("n", lambda i: [i[0], i[0] * 2.1, i[0].sum()], cases).passed


def test_inputs_that_the_replay_writes_do_not_spoil_the_case() -> None:
    kept = A.clone()
    assert check_equality("n", lambda inputs: [inputs[0].mul_(2)], CASES).passed
    assert torch.equal(A, kept)


def test_relative_error_of_other_types() -> None:
    assert relative_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert relative_error([torch.tensor([True])], [torch.tensor([True])]) == 0
    assert relative_error([torch.tensor([1 + 1j])], [torch.tensor([1 + 1j])]) == 0
    assert relative_error([torch.empty(0)], [torch.empty(0)]) == 0
    assert relative_error([torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]) == 0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == pytest.approx(math.sqrt(2))
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    assert relative_error([big], [big]) == 0


def test_integer_outputs() -> None:
    cases = [([x], [(x * 10).long()]) for x in (A, B)]
    assert check_equality("n", lambda i: [(i[0] * 10).long()], cases).passed
    assert not check_equality("n", lambda i: [(i[0] * 10).long() + 1], cases).passed


def test_integers_that_never_change_make_the_check_void() -> None:
    same = [torch.tensor([1, 2])]
    check = check_equality("n", lambda inputs: same, [([A], same), ([B], same)])
    assert not check.passed
    assert "void" in check.reason


def test_no_outputs_is_void() -> None:
    assert not check_equality("n", lambda inputs: [], [([A], []), ([B], [])]).passed


def test_another_shape_or_number_of_outputs_fails() -> None:
    assert not check_equality("n", lambda i: [(i[0] * 2)[:1]], CASES).passed
    assert not check_equality("n", lambda i: [i[0] * 2, i[0]], CASES).passed


def test_tolerances() -> None:
    assert tolerance_for([torch.ones(1)]) == TOLERANCE["float32"]
    assert tolerance_for([torch.ones(1), torch.ones(1).half()]) == TOLERANCE["float16"]
    assert tolerance_for([torch.ones(1).bfloat16()]) == TOLERANCE["bfloat16"]
    assert tolerance_for([torch.ones(1).long()]) == 0
    assert tolerance_for([]) == 0
