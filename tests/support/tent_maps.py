"""Training steps that amplify rounding until no digit of a gradient is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.tracing.recorded import Recorded


class Chaotic(nn.Module):
    """The tent map, again and again: each time differences grow by 1.9, and gradients in size."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.register_buffer("one", torch.eye(64))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x * self.scale)
        for _ in range(self.times):
            y = (1.9 * torch.minimum(y, 1 - y)) @ self.one
        return y


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class Wrong(Chaotic):
    """Its gradients are off by a factor."""

    def __init__(self, times: int, by: float) -> None:
        super().__init__(times)
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(super().forward(x), self.by)


class Remembering(Chaotic):
    """Keeps a mean of its inputs, in which each counts ``by`` times."""

    def __init__(self, times: int, by: float) -> None:
        super().__init__(times)
        self.register_buffer("mean", torch.zeros(64))
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1 * self.by)
        return super().forward(x)


def recorded_step(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> Recorded:
    """Record a whole training step of ``model``."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    step = TrainStep(model, loss, optimizer, options=Options(tune="off", policy="single"))
    step.prepare(torch.randn(8, 64))
    assert step.engine is not None
    return step.engine.recorded
