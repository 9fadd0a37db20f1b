"""Drop-in training: outputs of a prepared module carry gradients as eager's do, whatever is asked of autograd."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import flatten
from nimble_core.utils.errors import InputError, NimbleWarning
from tests.support.drop_in import (
    QUICK,
    Place,
    assert_same_gradients,
    layer,
    loss_of,
    on,
    pair,
    prepared,
)
from tests.support.training_problems import (
    OPTIMIZERS,
    PROBLEMS,
    Gan,
    Recomputed,
    Residual,
    Tied,
    gan_data,
    images,
    perceptron,
)
from tests.support.training_steps import assert_same, assert_values, one_thread, state_of

__all__ = ["on", "one_thread"]  # fixtures


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads none", "grads zero"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_training_equals_eager(name: str, set_to_none: bool, on: Place) -> None:
    if on.cuda and name == "dropout":
        pytest.skip("on a GPU a replay draws other numbers than eager")
    found, net, eager = prepared(name, on.options, on.device)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for seed in range(4):
        inputs, targets = found.draw()
        mine.zero_grad(set_to_none)
        theirs.zero_grad(set_to_none)
        torch.manual_seed(seed)
        loss = loss_of(found, net, inputs, targets)
        loss.backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = loss_of(found, eager, inputs, targets)
        expected.backward()
        assert torch.equal(after, torch.get_rng_state())
        assert_values(loss, expected, rtol=on.exact)
        assert_same_gradients(found.model, eager, rtol=on.exact)
        mine.step()
        theirs.step()
        assert_same(state_of(found.model, mine), state_of(eager, theirs), rtol=on.exact)
    assert net.state_dict().keys() == eager.state_dict().keys()
    net.close()


class Tangent(nn.Module):
    """Computes with a transform inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.jvp(lambda one: self.layer(one).tanh(), (x,), (torch.ones_like(x),))[1]
        return found


class Last(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


def once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sin().sum().backward()


def twice_in_one_loss(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).sin().sum() + 2 * model(x.flip(0)).cos().sum()).backward()


def on_its_own_output(model: nn.Module, x: torch.Tensor) -> None:
    model(model(x)).square().sum().backward()


def the_later_forward_first(model: nn.Module, x: torch.Tensor) -> None:
    first, second = model(x), model(x.flip(0))
    second.sin().sum().backward()
    first.cos().sum().backward()


def from_a_gradient_of_the_callers(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.backward(out.detach().cos())


def after_a_write_to_the_output(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.mul_(2).add_(1)
    out.sin().sum().backward()


def clipped(model: nn.Module, x: torch.Tensor) -> None:
    once(model, x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def frozen_in_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).sin().sum()
    layer(model, 0).weight.requires_grad_(False)
    loss.backward()


def moved_in_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).sin().sum()
    weight = layer(model, 0).weight
    weight.data = weight.detach().clone()
    loss.backward()


def vectors(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*(shape or (6, 8)))


USES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Callable[[nn.Module, torch.Tensor], None]]
] = {
    "a recurrent network": (Last, vectors(3, 5, 8), once),
    "a transform inside": (Tangent, vectors(), once),
    "a forward that the backward recomputes": (lambda: Recomputed(0.0), vectors(), once),
    "twice in one loss": (perceptron, vectors(), twice_in_one_loss),
    "on its own output": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        lambda: torch.randn(6, 8, requires_grad=True),
        on_its_own_output,
    ),
    "the later of two forwards first": (Residual, lambda: images()[0], the_later_forward_first),
    "a gradient of the caller's": (perceptron, vectors(), from_a_gradient_of_the_callers),
    "an output that is written": (lambda: nn.Linear(8, 4), vectors(), after_a_write_to_the_output),
    "a gradient that two parameters share, clipped": (Tied, lambda: torch.randint(0, 13, (2, 5)), clipped),
    "a parameter frozen in between": (perceptron, vectors(), frozen_in_between),
    "a parameter moved in between": (perceptron, vectors(), moved_in_between),
}


