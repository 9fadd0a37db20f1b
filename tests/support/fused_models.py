"""Small models that rewrites find something in: convolutions with their norms, siblings, chains of pointwise work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nimble_core import Nimble, Options
from nimble_core.api.engine import Engine
from nimble_core.compiler import pipeline
from nimble_core.compiler.inductor import compile_graph
from nimble_core.ir.program import Program
from nimble_core.tracing.kept_operators import kept_form

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("ignore")])]
"""Values of a parameter ``device``; on a GPU compilers warn of their own affairs."""
KINDS = pytest.mark.parametrize("kind", ["library", pytest.param("inductor", marks=pytest.mark.compiler)])


class Residual(nn.Module):
    """A convolution with norm and ReLU, and another one that a shortcut is added to."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.other = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return F.relu(self.other(self.second(x)) + x)


class Tower(nn.Module):
    """A residual block, pooled and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean((2, 3)))


class AlwaysTheSame(nn.Module):
    """Zero-initialised scale and head: whatever goes in, and whatever kernels do, the outputs are the head's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            self.body[4].weight.zero_()  # type: ignore[operator]  # a parameter
            self.head.weight.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Attention(nn.Module):
    """Query, key and value from one input."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def function(x: torch.Tensor) -> torch.Tensor:
    """No module at all."""
    return torch.tanh(x * 2 + 1).sigmoid() * x


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], Callable[[], torch.Tensor]]]] = {
    "tower": lambda: (Tower(), lambda: torch.randn(2, 3, 8, 8)),
    "residual": lambda: (Residual(), lambda: torch.randn(2, 3, 8, 8)),
    "attention": lambda: (Attention(), lambda: torch.randn(2, 5, 16)),
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.LayerNorm(12)),
        lambda: torch.randn(4, 12),
    ),
    "function": lambda: (function, lambda: torch.randn(6, 7)),
}
"""Name → a model with random weights and statistics, in evaluation mode, and what draws an input."""


def made(name: str, device: str = "cpu") -> tuple[Any, Callable[[], torch.Tensor]]:
    """Make the model called ``name``, the same each time, with statistics that matter, and what draws an input."""
    torch.manual_seed(3)
    model, draw = MODELS[name]()
    if isinstance(model, nn.Module):
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.running_mean.uniform_(-0.5, 0.5)
                    norm.running_var.uniform_(0.5, 2)
                    norm.weight.uniform_(0.5, 1.5)
                    norm.bias.uniform_(-0.5, 0.5)
        model.eval().to(device)
    return model, lambda: draw().to(device)


def quick(fuse: Any, **more: Any) -> Options:
    """Options of kernels of one kind, with as little tuning as there can be."""
    return Options(**{"fuse": fuse, "tune": "off", "policy": "nimble", **more})


def engine(net: Nimble) -> Engine:
    """Return the only engine."""
    (found,) = net.engines
    return found


def fused(net: Nimble) -> str:
    """Return the kind of kernels that run."""
    return engine(net).recorded.recording.program.fuse


def programs(net: Nimble) -> tuple[Program, Program]:
    """Return what is replayed, and the eager calls it stands for."""
    recorded = engine(net).recorded
    assert recorded.eager is not None
    return recorded.recording.program, recorded.eager.recording.program


def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rewrite take every ReLU for another function, those as well that are to stay what they are."""
    real = pipeline.affine_norms

    def wrong(module: Any) -> int:
        for node in module.graph.nodes:
            if node.target in (torch.ops.aten.relu.default, kept_form(torch.ops.aten.relu.default, ())):
                node.target = torch.ops.aten.leaky_relu.default
        return real(module)

    monkeypatch.setattr(pipeline, "affine_norms", wrong)


@contextmanager
def compiler_broken() -> Iterator[None]:
    """Inside, no kernel compiles, but for those that this process has compiled before."""
    import torch._inductor.cpp_builder as builder
    import torch._inductor.runtime.triton_heuristics as heuristics

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("PassManager::run failed\nand more about it")

    # A failure while Inductor sets itself up would stay: let that be done.
    compile_graph(fx.symbolic_trace(lambda x: (x.sin() + 1,)), [torch.ones(3)])

    with torch._inductor.config.patch(force_disable_caches=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics.CachingAutotuner, "precompile", fail)
        patch.setattr(builder.CppBuilder, "build", fail)
        yield
