"""Modules prepared to train in place of the model, beside eager copies, on the host and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nimble_core import Nimble
from nimble_core.scheduling.options import Options
from tests.support.training_problems import made, twin

QUICK = Options(tune="off", policy="single")

CLOSE = 1e-3

"""Relative and absolute, on a GPU: float32 sums in another order, over a few steps."""


@dataclass(frozen=True)
class Place:
    """Where a test runs.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        options: what to prepare with.
        exact: how near to eager what is computed in the same order has to come there, and
        near: what is not.
    """

    device: str
    options: Options
    exact: float
    near: float

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def __call__(self, one: Any) -> Any:
        """Move a tensor or module there."""
        return one.to(self.device)


HOST = Place("cpu", QUICK, exact=0.0, near=1e-6)

STREAMS = Options(tune="off", policy="nimble")

GPU = Place("cuda", STREAMS, exact=CLOSE, near=CLOSE)


@pytest.fixture(params=[HOST, pytest.param(GPU, marks=pytest.mark.gpu)], ids=lambda place: place.device)
def on(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each place; on a GPU products and convolutions are in float32, by the same kernels in each run."""
    with exact_products() if request.param.cuda else nullcontext():
        yield request.param


@pytest.fixture
def exact() -> Iterator[None]:
    """Products and convolutions in float32, by the same kernels in each run."""
    with exact_products():
        yield


def on_gpu(*tensors: torch.Tensor) -> Any:
    """Move tensors to the GPU."""
    moved = tuple(one.to("cuda") for one in tensors)
    return moved if len(moved) > 1 else moved[0]


@contextmanager
def exact_products() -> Iterator[None]:
    """Products and convolutions on a GPU in float32, by the same kernels in each run."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
        torch.backends.cudnn.deterministic = deterministic


def pair(model: nn.Module, *args: Any, options: Options = QUICK, **kwargs: Any) -> tuple[Nimble, nn.Module]:
    """Return the model prepared for training, and a copy that stays eager."""
    eager = twin(model)
    return Nimble(model, options).prepare(*args, training=True, **kwargs), eager


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def prepared(name: str, options: Options = QUICK, device: str = "cpu") -> tuple[Any, Nimble, nn.Module]:
    """Return a problem of the whole step's tests, prepared for training."""
    found = made(name, device)
    inputs = found.draw()[0]
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    net, eager = pair(found.model, *args, options=options, **kwargs)
    return found, net, eager


def layer(model: nn.Module, at: int) -> Any:
    """Return a layer of a sequence, prepared or not."""
    return model.get_submodule(str(at))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for name, one in model.named_parameters()}


def assert_same_gradients(mine: nn.Module, theirs: nn.Module, *, rtol: float = 0.0) -> None:
    """Assert that the same parameters have gradients, of the same values."""
    a, b = gradients(mine), gradients(theirs)
    assert {name for name, one in a.items() if one is None} == {name for name, one in b.items() if one is None}
    for name, one in a.items():
        if one is not None:
            torch.testing.assert_close(one, b[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def loss_of(found: Any, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    output = called(model, inputs)
    return found.loss_fn(output) if targets is None else found.loss_fn(output, targets)


class CheckpointedNorm(nn.Module):
    """Its backward runs batch norm again, which counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)