@pytest.mark.parametrize("name", USES)
def test_uses_equal_eager(name: str) -> None:
    make, draw, use = USES[name]
    net, eager = pair(make(), draw())
    x = draw().detach()
    for model in (net, eager):
        torch.manual_seed(1)
        use(model, x)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_a_prepared_module_inside_of_another(on: Place) -> None:
    inner = on(nn.Linear(8, 8))
    x = on(torch.randn(6, 8))
    outer = on(nn.Linear(8, 8))
    eager = nn.Sequential(copy.deepcopy(inner), copy.deepcopy(outer))
    net = Nimble(nn.Sequential(Nimble(inner, on.options).prepare(x, training=True), outer), on.options)
    net.prepare(x, training=True)
    for one in (net, eager):
        one(x).sin().sum().backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=on.near, atol=on.near)
    net.close()


def test_a_loss_keeps_what_its_backward_replays() -> None:
    model = perceptron()
    x = torch.randn(6, 8)
    loss = Nimble(model, QUICK).prepare(x, training=True)(x).sum()
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_loss_kept_on_the_model_keeps_nothing_after_its_backward() -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sum()
    loss.backward()
    object.__setattr__(net, "last", loss)
    gone = weakref.ref(net)
    del net, loss
    gc.collect()
    assert gone() is None


def test_between_other_trainable_modules(on: Place) -> None:
    torch.manual_seed(0)
    below, above = on(nn.Linear(5, 8)), on(nn.Linear(4, 3))
    model = on(perceptron())
    eager = copy.deepcopy(nn.Sequential(below, model, above))
    net = Nimble(model, on.options).prepare(on(torch.randn(6, 8)).requires_grad_(), training=True)
    whole = nn.Sequential(below, net, above)
    mine, theirs = OPTIMIZERS["momentum"](whole.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    assert len(list(whole.parameters())) == len(list(eager.parameters()))
    for _ in range(3):
        x = on(torch.randn(6, 5))
        for one, optimizer in ((whole, mine), (eager, theirs)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
        assert_values(list(whole.parameters()), list(eager.parameters()), rtol=on.exact)
    net.close()


def test_a_gan_whose_discriminator_is_called_twice(on: Place) -> None:
    """On a GPU the second call runs in eager, which is said: the first one's memory is still needed."""
    ours, theirs = Gan(on.device), Gan(on.device)
    data = gan_data(40, on.device)
    real, noise = data[0]
    critic = Nimble(ours.critic, on.options).prepare(real.clone().requires_grad_(), training=True)
    generator = Nimble(ours.generator, on.options).prepare(noise, training=True)
    losses: list[list[torch.Tensor]] = []
    said: list[warnings.WarningMessage] = []
    for gan, d, g in ((ours, critic, generator), (theirs, theirs.critic, theirs.generator)):
        losses.append([])
        for real, noise in data:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fake = g(noise)
                gan.d.zero_grad()
                loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            said += caught
            loss.backward()
            gan.d.step()
            losses[-1].append(loss.detach())
            gan.g.zero_grad()
            loss = F.softplus(-d(fake)).mean()
            loss.backward()
            gan.g.step()
            losses[-1].append(loss.detach())
    assert bool(said) == on.cuda
    assert all(issubclass(one.category, NimbleWarning) for one in said)
    rtol = 2e-2 if on.cuda else 1e-5
    torch.testing.assert_close(torch.stack(losses[0]), torch.stack(losses[1]), rtol=rtol, atol=rtol)
    if not on.cuda:
        assert_values(*(list(one.generator.state_dict().values()) for one in (ours, theirs)), rtol=rtol)
    critic.close()
    generator.close()


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "transformer"])
def test_loss_curves_are_those_of_eager(name: str) -> None:
    found, net, eager = prepared(name)
    batches = [found.draw() for _ in range(4)]
    curves: list[list[torch.Tensor]] = []
    for model in (net, eager):
        optimizer = OPTIMIZERS["adam"](model.parameters())
        curves.append([])
        for at in range(200):
            optimizer.zero_grad()
            loss = loss_of(found, model, *batches[at % 4])
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.detach())
    torch.testing.assert_close(torch.stack(curves[0]), torch.stack(curves[1]), rtol=1e-4, atol=1e-5)
    assert sum(curves[0][-8:]) < 0.8 * sum(curves[0][:8])
    net.close()


