"""A normalisation with fixed statistics is a scale and a shift, and these fit into the convolution before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.fold_batchnorm import affine, affine_norms, fold_affine
from tests.support.rewrite_models import recorded, targets, unchanged_by

aten = torch.ops.aten


def random_norm(channels: int, kind: type[nn.Module] = nn.BatchNorm2d, **options: Any) -> Any:
    norm: Any = kind(channels, **options).eval()
    with torch.no_grad():
        for one in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            if one is not None:
                one.uniform_(0.5, 2.0)
        if norm.weight is not None:
            norm.weight[0] = -1.5
    return norm


def both(module: fx.GraphModule) -> int:
    count = affine_norms(module)
    assert fold_affine(module) == count
    return count


def run_by(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@settings(max_examples=30)
@given(
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    affine_norm=st.booleans(),
    stride=st.integers(1, 2),
)
def test_every_kind_of_convolution(
    dims: int, transposed: bool, groups: int, bias: bool, affine_norm: bool, stride: int
) -> None:
    torch.manual_seed(dims)
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    norm = random_norm(6, getattr(nn, f"BatchNorm{dims}d"), affine=affine_norm, eps=0.01)
    model = nn.Sequential(kind(4, 6, 3, stride=stride, padding=1, groups=groups, bias=bias), norm).double().eval()
    one = recorded(model, torch.randn(2, 4, *[5] * dims, dtype=torch.float64))
    module = unchanged_by(both, one)
    foldable = not (transposed and groups > 1)
    assert affine not in run_by(module)
    assert aten.convolution.default in run_by(module)
    assert any("batch_norm" in name for name in targets(module)) != foldable


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_type(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), random_norm(4), nn.ReLU()).to(dtype).eval()
    one = recorded(model, torch.randn(1, 3, 6, 6).to(dtype))
    unchanged_by(affine_norms, one, 0.05)
    unchanged_by(both, one, 0.05)


class Two(nn.Module):
    """A convolution, a batch norm, and something that may forbid to join them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), random_norm(3)
        self.way = forward
        self.eval().double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)


def read_twice(model: Any, x: torch.Tensor) -> Any:
    y = model.conv(x)
    return model.norm(y), y


def training(model: Any, x: torch.Tensor) -> Any:
    y = model.conv(x)
    return F.batch_norm(y, model.norm.running_mean, model.norm.running_var, training=True)


def computed_statistics(model: Any, x: torch.Tensor) -> Any:
    return F.batch_norm(model.conv(x), x.mean((0, 2, 3)), model.norm.running_var)


def computed_weight(model: Any, x: torch.Tensor) -> Any:
    return model.norm(F.conv2d(x, model.conv.weight * x.mean()))


def statistics_written(model: Any, x: torch.Tensor) -> Any:
    y = model.norm(model.conv(x))
    model.norm.running_mean.add_(1)
    return y


STAYS = [read_twice, training, computed_statistics, computed_weight, statistics_written]


@pytest.mark.parametrize("way", STAYS)
def test_what_cannot_be_joined_stays(way: Callable[..., Any]) -> None:
    one = recorded(Two(way), torch.randn(2, 3, 4, 4, dtype=torch.float64))
    module = unchanged_by(both, one)
    assert affine not in run_by(module)
    assert any("batch_norm" in name for name in targets(module))
