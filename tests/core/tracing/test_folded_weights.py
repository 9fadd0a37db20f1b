"""Constants are computed again in place, or not touched at all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nimble_core.tracing.folded_weights import Folded
from nimble_core.utils.errors import DeviceError, InputError
from tests.support.folded_models import folded, folds_of, made


@torch.no_grad()
def test_constants_follow_in_their_own_memory() -> None:
    model = made()
    folds = folded(model)
    before = [(one.data_ptr(), one.stride(), one.clone()) for one in folds.constants]
    for parameter in model.parameters():
        parameter.mul_(-2)
    folds.refresh()
    for constant, value, (pointer, strides, old) in zip(folds.constants, folds_of(model)(), before, strict=True):
        assert torch.equal(constant, value)
        assert not torch.equal(constant, old)
        assert (constant.data_ptr(), constant.stride()) == (pointer, strides)


@pytest.mark.parametrize(
    "mode", [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
@pytest.mark.parametrize("made_under", [nullcontext, torch.inference_mode])
def test_the_callers_modes_do_not_matter(mode: Any, made_under: Any) -> None:
    one, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with made_under():
        constant = torch.zeros(4, 4)
    folds = Folded(lambda: [one @ other], (constant,), (("one", one), ("other", other)))
    with mode():
        folds.refresh()
    assert torch.equal(constant, (one @ other).detach())
    assert not constant.requires_grad


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([torch.ones(2), torch.ones(4)], r"float32\[3\], now .*float32\[4\]"),
        ([torch.ones(2), torch.ones(3, dtype=torch.float64)], r"now they are float32\[2\], float64\[3\]"),
        ([torch.ones(2), torch.ones(3), torch.ones(1)], "folded weights were"),
    ],
)
def test_what_no_longer_fits_is_refused_and_nothing_is_written(values: list[torch.Tensor], words: str) -> None:
    constants = torch.zeros(2), torch.zeros(3)
    with pytest.raises(InputError, match=words) as caught:
        Folded(lambda: values, constants, ()).refresh()
    assert "prepare" in caught.value.fix
    assert not any(one.any() for one in constants)


def test_a_failure_to_compute_is_explained() -> None:
    def compute() -> list[torch.Tensor]:
        return [torch.ones(2) @ torch.ones(3)]

    with pytest.raises(DeviceError, match="cannot be computed again") as caught:
        Folded(compute, (torch.zeros(1),), ()).refresh()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_constant_that_is_the_parameter_itself_is_left_alone() -> None:
    weight = torch.ones(3, 1, 1, 1)
    same = weight.contiguous(memory_format=torch.channels_last)
    assert same.data_ptr() == weight.data_ptr()
    version = weight._version
    Folded(lambda: [weight.contiguous(memory_format=torch.channels_last)], (same,), (("weight", weight),)).refresh()
    assert weight._version == version