def test_the_measured_choice_equals_eager() -> None:
    found, net, eager = prepared("resnet", Options(budget_s=1.0))
    inputs, targets = found.draw()
    for model in (net, eager):
        loss_of(found, model, inputs, targets).backward()
    assert_same_gradients(found.model, eager, rtol=1e-5)
    (engine,) = net.engines
    assert engine.backward is not None
    assert len(engine.backward.tuned.candidates) > 1
    net.close()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_compiled_kernels_of_recurrent_layers(kind: Any) -> None:
    """Their cells write pieces of a split in place, whose operator says that these are copies."""
    layer = kind(3, 4, batch_first=True).double()
    net, eager = pair(layer, torch.randn(2, 5, 3).double(), options=Options(fuse="inductor", tune="off"))
    assert net.engines[0].recorded.recording.program.fuse == "inductor", net.engines[0].notes
    x = torch.randn(2, 5, 3).double()
    for model in (net, eager):
        model(x)[0].square().sum().backward()
    assert_same_gradients(layer, eager, rtol=1e-9)
    net.close()


def test_dropout_draws_fresh_masks(on: Place) -> None:
    model = on(nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 4)))
    net, _ = pair(model, on(torch.ones(5000, 4)).requires_grad_())
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        x = on(torch.ones(5000, 4)).requires_grad_()
        net(x).sum().backward()
        masks.append(x.grad != 0)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert masks[0].float().mean().item() == pytest.approx(0.75, abs=0.015)
    net.close()


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


def test_a_second_backward_is_refused_and_adds_nothing() -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sin().sum()
    loss.backward()
    kept = [one.grad.clone() for one in net.parameters() if one.grad is not None]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_values([one.grad for one in net.parameters()], kept)
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


def test_other_kernels_keep_strides_that_address_nothing() -> None:
    """Of weights and images of one pixel, in a model channels last: as eager has them, or no kernels fit."""
    inner = [nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Flatten()]
    model = nn.Sequential(*inner, nn.Linear(8, 4)).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    net, eager = pair(model, x, options=Options(fuse="library", tune="off", policy="single"))
    backward = net.engines[0].backward
    assert backward is not None
    assert {half.recording.program.fuse for half in (net.engines[0].recorded, backward.recorded)} == {"library"}
    for one in (net, eager):
        one(x).sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-12)
    for one in net.parameters():
        assert one.grad is not None
        assert one.grad.stride() == one.stride()
    net.close()


class Again(nn.Module):
    """Outputs that share memory: the same one twice, a part, another shape, without history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = self.layer(x)
        return [found, found, found[:, :2], found.flatten(), found.detach(), found[:, 2:]]


@settings(max_examples=20)
@given(order=st.permutations(range(6)), written=st.integers(0, 5))
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


class Passing(nn.Module):
    """Outputs that are an input, a view of one, a parameter, the same tensor twice, views of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"y": y, "again": y, "window": y[:2], "input": x, "row": x[0], "weight": self.linear.weight}


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize(
    "names", [["y"], ["y", "again"], ["window", "y"], ["input"], ["row"], ["weight"], ["y", "weight"]]
)
def test_outputs_that_are_other_tensors(names: list[str]) -> None:
    net, eager = pair(Passing(), torch.randn(6, 8, requires_grad=True))
    data = torch.randn(6, 8)
    found = []
    for model in (net, eager):
        x = data.clone().requires_grad_()
        out = model(x)
        sum(out[name].sin().sum() for name in names).backward()
        found.append([out[name] for name in sorted(out)])
        found[-1].append(x.grad if x.grad is not None else torch.zeros_like(x))
    assert_values(found[0], found[1], rtol=1e-6)
    for one, other in zip(net.parameters(), eager.parameters(), strict=True):
        grads = [torch.zeros_like(one) if of.grad is None else of.grad for of in (one, other)]
        torch.testing.assert_close(*grads)
    net.close()


def test_both_halves_say_where_they_come_from() -> None:
    found, net, _ = prepared("resnet")
    (engine,) = net.engines
    assert engine.backward is not None
    forward = engine.recorded.recording.program.calls
    backward = engine.backward.recorded.recording.program.calls
    assert {call.phase for call in forward} == {"forward"}
    assert {call.phase for call in backward} == {"backward"}
    places = {(call.module, call.origins[0].file, call.origins[0].line) for call in forward}
    assert {(call.module, call.origins[0].file, call.origins[0].line) for call in backward} <= places
    convolutions = [call.module for call in backward if call.operator == "aten.convolution_backward.default"]
    assert convolutions == ["second", "first"]
    assert flatten(list(found.model.parameters()))[0]
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
