"""Out of memory is named with its amount, its line and its remedy; the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import DeviceError, Nimble, Options, TrainStep
from nimble_core.tracing.provenance import memory_explained
from nimble_viz import compare


class Greedy(nn.Module):
    """Asks for far too much on more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        if len(x) > 4:
            x = x + torch.empty(1 << 50)[:1]
        return self.layer(x)


QUICK = Options(tune="off")
LARGE = torch.ones(5, 4)
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "prepare": lambda model: Nimble(model, QUICK).prepare(LARGE),
    "step": lambda model: TrainStep(
        model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.1), options=QUICK
    ).prepare(LARGE),
    "compare": lambda model: compare(model, LARGE),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_named_and_the_model_left_as_it_was(way: str) -> None:
    greedy = Greedy()
    model = nn.Sequential(nn.ReLU(), greedy)
    net = Nimble(model, QUICK).prepare(LARGE[:2])
    with pytest.raises(DeviceError) as caught:
        WAYS[way](model)
    text = str(caught.value)
    assert "out of memory on the host, which was asked for 4194304 GiB more" in text
    assert "where: 1 at " in text
    assert "test_out_of_memory.py:" in text
    assert "a smaller batch" in text
    assert greedy.runs == 0
    with torch.no_grad():
        assert torch.equal(net(LARGE[:2]), model(LARGE[:2]))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "a GPU, .* for 2.50 GiB more"),
        (MemoryError(), "on the host$"),
    ],
)
def test_errors_of_allocators(error: Exception, told: str) -> None:
    def fail() -> Any:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("kernels do not run") from cause

    with pytest.raises(DeviceError) as caught, memory_explained(fail):
        fail()
    with pytest.raises(DeviceError, match=told):
        raise DeviceError(caught.value.what)
