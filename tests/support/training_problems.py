"""Models to train, with their losses and data, and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Problem:
    """A model, its loss, and data as ``draw()`` makes it: inputs and targets."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    draw: Callable[[], tuple[Any, Any]]


PROBLEMS: dict[str, Callable[[], Problem]] = {}


def problem(factory: Callable[[], Problem]) -> Callable[[], Problem]:
    """Register ``factory`` under its own name."""
    PROBLEMS[factory.__name__] = factory
    return factory


def made(name: str, device: str = "cpu") -> Problem:
    """Make the problem called ``name``, with the same weights every time, on ``device``."""
    torch.manual_seed(7)
    found = PROBLEMS[name]()

    def draw() -> tuple[Any, Any]:
        return tuple(moved(one, device) for one in found.draw())

    return Problem(found.model.to(device), found.loss_fn, draw)


def moved(value: Any, device: str) -> Any:
    """``value`` with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    return value


class Residual(nn.Module):
    """Convolutions and batch norm around a sum."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)) + x)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """Depthwise convolutions between pointwise ones, as in MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        channels = 8
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels))
        wide = 4 * channels
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
                nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
                nn.ReLU6(inplace=True), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
            ) for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Embedding, self-attention and feed-forward layers over tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8), torch.randint(0, 4, (6,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 13, (4, 6)), torch.randint(0, 10, (4,))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


@problem
def resnet() -> Problem:
    return Problem(Residual(), nn.CrossEntropyLoss(), images)


@problem
def mobilenet() -> Problem:
    return Problem(Inverted(), F.cross_entropy, images)


@problem
def channels_last() -> Problem:
    model = Residual().to(memory_format=torch.channels_last)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = images()
        return x.to(memory_format=torch.channels_last), y

    return Problem(model, F.cross_entropy, draw)


@problem
def mlp() -> Problem:
    return Problem(perceptron(), F.cross_entropy, vectors)


@problem
def transformer() -> Problem:
    return Problem(Encoder(), F.cross_entropy, tokens)


@problem
def dropout() -> Problem:
    return Problem(Encoder(dropout=0.3), F.cross_entropy, tokens)


@problem
def recurrent() -> Problem:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x)[0][:, -1])

    return Problem(Last(), F.cross_entropy, lambda: (torch.randn(3, 5, 8), torch.randint(0, 4, (3,))))


class Tied(nn.Module):
    """One weight in three places, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.twice(self.embedding(tokens)))
        return self.head(torch.tanh(self.twice(x)) + self.embedding.weight.mean(0))


@problem
def shared() -> Problem:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    return Problem(Tied(), loss, lambda: (torch.randint(0, 13, (2, 5)), torch.randint(0, 13, (2, 5))))


@problem
def frozen() -> Problem:
    model = perceptron()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return Problem(model, F.cross_entropy, vectors)


class Idle(nn.Module):
    """Two parameters that no output depends on, one of them in use without an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)
        self.loose = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.idle(x)


@problem
def unused() -> Problem:
    return Problem(Idle(), lambda output, targets: F.cross_entropy(output[0], targets), vectors)


@dataclass
class Two:
    """What a model may return."""

    logits: torch.Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    """Outputs in a dataclass, a dict and a tuple; one carries no gradient, one is an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Two:
        h = torch.tanh(self.body(x))
        h = h if scale is None else h * scale
        a = self.a(h)
        return Two(a, {"pair": (self.b(h), h.detach()), "best": a.argmax(1), "none": None, "name": "two"})


@problem
def nested() -> Problem:
    def loss(output: Two, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits, targets) + output.extra["pair"][0].square().mean()

    return Problem(Nested(), loss, vectors)


@problem
def keywords() -> Problem:
    def draw() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        x, y = vectors()
        return {"x": x, "scale": torch.rand(8)}, {"labels": y, "weight": torch.rand(4)}

    def loss(output: Two, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.logits, targets["labels"], targets["weight"])

    return Problem(Nested(), loss, draw)


@problem
def no_targets() -> Problem:
    return Problem(perceptron(), lambda output: output.square().mean(), lambda: (vectors()[0], None))


class Aliases(nn.Module):
    """Parameters whose gradients are one tensor, are expanded from one element, or are windows of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
        self.c, self.d = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 4))
        self.e, self.f = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x[:4] @ self.e.t(), self.d]) + self.a + self.b
        return y * self.f.t() + self.c.sum()


@problem
def aliases() -> Problem:
    return Problem(Aliases(), F.cross_entropy, lambda: (torch.randn(6, 4), torch.randint(0, 4, (6,))))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Fused, as the captured ones are: then results agree bit for bit.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True),
}


def twin(model: nn.Module) -> nn.Module:
    """Copy a module with its memory; that of cuDNN's recurrent layers in one piece, as in the original."""
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return found


class Recomputed(nn.Module):
    """Computes its first part again in the backward, with the random numbers of the forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.first, x, use_reentrant=False))


class Island(nn.Module):
    """A product in float32 in the midst of those that autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(hidden.float())


class Fails(nn.Module):
    """Raises in its run of number ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.body, self.drop, self.left = Residual(), nn.Dropout(0.5), [at]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.body(x))
        RUNS[0] += 1
        if RUNS[0] == self.left[0]:
            raise ZeroDivisionError("in the middle")
        return x


RUNS = [0]
