"""What is written or closed between a forward and its backward is refused where the backward needs it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError
from tests.support.drop_in import CheckpointedNorm, assert_same_gradients, layer, loss_of, pair, prepared


@pytest.mark.parametrize("what", ["input", "output"])
def test_what_autograd_saves_may_not_be_written_before_the_backward(what: str) -> None:
    net, eager = pair(nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()), torch.randn(6, 8))
    for model in (net, eager):
        x = torch.randn(6, 8)
        out = model(x)
        with torch.no_grad():
            (x if what == "input" else out).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    net.close()


def test_a_weight_written_before_the_backward_is_refused() -> None:
    net, eager = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8))
    for model in (eager, net):
        out = model(torch.randn(6, 8))
        with torch.no_grad():
            layer(model, 2).weight.mul_(2)
        with pytest.raises((RuntimeError, InputError), match=r"inplace operation|written between"):
            out.sum().backward()
        assert all(one.grad is None for one in net.parameters())
    net.close()


class Held(nn.Module):
    """Reads what is not trained: a frozen parameter, a buffer, a plain tensor; and a buffer that it updates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.rand(4) + 1, requires_grad=False)
        self.plain = torch.rand(4) + 1
        self.register_buffer("buffer", torch.rand(4) + 1)
        self.register_buffer("count", torch.ones(4))
        self.register_buffer("unread", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.norm(self.layer(x)) * self.frozen * self.plain * self.buffer * self.count + self.unread


@pytest.mark.parametrize("name", ["frozen", "plain", "buffer", "count"])
def test_what_the_backward_reads_and_is_not_trained_may_not_be_written_before_it(name: str) -> None:
    net, eager = pair(Held(), torch.randn(6, 4))
    for model in (eager, net):
        out = model(torch.randn(6, 4))
        with torch.no_grad():
            getattr(model, name).mul_(10)
        said = "a tensor beside the model" if name == "plain" else name
        with pytest.raises((RuntimeError, InputError), match=rf"inplace operation|{said} was written between"):
            out.sum().backward()
        assert all(one.grad is None for one in model.parameters())
    net.close()


def test_a_buffer_that_a_second_forward_updates_is_another_one_for_the_first_backward() -> None:
    net, eager = pair(Held(), torch.randn(6, 4))
    for model in (eager, net):
        out = model(torch.randn(6, 4))
        model(torch.randn(6, 4))
        with pytest.raises((RuntimeError, InputError), match=r"inplace operation|count was written between"):
            out.sum().backward()
    net.close()


def test_what_the_backward_does_not_read_may_be_written_before_it() -> None:
    net, eager = pair(Held(), torch.randn(6, 4))
    x = torch.randn(6, 4)
    for model in (eager, net):
        out = model(x)
        with torch.no_grad():
            model.get_buffer("unread").mul_(10)
            model.get_parameter("layer.bias").mul_(10)
        out.sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


@pytest.mark.parametrize("how", ["two forwards", "retained", "evaluated between"])
def test_what_the_backward_writes_itself_is_no_write_of_others(how: str) -> None:
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    eager = CheckpointedNorm().train()
    net = Nimble(copy.deepcopy(eager), Options(tune="off")).prepare(x, training=True)
    for model in (eager, net):
        outputs = [model(x), model(x)] if how == "two forwards" else [model(x)]
        if how == "evaluated between":
            with torch.no_grad():
                model(x)
        loss = sum(output.square().sum() for output in outputs)
        loss.backward(retain_graph=how == "retained")
        if how == "retained":
            loss.backward()
    for (name, one), other in zip(net.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("how", ["close", "prepare"])
def test_a_backward_after_its_engine_was_closed_is_refused(how: str) -> None:
    found, net, _ = prepared("resnet")
    inputs, targets = found.draw()
    loss = loss_of(found, net, inputs, targets)
    if how == "close":
        net.close()
    else:
        net.prepare(inputs, training=True)
    with pytest.raises(InputError, match="engine was closed since"):
        loss.backward()
    assert all(one.grad is None for one in net.parameters())
    if how == "prepare":
        loss_of(found, net, inputs, targets).backward()
        assert any(one.grad is not None for one in net.parameters())
        net.close()
