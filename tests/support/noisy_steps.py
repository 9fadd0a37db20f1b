"""Two small nets to train, with gradients that are zero in exact arithmetic, and other kernels for the same step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.training_problems import Residual


class Transformer(nn.Module):
    """A block in which the bias of the keys has a gradient that is zero in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 10)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        heads = [one(self.norm1(y)).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        y = y + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return self.head((y + self.mlp(self.norm2(y))).mean(1))


class Step(nn.Module):
    """Loss, output and gradients; updates what the optimizer holds, if there is one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        with torch.enable_grad():
            output = self.model(x)
            loss = F.cross_entropy(output, target)
            gradients = torch.autograd.grad(loss, parameters)
        if self.optimizer is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
        return [loss.detach(), output.detach(), *gradients]


class Convolutions:
    """A convolution's bias in front of a BatchNorm has no gradient; its other kernels are those of channels last."""

    make = partial(Residual, 16)
    zero = ("first.bias",)
    small, last = "norm1.weight", "head.weight"

    @staticmethod
    def case() -> list[torch.Tensor]:
        """Return random images and classes."""
        return [torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))]

    @staticmethod
    def otherwise(step: Step) -> Callable[..., Any]:
        """Return a copy of ``step`` in channels last."""
        step = copy.deepcopy(step)
        step.model.to(memory_format=torch.channels_last)
        return step


class Attention:
    """A transformer; its other kernels are those of plain attention."""

    make = Transformer
    zero = ("key.bias",)
    small, last = "norm2.weight", "head.weight"

    @staticmethod
    def case() -> list[torch.Tensor]:
        """Return random words and classes."""
        return [torch.randint(0, 50, (8, 12)), torch.randint(0, 10, (8,))]

    @staticmethod
    def otherwise(step: Step) -> Callable[..., Any]:
        """Return a copy of ``step`` with attention as separate operators."""
        step = copy.deepcopy(step)

        def run(*inputs: torch.Tensor) -> Any:
            with sdpa_kernel([SDPBackend.MATH]):
                return step(*inputs)

        return run


NETS = (Convolutions, Attention)
