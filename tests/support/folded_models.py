"""Engines that read folded weights, built by hand: a model, the same in other calls, and the constants of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.guards.module_guard import Watch
from nimble_core.tracing.folded_weights import Folded

QUICK = Options(tune="off")


class Foldable(nn.Module):
    """A convolution with its batch norm, three linear layers with one input, and a weight that stays live."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.q, self.k, self.v = (nn.Linear(4, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.full((5,), 1.5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return (self.q(x) * self.k(x) + self.v(x)) * self.scale


@dataclass
class Counted:
    """Computes and says how often it did."""

    compute: Callable[[], list[torch.Tensor]]
    times: int = 0

    def __call__(self) -> list[torch.Tensor]:
        self.times += 1
        return self.compute()


def made() -> Foldable:
    """Make a model whose every weight matters, in evaluation mode."""
    torch.manual_seed(0)
    model = Foldable()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.2)
    return model.eval()


def example(seed: int = 0) -> torch.Tensor:
    """Draw an input."""
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def folds_of(model: Foldable) -> Counted:
    """Compute a folded convolution weight (channels last) and bias, and joined weights and biases."""
    joined = (model.q, model.k, model.v)

    def compute() -> list[torch.Tensor]:
        factor = model.norm.weight * torch.rsqrt(model.norm.running_var + model.norm.eps)
        weight = model.conv.weight * factor[:, None, None, None]
        bias = (model.conv.bias - model.norm.running_mean) * factor + model.norm.bias
        return [
            weight.to(memory_format=torch.channels_last),
            bias,
            torch.cat([layer.weight for layer in joined]),
            torch.cat([layer.bias for layer in joined]),
        ]

    return Counted(compute)


def folded(model: Foldable) -> Folded:
    """Return the folds of ``model`` as values."""
    compute = folds_of(model)
    with torch.no_grad():
        constants = tuple(value.clone() for value in compute.compute())
    names = dict(model.named_parameters()) | {
        f"norm.{name}": getattr(model.norm, name) for name in ("running_mean", "running_var")
    }
    return Folded(compute, constants, tuple(item for item in names.items() if item[0] != "scale"))


def with_folds(
    model: nn.Module,
    folds: Folded,
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    check_first: bool,
    options: Options = QUICK,
) -> Nimble:
    """``model``, prepared with an engine that replays ``run``, a function that reads ``folds.constants``."""
    other = Nimble(run, options).prepare(x)
    (engine,) = other.engines
    net = Nimble(model, options)
    watch = Watch(model, folds.sources)
    object.__setattr__(net, "_engines", (replace(engine, watch=watch, folded=folds, check_first=check_first),))
    object.__setattr__(other, "_engines", ())
    net.refresh()
    return net


def folded_engine(model: Foldable, *, check_first: bool, options: Options = QUICK) -> tuple[Nimble, Counted]:
    """``model`` with an engine that runs on folded weights, and what counts how often they were computed."""
    folds = folded(model)
    weight, bias, joined_weight, joined_bias = folds.constants

    def run(x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, weight, bias).relu().mean((2, 3))
        q, k, v = F.linear(x, joined_weight, joined_bias).chunk(3, dim=1)
        return (q * k + v) * model.scale

    net = with_folds(model, folds, run, example(), check_first=check_first, options=options)
    assert isinstance(folds.compute, Counted)
    folds.compute.times = 0
    return net, folds.compute
