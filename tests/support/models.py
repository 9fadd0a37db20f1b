"""Small models for the tests: each shows one thing a recorder has to get right.

``CASES`` maps a name to a factory ``() -> (model, args, kwargs)``; every one of them can be recorded on the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Busy", "Deep", "Norms", "Shared", "Wide", "case", "make"]

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Made]] = {}


def case(factory: Callable[[], Made]) -> Callable[[], Made]:
    """Register ``factory`` under its own name."""
    CASES[factory.__name__] = factory
    return factory


def make(name: str) -> Made:
    """The case called ``name``, with the same weights and inputs every time."""
    torch.manual_seed(7)
    return CASES[name]()


def _x(*shape: int) -> torch.Tensor:
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
        self.count = self.count + 1
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


@case
def wide() -> Made:
    return Wide(), (_x(2, 16),), {}


@case
def deep() -> Made:
    return Deep(), (_x(2, 8),), {}


@case
def convolutions() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return model.eval(), (_x(2, 3, 8, 8),), {}


@case
def channels_last() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    return model.eval(), (_x(2, 3, 8, 8).to(memory_format=torch.channels_last),), {}


@case
def norms_training() -> Made:
    return Norms().train(), (_x(4, 3, 6, 6),), {}


@case
def norms_instance() -> Made:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.GroupNorm(1, 3), nn.LayerNorm((4, 4)))
    return model.train(), (_x(2, 3, 4, 4),), {}


@case
def shared() -> Made:
    return Shared(), (torch.randint(0, 11, (2, 3)),), {}


@case
def attributes() -> Made:
    return Attributes(), (_x(3, 4),), {}


@case
def slices_written() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(4, 6)
        buffer[:, :3] = x[:, :3]
        buffer[:, 3:] = x[:, 3:] * 2
        buffer[0] += 1
        buffer.t()[2].mul_(3)
        return buffer

    return forward, (_x(4, 6),), {}


@case
def out_arguments() -> Made:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3, 3)
        torch.mm(x, y, out=out)
        first = out.sum()
        torch.add(x, y, out=out)
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        torch.max(out, 1, out=(values, indices))
        return out * first + values + indices

    return forward, (_x(3, 3), _x(3, 3)), {}


@case
def views() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.chunk(2, 1)
        c, d, e = x.split([1, 2, 1])
        f = torch.cat([a.transpose(0, 1), b.t()], 1)
        g = x.unsqueeze(0).expand(3, -1, -1).sum(0)
        h = x.view(-1).unfold(0, 3, 2).mean(1)
        return a + b, c * d[0], e.permute(1, 0), f, g, h, x.diagonal(), torch.movedim(x, 0, 1).contiguous()

    return forward, (_x(4, 4),), {}


@case
def inplace_views() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.unsqueeze_(0)
        y.squeeze_(0)
        y.t_()
        z = y + 1
        y.add_(z)
        y.transpose_(0, 1)
        z.resize_as_(z)
        return y @ z

    return forward, (_x(3, 3),), {}


@case
def indexing() -> Made:
    def forward(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[index] = 0.5
        y.index_put_((index,), torch.ones(()), accumulate=True)
        y.scatter_(0, index.view(-1, 1), 3.0)
        y.index_add_(0, index, x[index])
        return torch.gather(y, 0, index.view(-1, 1)) + x[index].cumsum(0) + y.masked_fill(y > 1, 0.0)[index]

    return forward, (_x(5, 4), torch.tensor([0, 3, 4])), {}


@case
def writes_input() -> Made:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    return forward, (_x(3), _x(3)), {}


@case
def returns_input() -> Made:
    def forward(x: torch.Tensor) -> dict[str, Any]:
        return {"same": x, "view": x[0], "none": None, "n": 3, "list": [x + 1, (x.t(), "text")]}

    return forward, (_x(3, 3),), {}


@case
def returns_parameter() -> Made:
    model = Wide(1, 4)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(x), model.branches[0].weight

    return forward, (_x(2, 4),), {}


@case
def constants() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0])
        return x * scale + torch.arange(3) + torch.ones(3) - torch.full((3,), 0.25) + torch.eye(3)[1] + torch.tensor(2)

    return forward, (_x(2, 3),), {}


@case
def constant_written() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = torch.tensor([0.0, 1.0])
        before = total * 2
        total += x.sum()
        total.mul_(2)
        return before, total * 1, total

    return forward, (_x(2, 3),), {}


@case
def data_attribute() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.data + 1
        y.data.add_(1)
        return z + y + x.data.sum()

    return forward, (_x(3),), {}


@case
def empties() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.relu()
        none = y[:0].clone() * 2
        none.add_(1)
        return torch.cat([none, y * 3]), none, torch.zeros(0, 3), x.new_empty(0).sum()

    return forward, (_x(2, 3),), {}


@case
def scalars() -> Made:
    def forward(x: torch.Tensor, n: int, flag: bool, *, scale: float) -> torch.Tensor:
        return (x * n if flag else x) + scale

    return forward, (torch.tensor(2.5), 3, True), {"scale": 0.5}


@case
def dropout() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))
    return model.train(), (_x(4, 8),), {}


@case
def random_numbers() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.rand(3), torch.randn_like(x)
        return (
            x * a + b.normal_() + torch.empty(3).uniform_() + torch.bernoulli(torch.full((3,), 0.5)) + torch.randperm(3)
        )

    return forward, (_x(3),), {}


@case
def lstm() -> Made:
    return nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), (_x(2, 3, 4),), {}


@case
def gru() -> Made:
    return nn.GRU(4, 5), (_x(3, 2, 4), _x(1, 2, 5)), {}


@case
def lstm_cell() -> Made:
    cell = nn.LSTMCell(4, 5)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        h = c = torch.zeros(2, 5)
        outputs = []
        for step in x:
            h, c = cell(step, (h, c))
            outputs.append(h)
        return outputs

    return forward, (_x(3, 2, 4),), {}


@case
def encoder_fast_path() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (_x(2, 5, 8),), {}


@case
def encoder_training() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), (_x(5, 2, 8),), {}


@case
def attention_same() -> Made:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(x: torch.Tensor) -> Any:
        return attention(x, x, x)

    return forward, (_x(2, 3, 8),), {}


@case
def attention_masked() -> Made:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    return model.train(), (_x(2, 3, 8), _x(2, 3, 8), _x(2, 3, 8)), {"key_padding_mask": mask}


@case
def sdpa() -> Made:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return forward, (_x(1, 2, 4, 8), _x(1, 2, 4, 8), _x(1, 2, 4, 8)), {}


@case
def embedding_bag() -> Made:
    return nn.EmbeddingBag(9, 4, mode="mean"), (torch.randint(0, 9, (6,)), torch.tensor([0, 2, 5])), {}


@case
def embedding_max_norm() -> Made:
    return nn.Embedding(9, 4, max_norm=0.5), (torch.randint(0, 9, (6,)),), {}


@case
def fourier() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.rfft(x)
        y = y * torch.exp(1j * torch.arange(y.shape[-1]))
        z = torch.view_as_real(y).clone()
        return (
            torch.fft.irfft(torch.view_as_complex(z).conj(), n=8) + y.real.sum() + y.imag.mean() + y.conj().abs().sum()
        )

    return forward, (_x(2, 8),), {}


@case
def negative_bit() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.complex(x, x * 2).conj()
        return y.imag + y.real + (y.imag.add_(1) * 2)

    return forward, (_x(4),), {}


@case
def integers() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = x.topk(2)
        return (x // 3) * 2 ^ 5, x.argmax(), values, indices, x.sort().values, (x > 2).sum(), x.roll(1)

    return forward, (torch.randint(0, 50, (6,)),), {}


@case
def autocast() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return y.float() + x

    return forward, (_x(2, 8),), {}


@case
def half_precision() -> Made:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).half(), (_x(2, 8).half(),), {}


@case
def custom_operators() -> Made:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.ops.nimble_tests.scaled_add(x, y, 0.5)
        torch.ops.nimble_tests.add_into(z[0], y[1])
        torch.ops.nimble_tests.add_into(z, x)
        return z * 2

    return forward, (_x(2, 3), _x(2, 3)), {}


@case
def custom_function() -> Made:
    return (lambda x: Square.apply(x) + Square.apply(x + 1)), (_x(3),), {}


@case
def checkpointed() -> Made:
    inner = Deep()
    return (lambda x: checkpoint(inner, x, use_reentrant=False) * 2), (_x(2, 8),), {}


@case
def functional() -> Made:
    inner = Deep()
    weights = {name: value.detach().clone() * 2 for name, value in inner.named_parameters()}
    return (lambda x: torch.func.functional_call(inner, weights, (x,))), (_x(2, 8),), {}


@case
def mapped() -> Made:
    return torch.func.vmap(lambda a, b: torch.dot(a, b) * 2), (_x(3, 4), _x(3, 4)), {}


@case
def gradient_inside() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad((y**3).sum(), y)
        return grad + x

    return forward, (_x(4),), {}


@case
def foreach() -> Made:
    def forward(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        ys = torch._foreach_mul(xs, 2.0)
        torch._foreach_add_(ys, xs)
        return list(ys)

    return forward, ([_x(3), _x(2, 2)],), {}


@case
def linear_algebra() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.mT + torch.eye(3)
        return torch.linalg.cholesky(y), torch.linalg.solve(y, x), torch.einsum("ij,jk->ik", x, y), torch.linalg.norm(x)

    return forward, (_x(3, 3),), {}


@case
def weight_norm() -> Made:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (_x(2, 4),), {}


@case
def spectral_norm() -> Made:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).train(), (_x(2, 4),), {}


@case
def upsampling() -> Made:
    model = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.ConvTranspose2d(2, 3, 3), nn.PixelShuffle(1))
    return model, (_x(1, 2, 4, 4),), {}


@case
def overlapping_inputs() -> Made:
    base = _x(6)
    return (lambda x, y: x * 2 + y), (base[:4], base[2:]), {}


@case
def strided_inputs() -> Made:
    return (lambda x, y: x.view(12) + y.reshape(-1)), (_x(3, 4), _x(4, 3).t()), {}


@case
def expanded_input() -> Made:
    return (lambda x: x + 1), (_x(1, 3).expand(4, 3),), {}


@case
def no_calls() -> Made:
    return (lambda x: x.view(-1)), (_x(2, 3),), {}


@case
def buffer_counter() -> Made:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    return Counter(), (_x(3),), {}


@case
def nested_inputs() -> Made:
    def forward(batch: dict[str, Any], pair: tuple[torch.Tensor, list[torch.Tensor]], *, bias: torch.Tensor) -> Any:
        return {"out": batch["x"] @ pair[0] + pair[1][0], "deep": [batch["inner"]["y"] + bias]}

    return forward, ({"x": _x(2, 3), "inner": {"y": _x(2)}}, (_x(3, 2), [_x(2)])), {"bias": _x(2)}
