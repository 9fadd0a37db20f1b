"""Perturbed runs: what is moved, by how much, and what stays."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nimble_core.validation.rounding_noise import perturbed
from tests.support.noisy_steps import Attention, Step

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 9))
def test_results_move_by_their_last_places(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(50, 40).to(dtype)
    x[0] = 0
    with perturbed(seed):
        y, view, made, copied = x * 1, x.t(), torch.ones_like(x), x.clone().double()
    assert y.dtype is dtype
    assert torch.equal(view, x.t())
    assert torch.equal(copied, x.double())
    assert torch.equal(made, torch.ones(50, 40).to(dtype))
    assert not y[0].any()
    share = ((y - x).double().abs() / x.double().abs().clamp_min(1e-30)).max()
    assert 0 < share < 80 * torch.finfo(dtype).eps
    assert (y != x).double().mean() > 0.1


def test_random_numbers_layouts_and_integers_stay() -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    plain = F.dropout(x, 0.5)
    torch.manual_seed(3)
    with perturbed():
        moved = F.dropout(x, 0.5)
        counted = torch.arange(5) + 1
        again = moved * 1
    assert torch.equal(moved == 0, plain == 0)
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(counted, torch.arange(1, 6))
    assert torch.equal(torch.ones(3) * 2, torch.full((3,), 2.0))


def test_products_move_by_what_the_user_allows() -> None:
    x, matmul = torch.randn(40, 40), torch.backends.mkldnn.matmul
    plain, before, apart = x @ x, matmul.fp32_precision, {}
    try:
        for precision in ("ieee", "tf32"):
            matmul.fp32_precision = precision
            with perturbed():
                apart[precision] = float(((x @ x - plain) / plain).abs().max())
    finally:
        matmul.fp32_precision = before
    assert 0 < 10 * apart["ieee"] < apart["tf32"] < 2.0**-10


def test_the_same_seed_moves_alike_and_gradients_move_too() -> None:
    torch.manual_seed(0)
    step, (x, target) = Step(Attention.make()), Attention.case()
    runs = []
    for seed in (1, 1, 2):
        with perturbed(seed):
            runs.append(step(x, target))
    plain = step(x, target)
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not any(map(torch.equal, runs[0][1:], runs[2][1:]))
    assert not any(map(torch.equal, runs[0][1:], plain[1:]))
