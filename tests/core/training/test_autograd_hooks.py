"""Searches for gradients of parameters that autograd's graph does not lead to."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core import InputError, Nimble, NimbleError, Options
from nimble_core.training import autograd_hooks as searches
from nimble_core.training.autograd_hooks import Behind, searches_are_answered

OPTIONS = Options(fuse="none", policy="single", tune="off")


def node_count(loss: torch.Tensor) -> int:
    """Nodes of the graph behind a loss."""
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [one for one, _ in node.next_functions]
    return len(seen)


class Two(nn.Module):
    """Shared by its two halves: a gradient comes by two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Two, Nimble]]:
    torch.manual_seed(0)
    eager = Two()
    net = Nimble(copy.deepcopy(eager), OPTIONS).prepare(torch.randn(3, 4, requires_grad=True), training=True)
    yield eager, net
    net.close()


def loss_of(model: nn.Module, x: torch.Tensor, *, around: bool) -> torch.Tensor:
    """Of what the model makes; ``around``: its parameters are in the loss by themselves too."""
    loss = model(x).sin().sum()
    return loss + sum((one**3).sum() for one in model.parameters()) if around else loss


def test_the_graph_ends_at_the_replay(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    assert searches_are_answered()
    assert node_count(net(torch.randn(3, 4)).sum()) == 3, "sum, replay and its anchor"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_found_is_what_eager_finds(pair: tuple[Two, Nimble], data: st.DataObject) -> None:
    eager, net = pair
    names = [name for name, _ in eager.named_parameters()]
    sought = data.draw(st.lists(st.sampled_from([*names, "x"]), min_size=1, max_size=6))
    around, edges = data.draw(st.booleans()), data.draw(st.booleans())
    x = torch.randn(3, 4)
    found = []
    for model in (eager, net):
        given = x.clone().requires_grad_("x" in sought)
        known: dict[str, Any] = {**dict(model.named_parameters()), "x": given}
        wanted = [known[name] for name in sought]
        if edges:
            wanted = [torch.autograd.graph.get_gradient_edge(one) for one in wanted]
        found.append(torch.autograd.grad(loss_of(model, given, around=around), wanted))
        assert all(one.grad is None for one in known.values())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("around", [False, True])
def test_backward_for_some_adds_to_their_gradients(pair: tuple[Two, Nimble], around: bool) -> None:
    x, found = torch.randn(3, 4), []
    for model in pair:
        for _ in range(2):
            loss_of(model, x, around=around).backward(inputs=list(model.first.parameters()))
        assert model.second.weight.grad is None
        found.append([one.grad for one in model.first.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*found)


def test_several_forwards_in_one_loss(pair: tuple[Two, Nimble]) -> None:
    a, b, found = torch.randn(3, 4), torch.randn(3, 4), []
    for model in pair:
        loss = (model(a).sin() * model(b)).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        loss.backward()
        found[-1] += tuple(one.grad for one in model.parameters())
        model.zero_grad()
    torch.testing.assert_close(*found)


def test_what_is_not_used_is_an_error_or_none(pair: tuple[Two, Nimble]) -> None:
    for model in pair:
        weight, other = model.first.weight, torch.zeros(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(model(torch.randn(3, 4)).sum(), [weight, other])
        found = torch.autograd.grad(model(torch.randn(3, 4)).sum(), [weight, other], allow_unused=True)
        assert [one is None for one in found] == [False, True]


def test_searches_of_others_pass_by(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    x = torch.randn(3, 4, requires_grad=True)
    out = net(x)
    (behind,) = [node.behind for node, _ in out.sum().grad_fn.next_functions]
    assert isinstance(behind, Behind)
    (found,) = torch.autograd.grad(out.sum(), [x])
    assert found.shape == x.shape
    assert not behind.asked
    assert not behind.found
    weight = net.first.weight
    (penalty,) = torch.autograd.grad((weight**2).sum(), [weight])
    torch.testing.assert_close(penalty, 2 * weight)


def test_graphs_are_looked_through_only_for_tensors_that_lie_behind(
    pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr("nimble_core.training.autograd_hooks._behind", lambda outputs: looked.append(outputs) or [])
    eager, net = pair
    x = torch.randn(3, 4, requires_grad=True)
    torch.autograd.grad(eager(x).sum(), [x, eager.first.weight])
    assert not looked
    torch.autograd.grad((net.first.weight**2).sum(), [net.first.weight])
    assert len(looked) == 1


def test_parameters_with_hooks_are_in_the_graph(pair: tuple[Two, Nimble]) -> None:
    seen: list[list[torch.Tensor]] = []
    x = torch.randn(3, 4)
    for model in pair:
        mine: list[torch.Tensor] = []
        early = model.first.weight.register_hook(lambda one, mine=mine: mine.append(one) or one * 2)
        late = model.second.bias.register_post_accumulate_grad_hook(lambda one, mine=mine: mine.append(one.grad))
        loss_of(model, x, around=False).backward()
        mine += [one.grad for one in model.parameters()]
        early.remove()
        late.remove()
        model.zero_grad()
        seen.append(mine)
    torch.testing.assert_close(*map(list, (sorted(one, key=lambda t: float(t.sum())) for one in seen)))
    assert node_count(pair[1](x).sum()) == 3, "removed hooks need no edge"


def test_a_hook_that_comes_after_the_forward_is_refused(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    out = net(torch.randn(3, 4)).sum()
    hook = net.first.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match=r"first\.bias got a hook"):
        out.backward()
    hook.remove()
    assert net.first.bias.grad is None
    out.backward()
    net.zero_grad()


@pytest.mark.parametrize("closed", [False, True])
def test_parameters_can_be_swapped(closed: bool) -> None:
    """As ``.to()`` does where modules are set to: torch refuses tensors that have weak references."""
    model, other = Two(), nn.Parameter(torch.ones(4, 4))
    net = Nimble(model, OPTIONS).prepare(torch.randn(3, 4), training=True)
    net(torch.randn(3, 4)).sum().backward()
    if closed:
        net.close()
    weight = model.first.weight
    torch.utils.swap_tensors(weight, other)
    assert model.first.weight is weight
    assert torch.equal(weight, torch.ones(4, 4))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert weight.dtype is torch.float64
    net.close()


def test_what_is_gone_is_expected_no_more() -> None:
    gc.collect()
    before = dict(searches._expected)
    net = Nimble(Two(), OPTIONS).prepare(torch.randn(3, 4), training=True)
    assert len(searches._expected) == len(before) + 1
    net.close()
    del net
    gc.collect()
    assert searches._expected == before


def test_a_search_behind_what_was_closed_is_no_search_that_finds_nothing() -> None:
    net = Nimble(Two(), OPTIONS).prepare(torch.randn(3, 4), training=True)
    loss, weight = net(torch.randn(3, 4)).sum(), net.first.weight
    net.close()
    del net
    gc.collect()
    with pytest.raises(NimbleError):
        torch.autograd.grad(loss, [weight], allow_unused=True)


def test_reducers_find_all_parameters_in_the_graph(pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch) -> None:
    _, net = pair
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert node_count(net(torch.randn(3, 4)).sum()) == 3 + 4


def test_without_a_way_to_answer_all_parameters_are_in_the_graph(
    pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, net = pair
    monkeypatch.setattr("nimble_core.training.autograd_function.searches_are_answered", lambda: False)
    out = net(torch.randn(3, 4)).sum()
    assert node_count(out) == 3 + 4
    assert all(one is not None for one in torch.autograd.grad(out, list(net.parameters())))


COMPILED = """
import torch
from torch._dynamo.utils import counters
from nimble_core.training.autograd_hooks import searches_are_answered

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)

def step(x):
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()

for _ in range(2):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        compiled(torch.ones(3))
    print(sum(counters["graph_break"].values()))
    searches_are_answered()
"""


def test_code_that_is_compiled_around_a_backward_breaks_no_more_often() -> None:
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120, check=True)
    before, after = map(int, run.stdout.split())
    assert before == after
    assert before > 0, "else nothing is traced around it"
