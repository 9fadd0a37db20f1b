"""Nodes that gather gradients are made anew, and nothing else changes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nimble_core import Nimble, TrainStep
from nimble_core.accumulators import accumulators_renewed, has_node_hooks, renew, require_no_node_hooks
from nimble_core.errors import InputError
from nimble_core.options import Options


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_graphs_that_are_kept_and_new_ones_add_to_the_same_gradient(dtype: torch.dtype) -> None:
    weight = leaf(2, 3, dtype=dtype)
    value, version, address = weight.detach().clone(), weight._version, weight.data_ptr()
    kept = (weight * 2).sum().abs()
    old = id(get_gradient_edge(weight).node)
    assert renew([weight]) == 1
    fresh = (weight * 2).sum().abs()
    assert id(get_gradient_edge(weight).node) != old
    assert (weight._version, weight.data_ptr(), weight.dtype) == (version, address, dtype)
    assert torch.equal(weight, value)
    kept.backward()
    assert weight.grad is not None
    once = weight.grad.clone()
    fresh.backward()
    torch.testing.assert_close(weight.grad, once * 2)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this platform")
def test_an_interrupt_never_finds_a_leaf_empty() -> None:
    weight, found = leaf(3), set[tuple[int, torch.dtype]]()
    kept = [weight.sum()]
    before = signal.signal(signal.SIGALRM, lambda *_: found.add((len(weight), weight.dtype)))
    try:
        for at in range(1000):
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (at % 100 + 1))
            renew([weight])
            kept[0] = weight.sum()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == {(3, torch.float32)}


def test_strides_and_hooks_stay() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    strides, seen = weight.stride(), []
    weight.register_hook(lambda gradient: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda one: seen.append("accumulated"))
    kept = weight.sum()
    assert renew([weight]) == 1
    assert weight.stride() == strides
    weight.sum().backward()
    kept.backward()
    assert seen == ["gradient", "accumulated"] * 2


def test_what_no_graph_holds_is_left_alone() -> None:
    weight, frozen, made = leaf(3), leaf(3).requires_grad_(False), leaf(3) * 2
    (weight * 2).sum().backward()
    assert renew([weight, frozen, made]) == 0


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_node_with_hooks_of_its_own_keeps_them(register: str) -> None:
    weight, seen = leaf(3), []
    node: Any = get_gradient_edge(weight).node
    assert not has_node_hooks(weight)
    handle = getattr(node, register)(lambda *gradients: seen.append(1))
    assert has_node_hooks(weight)
    with pytest.raises(InputError, match="weight has a hook on the node"):
        require_no_node_hooks([("weight", weight)])
    assert renew([weight]) == 0
    weight.sum().backward()
    assert seen == [1]
    assert node is get_gradient_edge(weight).node
    handle.remove()
    assert not has_node_hooks(weight)
    require_no_node_hooks([("weight", weight), ("frozen", torch.ones(2)), ("made", weight * 2)])
    assert renew([weight]) == 1


def test_hooks_of_the_leaf_are_not_the_nodes() -> None:
    weight = leaf(3)
    weight.register_hook(lambda gradient: None)
    weight.register_post_accumulate_grad_hook(lambda one: None)
    assert not has_node_hooks(weight)


def test_inside_nothing_is_shared_with_graphs_outside() -> None:
    weight = leaf(3)
    kept = weight.sum()
    outside = id(get_gradient_edge(weight).node)
    with accumulators_renewed([weight]):
        inner = weight.sum()  # as of a failed preparation, whose error is kept
        inside = id(get_gradient_edge(weight).node)
    assert len({outside, inside, id(get_gradient_edge(weight).node)}) == 3
    (kept + inner + weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3


def test_errors_renew_as_well() -> None:
    weight, kept = leaf(3), []

    def fails() -> None:
        with accumulators_renewed([weight]):
            kept.append(weight.sum())
            raise RuntimeError("oh")

    with pytest.raises(RuntimeError, match="oh"):
        fails()
    assert renew([weight]) == 0


def test_training_refuses_hooks_that_it_would_pass_by() -> None:
    model, x, y = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(3, 2)
    node: Any = get_gradient_edge(model.bias).node
    handle = node.register_hook(lambda *gradients: None)
    step = TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), options=Options(tune="off"))
    with pytest.raises(InputError, match="bias has a hook on the node"):
        step.prepare(x, y)
    with pytest.raises(InputError, match="bias has a hook on the node"):
        Nimble(model, Options(tune="off")).prepare(x, training=True)
    handle.remove()
    step.prepare(x, y)
    step(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_that_is_kept_is_in_nobodys_way(whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    x, y = torch.randn(3, 4, device="cuda"), torch.randn(3, 2, device="cuda")
    kept = nn.functional.mse_loss(model(x), y)  # its graph holds nodes of the default stream
    kept.backward(retain_graph=True)
    expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    options = Options(tune="off", policy="nimble")
    if whole:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
        step = TrainStep(model, nn.functional.mse_loss, optimizer, options=options).prepare(x, y)
        step(x, y)
        found = list(step.gradients.values())
    else:
        net = Nimble(model, options).prepare(x, training=True)
        model.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        found = [one.grad for one in model.parameters() if one.grad is not None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    kept.backward()
    torch.testing.assert_close([one.grad for one in model.parameters()], expected, rtol=1e-4, atol=1e-5)
