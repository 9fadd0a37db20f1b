"""What is made of a forward and a backward that were recorded together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble, NotStaticError
from nimble_core.runtime.host.device import HostDevice, HostExecutable
from nimble_core.scheduling.options import Options
from nimble_core.training import prepare_training
from nimble_core.utils.errors import InputError, NimbleError
from tests.support.drop_in import (
    QUICK,
    assert_same_gradients,
    layer,
    loss_of,
    pair,
    prepared,
)
from tests.support.training_problems import (
    OPTIMIZERS,
    made,
    perceptron,
)
from tests.support.training_steps import assert_untouched, assert_values, everything, one_thread

__all__ = ["one_thread"]  # a fixture


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_are_wrong_together_are_left_out(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = prepare_training._unlike_eager, []

    def unlike(joint: Any, forward: Any, backward: Any, count: int) -> str:
        asked.append(backward.tuned.recorded.recording.program.fuse)
        return real(joint, forward, backward, count) if asked[-1] == "none" else "replays are not what eager computes"

    monkeypatch.setattr(prepare_training, "_unlike_eager", unlike)
    options = Options(fuse="inductor", tune="off", strict=strict)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 3)
    if strict:
        with pytest.raises(NimbleError, match="not what eager computes"):
            pair(model, x, options=options)
        return
    net, eager = pair(model, x, options=options)
    assert asked == ["inductor", "none"]
    assert net.engines[0].recorded.recording.program.fuse == "none"
    assert net.engines[0].notes[0] == "inductor: left out: replays are not what eager computes"
    for module in (net, eager):
        module(x).square().sum().backward()
    assert_same_gradients(model, eager, rtol=1e-5)
    net.close()


def test_a_backward_can_be_made_once_more() -> None:
    _, net, _ = prepared("resnet")
    half = net.engines[0].backward
    assert half is not None
    spare = prepare_training._captured_separately(HostDevice(), half.tuned, None)
    tensors = half.recorded.signature.tensors
    inputs = [torch.randn_like(one) if one.is_floating_point() else one for one in tensors]
    assert_values(spare.run(inputs), half.executable.run(inputs))
    spare.close()
    net.close()


def attention_of_seeds(name: str, seed: Callable[[], int]) -> Callable[..., Any]:
    """Define an operator that returns a seed for its backward, as attention does, and draws nothing."""
    tests = torch.library.Library("nimble_seed_tests", "FRAGMENT")
    given = "Tensor philox_seed, float dropout_p=0.0"
    tags = (torch.Tag.nondeterministic_seeded,)
    tests.define(f"{name}(Tensor q, float dropout_p=0.0) -> (Tensor out, Tensor philox_seed)", tags=tags)
    tests.define(f"{name}_backward(Tensor grad, Tensor q, {given}) -> Tensor")
    tests.impl(name, lambda q, dropout_p=0.0: (q.sin(), torch.tensor(seed())), "CPU")
    tests.impl(f"{name}_backward", lambda grad, q, seed, dropout_p=0.0: grad * q.cos(), "CPU")
    forward = getattr(torch.ops.nimble_seed_tests, name)
    backward = getattr(torch.ops.nimble_seed_tests, f"{name}_backward")

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.dropout = inputs[1]

    torch.library.register_autograd(
        f"nimble_seed_tests::{name}",
        lambda ctx, grad, _: (backward(grad, *ctx.saved_tensors, ctx.dropout), None),
        setup_context=save,
        lib=tests,
    )
    return lambda q, dropout: (forward(q, dropout)[0], tests)[0]  # which lives as long as this


def test_seeds_that_nothing_is_dropped_by_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are whatever was in their memory: fused kernels of attention without dropout were left out for that."""
    replaying, run = [False], HostExecutable.run

    def watched(self: HostExecutable, *args: Any, **kwargs: Any) -> Any:
        replaying[0] = True
        try:
            return run(self, *args, **kwargs)
        finally:
            replaying[0] = False

    monkeypatch.setattr(HostExecutable, "run", watched)
    attend = attention_of_seeds("attend", lambda: 1 << 40 if replaying[0] else 0)

    class Attends(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](F.gelu(attend(self[0](x), 0.0)))

    model, x = Attends(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    net = Nimble(model, Options(fuse="library", tune="off")).prepare(x, training=True)
    assert not net.engines[0].notes
    assert net.engines[0].recorded.recording.program.fuse == "library"
    net(x).sum().backward()
    eager(x).sum().backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("options", [QUICK, Options(budget_s=0.5)], ids=["quick", "measured"])
@pytest.mark.parametrize("name", ["resnet", "dropout", "shared", "frozen"])
def test_preparing_changes_nothing(name: str, options: Options) -> None:
    found = made(name)
    optimizer = OPTIMIZERS["adamw"](found.model.parameters())
    inputs, targets = found.draw()
    loss_of(found, found.model, inputs, targets).backward()
    optimizer.step()
    if inputs.is_floating_point():
        inputs.requires_grad_()
        inputs.grad = torch.ones_like(inputs)
    kept = inputs.detach().clone()
    before = everything(found.model, optimizer)
    net = Nimble(found.model, options).prepare(inputs, training=True)
    assert_untouched(before, everything(found.model, optimizer))
    assert torch.equal(inputs, kept)
    if inputs.is_floating_point():
        assert torch.equal(inputs.grad, torch.ones_like(inputs))
        assert inputs.requires_grad
        assert inputs.is_leaf
    net.close()


class Reassigned(nn.Module):
    """Gives its buffer another tensor in each forward, which a replay does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


def test_a_buffer_that_is_read_and_replaced_is_refused() -> None:
    with pytest.raises(NotStaticError, match="buffer average is read and then replaced"):
        Nimble(Reassigned(), QUICK).prepare(torch.randn(6, 8), training=True)


class Numpy(nn.Module):
    """Computes out of torch's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(x.detach().numpy().mean())


def test_what_is_computed_out_of_sight_is_refused() -> None:
    pytest.importorskip("numpy")
    with pytest.raises(NimbleError):
        Nimble(Numpy(), QUICK).prepare(torch.randn(6, 8), training=True)


def test_a_number_that_follows_the_input_is_refused_beside_an_output() -> None:
    class Tells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), float(x.numpy()[0, 0])

    with pytest.raises(NotStaticError, match=r"on other input values output\[1\] is"):
        Nimble(Tells().train()).prepare(torch.randn(6, 8), training=True)


