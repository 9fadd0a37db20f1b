"""Small models for the tests: each shows one thing a recorder has to get right.

``CASES`` maps a name to a factory ``() -> (model, args, kwargs)``; every one of them can be recorded on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.modules import Attributes, Busy, Deep, Norms, Shared, Square, Wide, values

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


@case
def wide() -> Made:
    return Wide(), (values(2, 16),), {}


@case
def convolutions() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return model.eval(), (values(2, 3, 8, 8),), {}


@case
def channels_last() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    return model.eval(), (values(2, 3, 8, 8).to(memory_format=torch.channels_last),), {}


@case
def norms_training() -> Made:
    return Norms().train(), (values(4, 3, 6, 6),), {}


@case
def shared() -> Made:
    return Shared(), (torch.randint(0, 11, (2, 3)),), {}


@case
def attributes() -> Made:
    return Attributes(), (values(3, 4),), {}


@case
def slices_written() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(4, 6)
        buffer[:, :3] = x[:, :3]
        buffer[:, 3:] = x[:, 3:] * 2
        buffer[0] += 1
        buffer.t()[2].mul_(3)
        return buffer

    return forward, (values(4, 6),), {}


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

    return forward, (values(3, 3), values(3, 3)), {}


@case
def views() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.chunk(2, 1)
        c, d, e = x.split([1, 2, 1])
        f = torch.cat([a.transpose(0, 1), b.t()], 1)
        g = x.unsqueeze(0).expand(3, -1, -1).sum(0)
        h = x.view(-1).unfold(0, 3, 2).mean(1)
        return a + b, c * d[0], e.permute(1, 0), f, g, h, x.diagonal(), torch.movedim(x, 0, 1).contiguous()

    return forward, (values(4, 4),), {}


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

    return forward, (values(3, 3),), {}


@case
def indexing() -> Made:
    def forward(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[index] = 0.5
        y.index_put_((index,), torch.ones(()), accumulate=True)
        y.scatter_(0, index.view(-1, 1), 3.0)
        y.index_add_(0, index, x[index])
        return torch.gather(y, 0, index.view(-1, 1)) + x[index].cumsum(0) + y.masked_fill(y > 1, 0.0)[index]

    return forward, (values(5, 4), torch.tensor([0, 3, 4])), {}


@case
def writes_input() -> Made:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    return forward, (values(3), values(3)), {}


@case
def returns_input() -> Made:
    def forward(x: torch.Tensor) -> dict[str, Any]:
        return {"same": x, "view": x[0], "none": None, "n": 3, "list": [x + 1, (x.t(), "text")]}

    return forward, (values(3, 3),), {}


@case
def returns_parameter() -> Made:
    model = Wide(1, 4)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(x), model.branches[0].weight

    return forward, (values(2, 4),), {}


@case
def constants() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0])
        return x * scale + torch.arange(3) + torch.ones(3) - torch.full((3,), 0.25) + torch.eye(3)[1] + torch.tensor(2)

    return forward, (values(2, 3),), {}


@case
def constant_written() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = torch.tensor([0.0, 1.0])
        before = total * 2
        total += x.sum()
        total.mul_(2)
        return before, total * 1, total

    return forward, (values(2, 3),), {}


@case
def data_attribute() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.data + 1
        y.data.add_(1)
        return z + y + x.data.sum()

    return forward, (values(3),), {}


@case
def empties() -> Made:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.relu()
        none = y[:0].clone() * 2
        none.add_(1)
        return torch.cat([none, y * 3]), none, torch.zeros(0, 3), x.new_empty(0).sum()

    return forward, (values(2, 3),), {}


@case
def scalars() -> Made:
    def forward(x: torch.Tensor, n: int, flag: bool, *, scale: float) -> torch.Tensor:
        return (x * n if flag else x) + scale

    return forward, (torch.tensor(2.5), 3, True), {"scale": 0.5}


@case
def dropout() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))
    return model.train(), (values(4, 8),), {}


@case
def random_numbers() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.rand(3), torch.randn_like(x)
        return (
            x * a + b.normal_() + torch.empty(3).uniform_() + torch.bernoulli(torch.full((3,), 0.5)) + torch.randperm(3)
        )

    return forward, (values(3),), {}


@case
def lstm() -> Made:
    return nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), (values(2, 3, 4),), {}


@case
def encoder_fast_path() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (values(2, 5, 8),), {}


@case
def attention_masked() -> Made:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    return model.train(), (values(2, 3, 8), values(2, 3, 8), values(2, 3, 8)), {"key_padding_mask": mask}


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

    return forward, (values(2, 8),), {}


@case
def negative_bit() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.complex(x, x * 2).conj()
        return y.imag + y.real + (y.imag.add_(1) * 2)

    return forward, (values(4),), {}


@case
def autocast() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return y.float() + x

    return forward, (values(2, 8),), {}


@case
def custom_operators() -> Made:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.ops.nimble_tests.scaled_add(x, y, 0.5)
        torch.ops.nimble_tests.add_into(z[0], y[1])
        torch.ops.nimble_tests.add_into(z, x)
        return z * 2

    return forward, (values(2, 3), values(2, 3)), {}


@case
def custom_function() -> Made:
    return (lambda x: Square.apply(x) + Square.apply(x + 1)), (values(3),), {}


@case
def functional() -> Made:
    inner = Deep()
    weights = {name: value.detach().clone() * 2 for name, value in inner.named_parameters()}
    return (lambda x: torch.func.functional_call(inner, weights, (x,))), (values(2, 8),), {}


@case
def mapped() -> Made:
    return torch.func.vmap(lambda a, b: torch.dot(a, b) * 2), (values(3, 4), values(3, 4)), {}


@case
def gradient_inside() -> Made:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad((y**3).sum(), y)
        return grad + x

    return forward, (values(4),), {}


@case
def foreach() -> Made:
    def forward(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        ys = torch._foreach_mul(xs, 2.0)
        torch._foreach_add_(ys, xs)
        return list(ys)

    return forward, ([values(3), values(2, 2)],), {}


@case
def spectral_norm() -> Made:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).train(), (values(2, 4),), {}


@case
def overlapping_inputs() -> Made:
    base = values(6)
    return (lambda x, y: x * 2 + y), (base[:4], base[2:]), {}


@case
def expanded_input() -> Made:
    return (lambda x: x + 1), (values(1, 3).expand(4, 3),), {}


@case
def no_calls() -> Made:
    return (lambda x: x.view(-1)), (values(2, 3),), {}


@case
def buffer_counter() -> Made:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    return Counter(), (values(3),), {}


@case
def nested_inputs() -> Made:
    def forward(batch: dict[str, Any], pair: tuple[torch.Tensor, list[torch.Tensor]], *, bias: torch.Tensor) -> Any:
        return {"out": batch["x"] @ pair[0] + pair[1][0], "deep": [batch["inner"]["y"] + bias]}

    return forward, ({"x": values(2, 3), "inner": {"y": values(2)}}, (values(3, 2), [values(2)])), {"bias": values(2)}
