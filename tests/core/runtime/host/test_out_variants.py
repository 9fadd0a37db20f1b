"""Operators that fill planned memory leave the bits that they would allocate; others are not told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core.runtime.host.out_variants import OUT_VARIANTS, can_fill, filling_step
from nimble_core.tracing.recording import Slot, Step, fill
from tests.support.host_models import Prepared, poison

ARGUMENTS: dict[str, Callable[[torch.Tensor], tuple[object, ...]]] = {
    "aten::_log_softmax": lambda x: (x, -1, False),
    "aten::_softmax": lambda x: (x, 0, False),
    "aten::add.Tensor": lambda x: (x, x.flip(0)),
    "aten::addmm": lambda x: (x[0], x, x.t().contiguous().t()),
    "aten::baddbmm": lambda x: (x[None], x.expand(2, *x.shape), x.t().expand(2, *x.shape)),
    "aten::bmm": lambda x: (x.expand(2, *x.shape), x.t().expand(2, *x.shape)),
    "aten::cat": lambda x: ([x, x[:1], x[:0]],),
    "aten::div.Tensor": lambda x: (x, 3),
    "aten::maximum": lambda x: (x, x.t()),
    "aten::mean.dim": lambda x: (x, [1], True),
    "aten::minimum": lambda x: (x, x.t()),
    "aten::mm": lambda x: (x, x.t()),
    "aten::mul.Tensor": lambda x: (x, 0.1),
    "aten::pow.Tensor_Scalar": lambda x: (x, 3),
    "aten::sub.Tensor": lambda x: (x, x[0]),
    "aten::sum.dim_IntList": lambda x: (x, [0]),
}
EXAMPLES = {
    "contiguous": lambda: torch.rand(40, 40),
    "transposed": lambda: torch.rand(40, 40).t(),
    "every second": lambda: torch.rand(40, 80)[:, ::2],
    "float64": lambda: torch.rand(5, 5, dtype=torch.float64),
    "bfloat16": lambda: torch.rand(5, 5).bfloat16(),
    "one": lambda: torch.rand(1, 1),
}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", OUT_VARIANTS)
def test_a_variant_leaves_the_bits_that_the_operator_allocates(name: str, example: str) -> None:
    torch.manual_seed(0)
    args = ARGUMENTS.get(name, lambda x: (x,))(EXAMPLES[example]())
    packet, _, overload = name.removeprefix("aten::").partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    step = Step(func, args, (), (0,), (), 0)
    assert can_fill(step)
    result = func(*args)
    filling = filling_step(step, list(args), {}, result)
    assert filling.kwargs == (("out", Slot(0)),)
    memory = torch.full((result.numel() + 64,), float("nan"), dtype=result.dtype)
    given = memory[32:-32].as_strided(result.shape, result.stride())
    filling.func(*args, **{key: fill(value, {0: given}) for key, value in filling.kwargs})
    assert torch.equal(given, result)
    assert memory[:32].isnan().all()
    assert memory[-32:].isnan().all()


class Normalised(nn.Module):
    """Batch norm of a window of a larger result: torch's variant computes only what is contiguous."""

    def __init__(self, window: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.window(x * 2)) + 1


def loss(measure: Callable[..., torch.Tensor], reduction: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss between neighbours in the arena: torch's variant writes one for each element first."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        p, total = x.sigmoid(), x.square().sum()
        found = measure(p, (x > 0).float(), reduction=reduction)
        return found * 2 + total + x.cos().sum() * p.sum()

    return forward


MISBEHAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm of columns": Normalised(lambda x: x[:, :4]),
    "batch norm of rows and columns": Normalised(lambda x: x[::2, 4:]),
    "batch norm of pairs": Normalised(lambda x: x.view(-1, 4, 2)[..., 1]),
    "entropy": loss(nn.functional.binary_cross_entropy, "mean"),
    "entropy by element": loss(nn.functional.binary_cross_entropy, "none"),
    "huber": loss(nn.functional.huber_loss, "sum"),
    "mse": loss(nn.functional.mse_loss, "mean"),
    "factors that share a storage": lambda x: torch.linalg.qr(x.exp())[1] * 2,
}


@pytest.mark.parametrize("name", MISBEHAVED)
def test_operators_whose_variants_misbehave_equal_eager(name: str) -> None:
    model = MISBEHAVED[name]
    executable = Prepared(model, torch.randn(8, 8)).capture()
    for _ in range(3):
        x = torch.randn(8, 8)
        poison(executable)
        with torch.no_grad():
            assert torch.equal(executable.run([x])[0], model(x))
