"""What only outputs without a gradient lead to is left out of a backward where zeros in their place might harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.training.autograd_function import Backward
from nimble_core.training.missing_gradients import any_number, branch_of, issued_without, vanishing

Head = Callable[[torch.Tensor], torch.Tensor]

FINITE: dict[str, Head] = {
    "itself": lambda h: h,
    "gelu": F.gelu,
    "product": lambda h: h @ torch.ones(4, 3),
    "window": lambda h: h[1:, ::2].sum(0),
    "scaled": lambda h: (h / 3 - 1) * 2,
    "norm": lambda h: F.layer_norm(h, (4,)),
    "joined": lambda h: torch.cat([h, h.relu()]),
}
POLES: dict[str, Head] = {
    "root": torch.sqrt,
    "logarithm": torch.log,
    "power": lambda h: h.abs().pow(0.5).sum(),
    "quotient": lambda h: 1 / h,
    "length": lambda h: h.norm(dim=1),
    "exponential": lambda h: h.exp() * 2,
    "through gelu": lambda h: F.gelu(h.sqrt()),
    "before gelu": lambda h: F.gelu(h).sqrt(),
}


class Two(nn.Module):
    """A layer, and two functions of what it makes."""

    def __init__(self, first: Head, second: Head) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return self.first(h), self.second(h)


def backward_of(model: nn.Module, x: torch.Tensor) -> Backward:
    net = Nimble(model, Options(tune="off", policy="single")).prepare(x, training=True)
    found = net.engines[0].backward
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "harm"), [(name, False) for name in FINITE] + [(name, True) for name in POLES])
def test_branches_are_left_out_where_zeros_may_meet_infinity(name: str, harm: bool) -> None:
    program = backward_of(Two(F.relu, (FINITE | POLES)[name]), torch.randn(5, 4)).plain.program
    assert branch_of(program, 2, {1}).harmful == harm
    assert not branch_of(program, 2, frozenset()).calls
    assert not branch_of(program, 2, {0}).harmful  # relu's


def test_branches_that_nothing_else_reads_are_left_alone() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x), self.other(x).sqrt()

    found = branch_of(backward_of(Apart(), torch.randn(5, 4)).plain.program, 2, {1})
    assert found.calls
    assert not found.harmful


@given(first=st.sampled_from(sorted(FINITE)), second=st.sampled_from(sorted(POLES)))
def test_what_is_left_is_the_gradient_of_the_rest(first: str, second: str) -> None:
    torch.manual_seed(0)
    model = Two(FINITE[first], POLES[second])
    x = torch.zeros(5, 4)
    model.linear.bias.data.zero_()
    half = backward_of(model, x)
    outputs = model(x)
    weights = torch.randn_like(outputs[0])
    eager = torch.autograd.grad(outputs[0], list(half.parameters), weights)
    saved = half.recorded.signature.tensors[2:]
    without = branch_of(half.plain.program, 2, {1}).calls
    assert without
    found = issued_without(half.plain, [weights, torch.zeros_like(outputs[1]), *saved], without, "cpu")
    for one, other in zip(found, eager, strict=True):
        torch.testing.assert_close(one, other)


Own = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NOTHING: dict[str, Own] = {
    "product": lambda g, w: g * w.exp() / 3 - g.mean(0),
    "choice": lambda g, w: torch.where(w > 1, g, 0.0) + g.masked_fill(w > 1, 0),
    "matrix": lambda g, w: torch.addmm(g, w, g) + g @ w + torch.addcmul(g, g, w),
    "zeros": lambda g, w: torch.zeros_like(w) + w.new_zeros(4, 4) + torch.full_like(w, 0.0),
    "window": lambda g, w: F.pad(g[1:], (0, 0, 1, 0)) + torch.zeros_like(g).index_add(0, torch.tensor([1, 2]), g[:2]),
    "in place": lambda g, w: torch.empty_like(w).copy_(g).mul_(w).neg_(),
    "derivative": lambda g, w: torch.ops.aten.tanh_backward(g, w),
}
SOMETHING: dict[str, Own] = {
    "number": lambda g, w: g + 1,
    "sum": lambda g, w: g + w.sign(),
    "choice": lambda g, w: torch.where(w > 1, g, w),
    "choice of numbers": lambda g, w: torch.where(w > 1, g, 1.0),
    "filled": lambda g, w: g.masked_fill(w > 1, 2.0),
    "padded": lambda g, w: F.pad(g[1:], (0, 0, 1, 0), value=1.0),
    "scattered": lambda g, w: g.scatter(0, torch.zeros(1, 4, dtype=torch.int64), 1.0),
    "put": lambda g, w: g.index_put((torch.tensor([0]),), w[:1]),
    "joined": lambda g, w: torch.cat([g[:2], w[:2]]),
    "copied": lambda g, w: g.clone().copy_(w),
    "partly": lambda g, w: torch.empty_like(g).copy_(w).index_copy_(0, torch.tensor([1]), g[:1]),
    "ones": lambda g, w: torch.ones_like(g),
    "full": lambda g, w: g.new_full((4, 4), 2.0),
    "itself": lambda g, w: w,
    "matrix": lambda g, w: torch.addmm(w, g, g),
    "into empty": lambda g, w: torch.mm(w, w, out=torch.empty(4, 4)),
    "function": lambda g, w: g.cos(),
    "counted": lambda g, w: (w > 1).to(g.dtype),
    "derivative": lambda g, w: torch.ops.aten.tanh_backward(w, g),
}


class Ruled(nn.Module):
    """A weight with a backward of its own."""

    def __init__(self, rule: Own) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 8 + 0.1)

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(w)
                return w.clone()

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                return rule(g, ctx.saved_tensors[0])

        self.function = Function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.function.apply(self.weight)


@pytest.mark.parametrize(
    ("rule", "nothing"),
    [pytest.param(rule, True, id=f"nothing-{name}") for name, rule in NOTHING.items()]
    + [pytest.param(rule, False, id=f"something-{name}") for name, rule in SOMETHING.items()],
)
def test_what_is_made_of_no_gradient_is_read_off_the_calls(rule: Own, nothing: bool) -> None:
    half = backward_of(Ruled(rule), torch.randn(4, 4))
    zeros, saved = torch.zeros_like(half.templates[0]), half.recorded.signature.tensors[1:]
    assert any_number(issued_without(half.plain, [zeros, *saved], (), "cpu")) != nothing
    assert (vanishing(half.plain, 1) == {0}) == nothing


@pytest.mark.parametrize("name", [*FINITE, *POLES])
def test_gradients_of_torchs_own_functions_are_none_of_none(name: str) -> None:
    half = backward_of(Two(F.relu, (FINITE | POLES)[name]), torch.randn(5, 4))
    assert vanishing(half.plain, 2) == {0, 1}
