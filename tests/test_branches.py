"""What only outputs without a gradient lead to is left out of a backward where zeros in their place might harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from nimble_core.branches import branch_of, issued_without
from nimble_core.differentiable import Backward
from nimble_core.nimble import Nimble
from nimble_core.options import Options

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
