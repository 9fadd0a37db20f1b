"""Calls that the host would wait for are refused, with the call, the line and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.utils.errors import CaptureError
from tests.support.models import Deep
from tests.support.recordings import assert_clean, recorded


def _compare(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return x * 2


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "bool": (_compare, "_local_scalar_dense|is_nonzero"),
    "float": (lambda x: x * float(x[0]), "_local_scalar_dense"),
    "int": (lambda x: x * int(x[0]), "_local_scalar_dense"),
    "index": (lambda x: x[: x.argmax()], "_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 0), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "repeat": (lambda x: torch.repeat_interleave(x, (x > 0).long()), "repeat_interleave"),
    "equal": (lambda x: x if torch.equal(x, x + 1) else x * 2, "equal"),
    "allclose": (lambda x: x if torch.allclose(x, x + 1) else x * 2, "allclose|_local_scalar|equal|nonzero"),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.abs().long()), "_local_scalar_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_need_the_host_are_refused(name: str) -> None:
    forward, operator = REFUSED[name]

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(x)

    model = nn.Sequential(nn.Identity(), Inner())
    with pytest.raises(CaptureError, match=operator) as caught:
        recorded(model, torch.randn(5))
    assert "in 1 at" in caught.value.where
    assert f"test_host_waits.py:{forward.__code__.co_firstlineno}"[:-1] in caught.value.where
    assert caught.value.fix
    assert_clean()
    assert recorded(Deep(), torch.randn(1, 8)).program.calls


def test_batch_norm_that_averages_over_all_batches_is_told_what_helps() -> None:
    model = nn.BatchNorm1d(4, momentum=None).train()
    with pytest.raises(CaptureError, match="written by the model, and read on the host") as caught:
        Nimble(model).prepare(torch.randn(3, 4), training=True)
    assert caught.value.fix == "give momentum a number: with None torch reads how many batches there were"


class Scaled(nn.Module):
    """A parametrization that reads a value."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight.sum().item()


def test_what_batch_norm_calls_is_not_batch_norm() -> None:
    model = nn.BatchNorm1d(4).train()
    nn.utils.parametrize.register_parametrization(model, "weight", Scaled())
    with pytest.raises(CaptureError, match="trained, and read on the host") as caught:
        Nimble(model).prepare(torch.randn(3, 4), training=True)
    assert "momentum" not in caught.value.fix


def test_random_numbers_drawn_into_a_constant_are_no_constant() -> None:
    with pytest.raises(CaptureError, match="gives the host a value"):
        Nimble(lambda x: x * torch.zeros(1).uniform_().item()).prepare(torch.randn(3))
