"""What autograd is asked for with a drop-in: some gradients, kept graphs, batches, outputs that share memory."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.utils.errors import InputError
from tests.support.drop_in import Place, assert_same_gradients, layer, pair
from tests.support.training_problems import Residual, images, perceptron
from tests.support.training_steps import assert_values


def test_gradients_of_some_tensors(on: Place) -> None:
    net, eager = pair(on(perceptron()), on(torch.randn(6, 8)).requires_grad_())
    x = on(torch.randn(6, 8)).requires_grad_()
    found = [
        torch.autograd.grad(one(x).sin().sum(), [layer(one, 0).weight, x, layer(one, 4).bias]) for one in (net, eager)
    ]
    assert_values(list(found[0]), list(found[1]), rtol=on.near)
    kept = [one.clone() for one in found[0]]
    torch.autograd.grad(net(x * 2).sin().sum(), [layer(net, 0).weight, x])
    assert_values(list(found[0]), kept)
    assert all(one.grad is None for one in (*net.parameters(), x))
    found = [torch.autograd.grad(one(x).sin().sum(), [x])[0] for one in (net, eager)]
    assert_values(found[0], found[1], rtol=on.near)
    net.close()


def test_backward_for_some_tensors(on: Place) -> None:
    net, eager = pair(on(perceptron()), on(torch.randn(6, 8)).requires_grad_())
    data = on(torch.randn(6, 8))
    grads = []
    for model in (net, eager):
        x = data.clone().requires_grad_()
        model(x).sin().sum().backward(inputs=[layer(model, 0).weight, x])
        grads.append(x.grad)
    assert_values(grads[0], grads[1], rtol=on.near)
    assert_same_gradients(net, eager, rtol=on.near)
    assert layer(net, 4).bias.grad is None
    net.close()


def test_a_graph_kept_for_another_backward(on: Place) -> None:
    net, eager = pair(on(Residual()), on(images()[0]), options=on.options)
    x = on(images()[0])
    for model in (net, eager):
        loss = model(x).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


def twice(loss: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a cycle
        loss.backward(create_graph=True)


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_gradient_of_a_gradient_is_refused_and_adds_nothing(way: str, on: Place) -> None:
    net, _ = pair(on(perceptron()), on(torch.randn(6, 8)).requires_grad_())
    x = on(torch.randn(6, 8)).requires_grad_()
    loss = net(x).sin().sum()
    ask = {"grad": lambda: torch.autograd.grad(loss, [x], create_graph=True), "backward": lambda: twice(loss)}
    with pytest.raises(InputError, match="create_graph"):
        ask[way]()
    assert all(one.grad is None for one in (*net.parameters(), x))
    net.close()


class Again(nn.Module):
    """Outputs that share memory: one twice, a part, another shape, without history; part of an input; a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = self.layer(x)
        return [found, found, found[:, :2], found.flatten(), found.detach(), found[:, 2:], x[0], self.layer.weight]


@settings(max_examples=20)
@given(order=st.permutations(range(8)), written=st.integers(0, 7))
def test_outputs_that_share_memory_are_copies_of_each_other(order: list[int], written: int) -> None:
    """What is written to one shows in no other one, and gradients are of what is there."""

    class Some(Again):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            found = super().forward(x)
            return [found[at] for at in order]

    torch.manual_seed(0)
    net, eager = pair(Some(), torch.randn(3, 4))
    x = torch.randn(3, 4)
    results = []
    for model in (net, eager):
        outputs = model(x)
        if model is eager:  # one that is returned twice is one tensor for us too
            copies = {id(one): one.clone() for one in outputs}
            outputs = [copies[id(one)] for one in outputs]
        outputs[written].mul_(3)
        results.append(outputs)
        sum(((at + 1) * one).sum() for at, one in enumerate(outputs)).backward()
    assert_values(*results, rtol=1e-6)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


@pytest.mark.parametrize("way", ["grad", "jacobian", "vmap"])
def test_gradients_in_a_batch_are_refused_and_one_by_one_they_are_eagers(way: str) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    net, eager = pair(perceptron(), x)
    each = torch.eye(4).unsqueeze(1).expand(4, 6, 4).contiguous()
    out = net(x)

    def batched() -> None:
        if way == "grad":
            torch.autograd.grad(out, list(net.parameters()), each, is_grads_batched=True)
        elif way == "jacobian":
            torch.autograd.functional.jacobian(net, x, vectorize=True)
        else:
            torch.func.vmap(lambda one: torch.autograd.grad(out, x, one))(each)

    with pytest.raises(InputError, match="in a batch") as error:
        batched()
    assert "one backward after the other" in error.value.fix
    if way == "jacobian":
        jacobian = torch.autograd.functional.jacobian
        torch.testing.assert_close(jacobian(net, x), jacobian(eager, x))
    else:
        mine, theirs = (
            [torch.autograd.grad(made, [x, *model.parameters()], one, retain_graph=True) for one in each]
            for model, made in ((net, out), (eager, eager(x)))
        )
        torch.testing.assert_close(mine, theirs)
    net.close()


def test_inputs_go_by_the_names_of_the_call() -> None:
    """In what is recorded, and in what is refused."""

    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * mask.tanh()

    net, _ = pair(Masked(8, 4), torch.randn(6, 8), mask=torch.randn(6, 4))
    (engine,) = net.engines
    assert engine.backward is not None
    names = [
        [program.storages[ref.storage].name for ref in program.inputs]
        for program in (half.recorded.recording.program for half in (engine, engine.backward))
    ]
    assert names[0] == ["args[0]", "kwargs['mask']"]
    assert names[1][0] == "gradients of outputs[0]"
    with pytest.raises(InputError, match=r"kwargs\['mask'\] required no gradient then"):
        net(torch.randn(6, 8), mask=torch.randn(6, 4, requires_grad=True))
    net.close()


def test_parameters_can_be_swapped() -> None:
    """As ``.to()`` does where modules are set to: torch refuses tensors that others hold."""
    net, _ = pair(nn.Linear(4, 4), torch.randn(3, 4))
    net(torch.randn(3, 4)).sum().backward()
    weight = net.get_parameter("weight")
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(4, 4)))
    assert torch.equal(weight, torch.ones(4, 4))
    net.close()