def test_in_evaluation_mode_there_is_nothing_to_train() -> None:
    with pytest.raises(InputError, match="evaluation mode"):
        Nimble(perceptron().eval(), QUICK).prepare(torch.randn(6, 8), training=True)


def test_a_function_has_nothing_to_train() -> None:
    with pytest.raises(InputError, match="takes a module"):
        Nimble(torch.relu, QUICK).prepare(torch.randn(6, 8), training=True)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"a gradient is sparse(.|\n)*0\.weight(.|\n)*sparse=False"):
        Nimble(model, QUICK).prepare(torch.randint(9, (5,)), training=True)
    assert all(one.grad is None for one in model.parameters())


def test_a_transform_of_what_is_prepared_is_refused() -> None:
    net = Nimble(nn.Linear(8, 4), QUICK).prepare(torch.randn(6, 8), training=True)
    x, weights = torch.randn(6, 8), {name: one.detach() for name, one in net.named_parameters()}
    with pytest.raises(InputError, match=r"cannot be transformed(.|\n)*transform the model itself"):
        torch.func.grad(lambda given: torch.func.functional_call(net, given, (x,)).sum())(weights)
    net.close()


def test_a_module_without_gradients_is_refused() -> None:
    model = perceptron().requires_grad_(False)
    with pytest.raises(InputError, match="no output depends on"):
        Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True)
    net, eager = pair(model, torch.randn(6, 8, requires_grad=True))
    x = torch.randn(6, 8, requires_grad=True)
    assert_values(*(torch.autograd.grad(one(x).sin().sum(), [x])[0] for one in (net, eager)), rtol=1e-6)
    net.close()


def _replaced(net: Nimble, x: torch.Tensor) -> None:
    layer(net, 0).weight = nn.Parameter(layer(net, 0).weight.detach().clone())
    net(x)


def _replaced_memory(net: Nimble, x: torch.Tensor) -> None:
    layer(net, 0).weight.data = layer(net, 0).weight.detach().clone()
    net(x)


def _replaced_module(net: Nimble, x: torch.Tensor) -> None:
    net._model[0] = nn.Linear(8, 8)
    net(x)


def _part_in_evaluation(net: Nimble, x: torch.Tensor) -> None:
    layer(net, 1).eval()
    net(x)


def _frozen(net: Nimble, x: torch.Tensor) -> None:
    layer(net, 0).weight.requires_grad_(False)
    net(x)


def _unfrozen(net: Nimble, x: torch.Tensor) -> None:
    layer(net, 2).bias.requires_grad_(True)
    net(x)


def _input_with_gradient(net: Nimble, x: torch.Tensor) -> None:
    net(x.clone().requires_grad_())


def _converted(net: Nimble, x: torch.Tensor) -> None:
    net.double()
    net(x.double())


def _converted_model(net: Nimble, x: torch.Tensor) -> None:
    net._model.double()
    net(x)


@pytest.mark.parametrize(
    "change",
    [
        _replaced, _replaced_memory, _replaced_module, _part_in_evaluation, _frozen, _unfrozen, _input_with_gradient,
        _converted, _converted_model,
    ],
    ids=lambda one: one.__name__.strip("_"),
)  # fmt: skip
def test_what_no_longer_fits_is_refused_before_anything_is_written(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].bias.requires_grad_(False)
    x = torch.randn(6, 8)
    net = Nimble(model, QUICK).prepare(x, training=True)
    net(x).sin().sum().backward()
    norm = model[1]
    values = copy.deepcopy([norm.running_mean.float(), norm.num_batches_tracked])
    with pytest.raises(NimbleError) as error:
        change(net, x)
    assert error.value.fix
    assert_values([norm.running_mean.float(), norm.num_batches_tracked], values)
    net.close()


def test_preparing_leaves_a_backward_that_is_under_way_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    loss = model(torch.randn(6, 8)).sin().sum()
    Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True).close()
    loss.backward()
