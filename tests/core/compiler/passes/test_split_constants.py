"""Constants are what weights alone decide; they follow the weights, and nothing else is among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import fx, nn

from nimble_core.compiler.passes import split_constants as constants
from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import lift
from nimble_core.tracing.folded_weights import Folded
from tests.support.rewrite_models import (
    HOST,
    Drawn,
    drawn_models,
    eager_effects,
    effects,
    lifted,
    recorded,
    same,
    targets,
)


def usual(module: fx.GraphModule) -> None:
    affine_norms(module)
    share_equal(module)
    to_channels_last(module)
    merge_siblings(module, HOST, Decisions(), convolutions=True)
    fold_affine(module)


def names_in(one: Any) -> dict[str, str]:
    storages = one.recording.program.storages
    return {f"given_{slot}": storages[one.recording.storage_of[slot]].name for slot in one.recording.given}


@settings(max_examples=25)
@given(drawn_models())
def test_constants_follow_their_weights_and_sources_are_complete(made: tuple[Drawn, tuple[torch.Tensor, ...]]) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    module = lift(one.recording)
    usual(module)
    folded = split_constants(module, names_in(one))
    assert same(effects(module, one), eager_effects(one), 1e-10)
    if folded is None:
        return
    before = [constant.clone() for constant in folded.constants]
    folded.refresh()
    assert all(map(torch.equal, folded.constants, before))
    places = [constant.data_ptr() for constant in folded.constants]
    named = dict(folded.sources)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            tensor.mul_(1.25)
            folded.refresh()
            changed = not all(map(torch.equal, folded.constants, before))
            assert name in named or not changed, name
            if name in named:
                assert named[name]._version == tensor._version
            before = [constant.clone() for constant in folded.constants]
    assert same(effects(module, one), eager_effects(one), 1e-10)
    assert [constant.data_ptr() for constant in folded.constants] == places


def cut(forward: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, fx.GraphModule, Folded | None]:
    """Cut a lifted model, and check that it does what eager does."""
    one, module = lifted(forward, *inputs)
    folded = split_constants(module, names_in(one))
    for _ in range(2):
        assert same(effects(module, one), eager_effects(one), 1e-6)
    return one, module, folded


X = torch.randn(3, 4)
W = nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (lambda x: x @ (W * 2), 1),
        (lambda x: x + torch.arange(4) * 2.0 + torch.ones(3, 1), 2),
        (lambda x: x + torch.ones(()).expand(3, 4), 1),
        (lambda x: F.linear(x, W), 0),  # a view of a weight is free
        (lambda x: x @ W[:2].t() @ W.view(8, 2)[:2], 0),
        (lambda x: x + W.exp().sum() + W.exp().t()[0], 2),
        (lambda x: x @ (W.t() * 2).split(2)[0].t(), 1),
        (lambda x: torch.tril(torch.ones(3, 3)) @ x, 1),
        # Chance and inputs are no constants.
        (lambda x: x + torch.rand(4), 0),
        (lambda x: x + (torch.rand(4) * W).sum(0), 0),
        (lambda x: x + F.dropout(W * 1.0)[0] * 0, 1),
        (lambda x: x + torch.bernoulli(torch.full((4,), 0.5)), 1),
        (lambda x: x + torch.randperm(4), 0),
        (lambda x: x + torch.empty(4).normal_(), 0),
        (lambda x: x.new_zeros(4) + x, 0),
        (lambda x: x + torch.zeros_like(x), 0),
    ],
)
def test_what_weights_decide_is_folded_and_chance_is_not(forward: Callable[..., Any], count: int) -> None:
    one, module, folded = cut(forward, X)
    assert (len(folded.constants) if folded else 0) == count

    def drawing(graph: fx.GraphModule) -> list[str]:
        return [name for name in targets(graph) if any(word in name for word in ("rand", "bernoulli", "normal"))]

    assert drawing(module) == drawing(lift(one.recording))
    if not count:
        assert split_constants(lift(one.recording), {}) is None


class Counter(nn.Module):
    """State that is written, beside a weight that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * (self.count * 2) * (self.weight * 2)
        self.count += 1
        return y, self.count * 3


def test_memory_that_is_written_is_no_constant() -> None:
    *_, folded = cut(Counter(), X)
    assert folded is not None
    assert [name for name, _ in folded.sources] == ["weight"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (torch.arange(4) * 2, x * 1),
        lambda x: (x * 1, (W * 2), (W * 2).t()),
        lambda x: (x + torch.ones(4) * 2, torch.ones(4) * 2),
        lambda x: ((W * 2).view(-1)[1:], (W * 2).expand(2, 4, 4)),
    ],
)
def test_who_gets_a_constant_may_write_it(forward: Callable[..., Any]) -> None:
    one, module, folded = cut(forward, X)
    assert folded is not None
    wanted = eager_effects(one)
    for made in module(X):
        if not any(stride == 0 for stride in made.stride()):
            made.add_(100)
    assert same(effects(module, one), wanted)


def test_what_is_much_larger_than_what_it_is_made_of_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    small, big = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(100, 100))
    for limit, count in ((1 << 20, 4), (64, 3)):
        monkeypatch.setattr(constants, "_GROWTH_NBYTES", limit)
        one, module, folded = cut(
            lambda x: (x + small * 2, x[0] + torch.ones(10, 100, 4), x + (big * 2).sum(), x[0, 0] + big * 2), X
        )
        assert folded is not None
        assert len(folded.constants) == count
        with torch.no_grad():
            small.mul_(3)
            big.mul_(2)
        folded.refresh()
        assert same(effects(module, one), eager_effects(one), 1e-6)
