"""The networks are the published ones in counts, channels and sizes; any genotype builds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cells
from benchmarks.cells import OPERATIONS, Cell, CellNetwork, FactorizedReduction, Genotype, Node
from benchmarks.models import calibrated
from nimble_core import Nimble, Options

MEGA = 1e6

PUBLISHED = [
    pytest.param(cells.nasnet_a_mobile, 224, 5.3 * MEGA, 564 * MEGA, id="NASNet-A mobile"),
    pytest.param(cells.amoebanet_a, 331, 86.7 * MEGA, 23_100 * MEGA, id="AmoebaNet-A"),
    pytest.param(cells.darts, 224, 4.7 * MEGA, 530 * MEGA, id="DARTS"),  # see its docstring on 574M
    pytest.param(cells.randwire, 224, 5.6 * MEGA, 583 * MEGA, id="RandWire"),
]

SEARCHES = [cells.NASNET_A, cells.AMOEBANET_A, cells.DARTS_V2]


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


NASNET_SHAPES = [(44, 56), (88, 28), *4 * [(264, 28)], (352, 14), *4 * [(528, 14)], (704, 7), *4 * [(1056, 7)]]
DARTS_SHAPES = [*4 * [(192, 28)], *5 * [(384, 14)], *5 * [(768, 7)]]
AMOEBANET_SHAPES = [
    *((5 * 47, 83), (5 * 95, 42)),
    *6 * [(4 * 190, 42)],
    *((5 * 380, 21), *6 * [(4 * 380, 21)]),
    *((5 * 760, 11), *6 * [(4 * 760, 11)]),
]


@pytest.mark.parametrize(
    ("make", "pixels", "shapes"),
    [
        pytest.param(cells.nasnet_a_mobile, 224, NASNET_SHAPES, id="NASNet-A mobile"),
        pytest.param(cells.amoebanet_a, 331, AMOEBANET_SHAPES, id="AmoebaNet-A"),
        pytest.param(cells.darts, 224, DARTS_SHAPES, id="DARTS"),
    ],
)
def test_channels_and_sizes_after_every_cell(
    make: Callable[[], CellNetwork], pixels: int, shapes: list[tuple[int, int]]
) -> None:
    model, image = on_meta(make, pixels)
    seen: list[tuple[int, int]] = []
    for cell in model.cells:
        cell.register_forward_hook(lambda _, __, output: seen.append((output.shape[1], output.shape[2])))
    model(image)
    assert seen == shapes


@pytest.mark.parametrize("genotype", [part for found in SEARCHES for part in (found.normal, found.reduction)])
def test_nodes_read_what_is_there_and_everything_reaches_the_output(genotype: Genotype) -> None:
    used = set(genotype.outputs)
    for state, node in reversed(list(enumerate(genotype.nodes, 2))):
        assert {node.left, node.right} <= OPERATIONS.keys()
        assert max(node.left_of, node.right_of) < state
        assert state in used
        used |= {node.left_of, node.right_of}
    assert {0, 1} <= used


@st.composite
def genotypes(draw: st.DrawFn) -> Genotype:
    """Up to four nodes that read any earlier states, some of whose states are outputs."""
    name = st.sampled_from(sorted(OPERATIONS))
    count = draw(st.integers(1, 4))
    nodes = []
    for state in range(2, count + 2):
        of = st.integers(0, state - 1)
        nodes.append(Node(draw(name), draw(of), draw(name), draw(of)))
    outputs = draw(st.lists(st.integers(2, count + 1), min_size=1, max_size=count, unique=True))
    return Genotype(tuple(nodes), tuple(outputs))


@given(
    genotype=genotypes(),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    stride=st.sampled_from([1, 2]),
    channels=st.integers(4, 9),
    halve=st.booleans(),
)
def test_any_genotype_builds_and_gives_its_shape(
    genotype: Genotype, height: int, width: int, stride: int, channels: int, halve: bool
) -> None:
    with torch.device("meta"):
        before = FactorizedReduction(6, channels) if halve else nn.Identity()
        cell = Cell(genotype, before, channels if halve else 6, 5, channels, stride).eval()
        older = torch.empty(2, 6, 2 * height - 1, 2 * width) if halve else torch.empty(2, 6, height, width)
        output = cell(older, torch.empty(2, 5, height, width))
    assert output.shape == (2, channels * len(genotype.outputs), -(-height // stride), -(-width // stride))


@pytest.mark.parametrize("size", [(6, 6), (7, 7), (6, 7), (7, 4)])
def test_a_factorized_reduction_reads_even_pixels_and_odd_ones(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, x = FactorizedReduction(3, 5).eval(), torch.rand(2, 3, *size)
    wide = torch.zeros(2, 3, 2 * -(-size[0] // 2), 2 * -(-size[1] // 2))
    wide[:, :, : size[0], : size[1]] = x
    halves = [
        torch.einsum("oi,bihw->bohw", conv.weight[:, :, 0, 0], wide[:, :, first::2, first::2])
        for first, conv in enumerate((module.even, module.odd))
    ]
    assert [half.shape[1] for half in halves] == [2, 3]
    torch.testing.assert_close(module(x), module.norm(torch.cat(halves, 1)))


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
