"""Who holds the nodes that gather gradients, what is said of it, and which hooks they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nimble_core import Nimble, TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.tracing.grad_accumulators import (
    has_node_hooks,
    held_by_graphs,
    kept_graphs_apart,
    require_no_node_hooks,
)
from nimble_core.utils.errors import CaptureError, InputError

REDIRECTS = hasattr(torch._C, "_set_override_stale_capture_stream")


def leaf(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def fails() -> None:
    raise CaptureError("CUDA refused the capture: operation not permitted", where="linear, line 3", fix="run it once")


# -- graphs that are kept --------------------------------------------------------------------------------------------


def test_leaves_of_graphs_that_are_kept_are_named() -> None:
    one, two, three, frozen = leaf(3), leaf(3), leaf(3), leaf(3).requires_grad_(False)
    named = {"one": one, "two": two, "three": three, "frozen": frozen, "made": one * 2}
    (three * 2).sum().backward()  # nobody keeps this
    kept = (one * two).sum()
    assert held_by_graphs(named) == ["one", "two"]
    assert held_by_graphs(named) == ["one", "two"], "asking keeps nothing"
    kept.backward()
    assert held_by_graphs(named) == ["one", "two"], "also after its backward"
    del kept, named["made"]
    assert held_by_graphs(named) == []
    assert [tensor.grad is not None for tensor in (one, two, three)] == [True] * 3


def test_a_capture_that_fails_says_what_is_kept_where_torch_cannot_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.tracing.grad_accumulators.set_stale_capture_stream", None)
    weight, bias = leaf(3), leaf(3)
    kept = (weight + bias).sum()
    told = pytest.raises(CaptureError, match=r"while weight \(and 1 more\) is part of a graph that is kept")
    with told as caught, kept_graphs_apart({"weight": weight, "bias": bias}):
        fails()
    assert "del loss" in caught.value.fix
    assert caught.value.where == "linear, line 3"
    assert isinstance(caught.value.__cause__, CaptureError)
    kept.backward()


def test_an_error_that_is_kept_keeps_no_graph_of_the_capture_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.tracing.grad_accumulators.set_stale_capture_stream", None)
    weight = leaf(3)

    def deep() -> None:
        made = (weight * 2).sum()  # noqa: F841 - what a frame holds
        fails()

    def captures() -> None:
        try:
            deep()
        except CaptureError as error:
            raise CaptureError("another, about the first") from error

    with pytest.raises(CaptureError, match="another") as caught, kept_graphs_apart({"weight": weight}):
        captures()
    assert held_by_graphs({"weight": weight}) == []
    assert caught.value.__cause__ is not None


@pytest.mark.skipif(not REDIRECTS, reason="this torch cannot redirect gradients of graphs that are kept")
@pytest.mark.parametrize("before", [False, True])
def test_torch_redirects_where_it_can_and_as_long_as_it_takes(before: bool) -> None:
    weight, asked = leaf(3), torch._C._override_stale_capture_stream
    torch._C._set_override_stale_capture_stream(before)
    try:
        with kept_graphs_apart({"weight": weight}):
            assert asked() is before, "nothing is kept"
        kept = weight.sum()
        with kept_graphs_apart({"weight": weight}):
            assert asked() is True
        assert asked() is before
        with pytest.raises(CaptureError, match="CUDA refused"), kept_graphs_apart({"weight": weight}):
            fails()
        assert asked() is before
        kept.backward()
    finally:
        torch._C._set_override_stale_capture_stream(False)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_that_is_kept_is_redirected_or_named(whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    x, y = torch.randn(3, 4, device="cuda"), torch.randn(3, 2, device="cuda")
    kept = [nn.functional.mse_loss(model(x), y)]  # its graph holds nodes of the default stream
    options = Options(tune="off", policy="nimble")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = TrainStep(model, nn.functional.mse_loss, optimizer, options=options)
    net = Nimble(model, options)

    def prepare() -> None:
        _ = step.prepare(x, y) if whole else net.prepare(x, training=True)

    if not REDIRECTS:
        told = pytest.raises(CaptureError, match=r"while 0\.weight \(and 3 more\) is part of a graph that is kept")
        with told as caught:  # kept, as a notebook keeps the last error
            prepare()
        assert "del loss" in caught.value.fix
        kept.pop().backward()  # and is none the worse for it
    expected = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
    prepare()
    if whole:
        step(x, y)
        found = list(step.gradients.values())
    else:
        model.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        found = [one.grad for one in model.parameters() if one.grad is not None]
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-5)


# -- hooks of nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_a_node_are_found(register: str) -> None:
    weight, seen = leaf(3), []
    node: Any = get_gradient_edge(weight).node
    assert not has_node_hooks(weight)
    handle = getattr(node, register)(lambda *gradients: seen.append(1))
    assert has_node_hooks(weight)
    with pytest.raises(InputError, match="weight has a hook on the node"):
        require_no_node_hooks([("weight", weight)])
    weight.sum().backward()
    assert seen == [1]
    handle.remove()
    assert not has_node_hooks(weight)
    require_no_node_hooks([("weight", weight), ("frozen", torch.ones(2)), ("made", weight * 2)])


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
