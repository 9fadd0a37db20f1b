"""Modules, functions and operators that the test models are made of."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


class Wide(nn.Module):
    """Independent branches that meet at the end."""

    def __init__(self, branches: int = 4, features: int = 16) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(features, features) for _ in range(branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.relu(branch(x)) for branch in self.branches]).sum(0)


class Deep(nn.Module):
    """One call after the other."""

    def __init__(self, layers: int = 3, features: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(features, features), nn.Tanh()) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Norms(nn.Module):
    """Convolution and batch norm: running statistics in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.convolution(x)))


class Shared(nn.Module):
    """Tied weights, and a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x) * self.scale + self.inner.scale)


class Attributes(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.randn(4), torch.randn(4)]
        self.plain = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table[0] + self.table[1] - self.plain


class Busy(nn.Module):
    """Changes all it can, then fails if it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("absent", None)
        self.history: list[int] = [1]
        self.table: dict[str, int] = {"a": 1}
        self.number = 1
        self.gone = "here"
        self.tensor = torch.zeros(2)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        self.linear.weight.mul_(0.5)
        self.count += 1
        self.absent = torch.ones(1)
        self.tensor[0] = 5
        self.history.append(2)
        self.table["b"] = 2
        self.number += 1
        self.fresh = 1
        if hasattr(self, "gone"):
            del self.gone
        random.random()
        y = self.norm(self.linear(x)) + torch.rand(3)
        if self.error is not None:
            raise self.error
        return y


class Square(torch.autograd.Function):
    """A custom autograd function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@torch.library.custom_op("nimble_tests::scaled_add", mutates_args=())
def scaled_add(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """A custom operator that makes a tensor."""
    return a + scale * b


@torch.library.custom_op("nimble_tests::add_into", mutates_args={"into"})
def add_into(into: torch.Tensor, b: torch.Tensor) -> None:
    """A custom operator that writes its first argument and returns nothing."""
    into.add_(b)
