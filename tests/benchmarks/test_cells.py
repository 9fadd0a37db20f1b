"""The networks are the published ones in parameters and multiply-adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cells

MEGA = 1e6

PUBLISHED = [
    pytest.param(cells.nasnet_a_mobile, 224, 5.3 * MEGA, 564 * MEGA, id="NASNet-A mobile"),
    pytest.param(cells.amoebanet_a, 331, 86.7 * MEGA, 23_100 * MEGA, id="AmoebaNet-A"),
    pytest.param(cells.darts, 224, 4.7 * MEGA, 530 * MEGA, id="DARTS"),  # see its docstring on 574M
    pytest.param(cells.randwire, 224, 5.6 * MEGA, 583 * MEGA, id="RandWire"),
]


def on_meta(make: Callable[[], nn.Module], pixels: int) -> tuple[nn.Module, Tensor]:
    """A model and one image that have shapes and no values."""
    with torch.device("meta"):
        return make().eval(), torch.empty(1, 3, pixels, pixels)


@pytest.mark.parametrize(("make", "pixels", "parameters", "multiply_adds"), PUBLISHED)
def test_parameters_and_multiply_adds_are_the_published_ones(
    make: Callable[[], nn.Module], pixels: int, parameters: float, multiply_adds: float
) -> None:
    model, image = on_meta(make, pixels)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert model(image).shape == (1, 1000)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
    assert counter.get_total_flops() / 2 == pytest.approx(multiply_adds, rel=0.01)
