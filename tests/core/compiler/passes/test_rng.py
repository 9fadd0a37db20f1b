"""Numbers drawn ahead are eager's numbers, in eager's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core import Nimble, Options
from nimble_core.compiler.passes.rng import draws_apart
from nimble_core.compiler.to_fx import calls_of
from nimble_core.tracing.operator_traits import draws_numbers
from tests.support.fused_models import DEVICES
from tests.support.rewrite_models import lifted
from tests.support.training_steps import both

aten = torch.ops.aten
CPU = torch.device("cpu")

DRAWS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "fused": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "with its mask": lambda x: torch.add(*torch.native_dropout(x, 0.4, True)),
    "feature": lambda x: F.dropout1d(x[None], 0.5)[0],
    "turned": lambda x: F.dropout(x.t(), 0.3).t(),
    "noise": lambda x: x + torch.randn_like(x),
    "from nothing": lambda x: x * torch.rand(4, 6, device=x.device),
    "filled": lambda x: x - torch.empty_like(x).exponential_().log(),
    "in place of another": lambda x: torch.exp(x).uniform_() + x,
    "in place, and nobody reads it": lambda x: (torch.zeros_like(x).normal_(), torch.exp(x).uniform_(), x)[2],
    "not in training": lambda x: F.dropout(x, 0.3, training=False),
    "nobody reads it": lambda x: (torch.rand_like(x), x)[1],
    "plain": lambda x: torch.tanh(x),
}
LATE = {
    "by its values": lambda x: x + torch.bernoulli(torch.sigmoid(x)),
    "into a part": lambda x: (y := torch.exp(x), y[0].uniform_(), y)[0] + x,
}


class Chain(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(6, 6), [(DRAWS | LATE)[name] for name in names]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(self.layer(x))
        return x


def drawing(module: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and draws_numbers(node.target, node.args, dict(node.kwargs))
    ]


@given(st.lists(st.sampled_from(list(DRAWS)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_what_is_drawn_ahead_is_what_eager_draws(names: list[str]) -> None:
    model, x = Chain(*names), torch.randn(4, 6)
    module = lifted(model, x)[1]
    count = len(drawing(module))
    draws, rest = draws_apart(module, CPU)
    assert (draws is None) == (count == 0)
    with torch.no_grad():
        torch.manual_seed(5)
        expected = model(x)
        torch.manual_seed(5)
        found = rest(*(draws(x) if draws is not None else (x,)))[0]
    torch.testing.assert_close(found, expected)
    if draws is not None:
        assert (len(drawing(draws)), len(drawing(rest))) == (count, 0)
        assert all(calls_of(node) for node in drawing(draws)), "each stands for its eager call"
        draws.graph.lint()
        rest.graph.lint()


@pytest.mark.parametrize("late", LATE)
def test_all_draws_stay_where_one_of_them_has_to(late: str) -> None:
    module = lifted(Chain("dropout", late), torch.randn(4, 6))[1]
    before = str(module.graph)
    assert draws_apart(module, CPU) == (None, module)
    assert str(module.graph) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DRAWS)
def test_compiled_kernels_draw_what_eager_draws(name: str, device: str) -> None:
    torch.manual_seed(0)  # a draw that drops all shows nothing
    model, x = Chain(name).to(device), torch.randn(4, 6, device=device)
    net = Nimble(model, Options(fuse="inductor", policy="single", tune="full")).prepare(x)
    assert net.engines[0].recorded.recording.program.fuse == "inductor", net.engines[0].notes
    torch.manual_seed(11)
    expected, after = model(x), torch.rand(1, device=device)
    torch.manual_seed(11)
    torch.testing.assert_close(net(x), expected)
    assert torch.equal(torch.rand(1, device=device), after), "as many numbers are drawn"
    net.close()


def test_numbers_drawn_into_a_part_of_a_tensor_keep_compiled_kernels_out() -> None:
    """A compiler leaves such a draw out if nobody reads it, and all numbers after it would be others."""
    net = Nimble(Chain("into a part"), Options(fuse="inductor", policy="single", tune="off")).prepare(torch.ones(4, 6))
    assert net.engines[0].recorded.recording.program.fuse == "none"
    assert any("into a part of a tensor" in note for note in net.engines[0].notes)
    net.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_step_with_dropout_learns_what_eager_learns(device: str) -> None:
    given, step, eager = both("dropout", device=device, options=Options(fuse="inductor", policy="single", tune="full"))
    assert step.engine is not None
    assert step.engine.recorded.recording.program.fuse == "inductor", step.engine.notes
    for seed in range(3):
        inputs, targets = given.draw()
        torch.manual_seed(seed)
        loss = step(inputs, targets)
        torch.manual_seed(seed)
        torch.testing.assert_close(loss, eager(inputs, targets), rtol=1e-4, atol=1e-5)
    step.close()
