"""Convolutions are found with what follows them, and run in the form that was measured to be fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from nimble_core.compiler.passes.conv_algorithms import choose_forms, contiguous_is_faster, sites_of
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.program import KernelChoice
from tests.support.rewrite_models import HOST, claimed, lifted, recorded, unchanged_by

CONVOLUTION = torch.ops.aten.convolution.default
A, B = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
X = torch.randn(2, 3, 5, 5)


def addend_written(x: torch.Tensor) -> Any:
    y = x * 2
    part = y[0]
    total = A(x) + y
    part.mul_(3)
    return total.relu(), y


def input_written(x: torch.Tensor) -> Any:
    y = A(x)
    x.mul_(3)
    return y.relu()


@pytest.mark.parametrize(
    ("forward", "calls"),
    [
        (lambda x: A(x).relu(), [(0, 1)]),
        (lambda x: (A(x) + x).relu_(), [(0, 1, 2)]),
        (lambda x: (x + A(x)).relu(), [(0, 1, 2)]),
        (lambda x: torch.add(x, A(x), alpha=2).relu(), []),
        (lambda x: (A(x) + B(x)).relu(), [(1, 2, 3)]),
        (lambda x: (A(x) + 1).relu(), []),
        (lambda x: (A(x) + x[:, :1]).relu(), []),
        (lambda x: (A(x) + x.double()).relu(), []),
        (lambda x: [(y := A(x)).relu(), y], []),
        (lambda x: (y := A(x)) + y.relu(), []),
        (lambda x: ((y := A(x)) + y).relu(), []),
        (lambda x: A(x) + x, []),
        (lambda x: (A(x).relu() + B(x).relu()).relu(), [(0, 1), (2, 3)]),
        (lambda x: A(A(x).relu()).relu(), [(0, 1), (2, 3)]),
        (lambda x: A(x.transpose(2, 3)).relu(), [(0, 1)]),
        (lambda x: A(x).relu().relu(), [(0, 1)]),
        (lambda x: nn.functional.conv2d(x, A.weight * x.mean(), A.bias).relu(), [(2, 3)]),
        (lambda x: nn.functional.conv2d(x, A.weight, x.mean((0, 2, 3))).relu(), [(1, 2)]),
        (addend_written, []),
        (input_written, []),
    ],
)
def test_what_is_fused(forward: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    """Unmeasured, every convolution that can be fused is."""
    one = recorded(forward, X)
    found: list[tuple[int, ...]] = []

    def rewrite(module: fx.GraphModule) -> None:
        choose_forms(module, HOST, Decisions(), channels_last=False, compiled=False)
        found.extend(calls_of(node) for node in module.graph.nodes if getattr(node.target, "__name__", "") == "run")
        split_constants(module, {})

    assert claimed(unchanged_by(rewrite, one, 1e-4)) == claimed(lift(one.recording))
    assert found == calls


def test_one_dimension_and_transposed_are_no_sites() -> None:
    for layer, shape in ((nn.Conv1d(3, 4, 3), (2, 3, 8)), (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5))):
        _, module = lifted(lambda x, layer=layer: layer(x).relu(), torch.randn(*shape))
        assert sites_of(module, channels_last=False) == []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("times", "fused"),
    [
        ([100.0, 95.0], True),
        ([100.0, 98.0], False),  # not clearly faster
        ([None, 98.0], True),
        ([100.0, None], False),
        ([None, None], False),
    ],
)
def test_the_fastest_form_wins_if_it_is_clearly_faster(times: list[float | None], fused: bool, compiled: bool) -> None:
    asked: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        asked.append(len(calls))
        for call in calls:
            call()
        return times

    _, module = lifted(lambda x: A(A(x).relu()).relu(), X)
    decisions = Decisions(timer)
    assert choose_forms(module, HOST, decisions, channels_last=False, compiled=compiled) == 2 * fused
    assert [choice.kernel for choice in decisions.made] == ["onednn fused"] * 2 * fused
    assert asked == [2], "both convolutions are alike, and timed once"


def test_a_choice_is_made_for_one_convolution() -> None:
    module = lift(recorded(lambda x: B(A(x).relu()).relu(), X).recording)
    given_choices = Decisions(None, frozenset([KernelChoice(2, "onednn fused"), KernelChoice(0, "no such form")]))
    assert choose_forms(module, HOST, given_choices, channels_last=False, compiled=False) == 1
    assert [calls_of(node) for node in module.graph.nodes if node.target is CONVOLUTION] == [(0,)]


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("resized", [False, True])
def test_after_resized_images_the_last_convolution_stays_one(resized: bool, compiled: bool, mode: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = B(x).relu()
        return B(nn.functional.interpolate(y, scale_factor=2, mode=mode) if resized else y.exp()).relu()

    _, module = lifted(forward, X.to(memory_format=torch.channels_last))
    decisions = Decisions(lambda calls: [100.0 / (1 + place) for place in range(len(calls))])
    products = 1 if resized and compiled else 2
    assert choose_forms(module, HOST, decisions, channels_last=True, compiled=compiled) == products
    assert [choice.kernel for choice in decisions.made] == ["matrix product"] * products
    assert sum(node.target is CONVOLUTION for node in module.graph.nodes) == 2 - products


@pytest.mark.parametrize("contiguous_wins", [True, False])
def test_the_layout_of_float32_is_the_one_that_takes_less_time(contiguous_wins: bool) -> None:
    asked: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        asked.append(len(calls))
        contiguous = len(asked) <= 2  # each convolution is asked contiguous first
        return [10.0 if contiguous == contiguous_wins else 20.0] * len(calls)

    decisions = Decisions(timer)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    _, module = lifted(model, torch.randn(1, 3, 8, 8))
    assert contiguous_is_faster(module, HOST, decisions, compiled=False) == contiguous_wins
    assert [choice.kernel for choice in decisions.made] == ["contiguous"] * contiguous_wins
    again = Decisions(None, frozenset(decisions.made))
    assert contiguous_is_faster(module, HOST, again, compiled=False) == contiguous_wins
    assert contiguous_is_faster(module, HOST, Decisions(), compiled=False), "unmeasured, eager's layout stays"
