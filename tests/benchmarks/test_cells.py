"""The networks are the published ones in parameters and multiply-adds, and replay as in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cells
from benchmarks.models import calibrated
from nimble_core import Nimble, Options

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


SMALL = [
    pytest.param(lambda: cells._stacks(cells.NASNET_A, 1, 8), id="NASNet-A"),
    pytest.param(lambda: cells._stacks(cells.AMOEBANET_A, 1, 16), id="AmoebaNet-A"),
    pytest.param(lambda: cells.darts(cells=4, width=8), id="DARTS"),
    pytest.param(lambda: cells.randwire(8, 6), id="RandWire"),
]


@pytest.mark.parametrize("make", SMALL)
def test_outputs_are_finite_move_with_the_input_and_replay_as_in_eager(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = calibrated(make(), lambda count: torch.randn(count, 3, 64, 64))
    first, second = torch.randn(2, 2, 3, 64, 64)
    with torch.inference_mode():
        expected = [model(x) for x in (first, second)]
    assert all(output.isfinite().all() for output in expected)
    assert (expected[0] - expected[1]).norm() > 0.05 * expected[0].norm()
    with closing(Nimble(model, Options(tune="off")).prepare(first)) as net:
        for x, output in zip((first, second), expected, strict=True):
            torch.testing.assert_close(net(x), output, rtol=1e-4, atol=1e-5)
