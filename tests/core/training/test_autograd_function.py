"""Drop-in training: outputs of a prepared module carry gradients as eager's do, whatever is done with them."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nimble_core import Nimble, NotStaticError, TrainStep
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import flatten
from nimble_core.utils.errors import InputError, NimbleError, NimbleWarning
from tests.core.api.test_train_step import (
    OPTIMIZERS,
    PROBLEMS,
    Aliases,
    Gan,
    Island,
    Nested,
    Recomputed,
    Residual,
    Tied,
    Two,
    assert_same,
    assert_untouched,
    assert_values,
    everything,
    gan_data,
    images,
    made,
    one_thread,
    perceptron,
    state_of,
    twin,
)

__all__ = ["one_thread"]  # a fixture

QUICK = Options(tune="off", policy="single")
CLOSE = 1e-3
"""Relative and absolute, on a GPU: float32 sums in another order, over a few steps."""


@dataclass(frozen=True)
class Place:
    """Where a test runs.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        options: what to prepare with.
        exact: how near to eager what is computed in the same order has to come there, and
        near: what is not.
    """

    device: str
    options: Options
    exact: float
    near: float

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def __call__(self, one: Any) -> Any:
        """A tensor or module there."""
        return one.to(self.device)


HOST = Place("cpu", QUICK, exact=0.0, near=1e-6)
GPU = Place("cuda", Options(tune="off", policy="nimble"), exact=CLOSE, near=CLOSE)


@pytest.fixture(params=[HOST, pytest.param(GPU, marks=pytest.mark.gpu)], ids=lambda place: place.device)
def on(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each place; on a GPU products and convolutions are in float32, by the same kernels in each run."""
    with exact_products() if request.param.cuda else nullcontext():
        yield request.param


@contextmanager
def exact_products() -> Iterator[None]:
    """Products and convolutions on a GPU in float32, by the same kernels in each run."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
        torch.backends.cudnn.deterministic = deterministic


def pair(model: nn.Module, *args: Any, options: Options = QUICK, **kwargs: Any) -> tuple[Nimble, nn.Module]:
    """The model prepared for training, and a copy that stays eager."""
    eager = twin(model)
    return Nimble(model, options).prepare(*args, training=True, **kwargs), eager


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def prepared(name: str, options: Options = QUICK, device: str = "cpu") -> tuple[Any, Nimble, nn.Module]:
    """A problem of the whole step's tests, prepared for training."""
    found = made(name, device)
    inputs = found.draw()[0]
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    net, eager = pair(found.model, *args, options=options, **kwargs)
    return found, net, eager


def layer(model: nn.Module, at: int) -> Any:
    """A layer of a sequence, prepared or not."""
    return model.get_submodule(str(at))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for name, one in model.named_parameters()}


def assert_same_gradients(mine: nn.Module, theirs: nn.Module, *, rtol: float = 0.0) -> None:
    """The same parameters have gradients, of the same values."""
    a, b = gradients(mine), gradients(theirs)
    assert {name for name, one in a.items() if one is None} == {name for name, one in b.items() if one is None}
    for name, one in a.items():
        if one is not None:
            torch.testing.assert_close(one, b[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def loss_of(found: Any, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    output = called(model, inputs)
    return found.loss_fn(output) if targets is None else found.loss_fn(output, targets)


# -- equal to eager --------------------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@settings(max_examples=25)
@given(
    wanted=st.sets(st.sampled_from(["logits", "first", "second", "best"]), min_size=1),
    of_input=st.booleans(),
    before=st.sampled_from(["none", "zeros", "values", "mixed"]),
    rounds=st.integers(1, 3),
    clipped=st.booleans(),
)
def test_any_outputs_may_be_used_and_gradients_add_up(
    wanted: set[str], of_input: bool, before: str, rounds: int, clipped: bool
) -> None:
    """Some outputs of several, inputs with gradients or without, on top of gradients that are there."""
    torch.manual_seed(0)
    model = Nested()
    model.a.bias.requires_grad_(False)
    net, eager = pair(model, torch.randn(6, 8, requires_grad=of_input))
    if before != "none":
        for at, (one, other) in enumerate(zip(model.parameters(), eager.parameters(), strict=True)):
            if one.requires_grad and (before != "mixed" or at % 2):
                one.grad = torch.randn_like(one) if before != "zeros" else torch.zeros_like(one)
                other.grad = one.grad.clone()
    for _ in range(rounds):
        x = torch.randn(6, 8)
        found = []
        for one in (net, eager):
            given_x = x.clone().requires_grad_(of_input)
            out = one(given_x)
            assert type(out) is Two
            assert out.extra["none"] is None
            assert out.extra["name"] == "two"
            assert not out.extra["best"].requires_grad
            assert not out.extra["pair"][1].requires_grad
            parts = {"logits": out.logits, "first": out.extra["pair"][0], "second": out.extra["pair"][1]}
            used = [parts[name] for name in sorted(wanted & parts.keys())]
            loss = sum((used[at] * (at + 1)).sin().sum() for at in range(len(used))) if used else out.logits.sum()
            if loss.requires_grad:
                loss.backward()
            found.append((out, given_x.grad if given_x.grad is not None else torch.zeros(0)))
        assert_values(found[0], found[1])
        assert_same_gradients(model, eager)
    if clipped and any(one.grad is not None for one in eager.parameters()):
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, eager)]
        torch.testing.assert_close(*norms)
    net.close()


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
def test_what_only_unused_outputs_depend_on_gets_no_gradient() -> None:
    net, _ = pair(Nested(), torch.randn(6, 8))
    net(torch.randn(6, 8)).logits.sum().backward()
    assert net.a.weight.grad is not None
    assert net.b.weight.grad is None


class Poles(nn.Module):
    """Outputs whose derivatives are infinite where the forward is not, and where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, (h * h).sum(-1).sqrt(), (h * 1000).exp(), F.gelu(h[:2]) @ self.linear.weight


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("kept", [False, True], ids=["once", "retained"])
@pytest.mark.parametrize("used", [(0,), (3,), (0, 3), (1,), (0, 1), (2, 3), (0, 1, 2, 3)])
def test_branches_without_a_gradient_add_nothing(used: tuple[int, ...], kept: bool, on: Place) -> None:
    """A row of zeros: its square root has an infinite derivative, which zeros make NaN of where they are run."""
    model = on(Poles())
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    x = x.clone()
    x[-1] = 0
    for one in (net, eager):
        loss = sum(part.sum() for at, part in enumerate(one(x)) if at in used)
        loss.backward(retain_graph=kept)
        if kept:
            loss.backward()
    mine, theirs = model.linear.weight.grad, eager.linear.weight.grad
    assert theirs.isnan().any() == (not {1, 2}.isdisjoint(used))
    torch.testing.assert_close(mine, theirs, rtol=on.near, atol=on.near, equal_nan=True)
    net.close()


class Adding(torch.autograd.Function):
    """A backward that adds to the gradient, and counts in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, seen)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, seen = ctx.saved_tensors
        seen.add_(gradient.abs().mean(0) + 1)
        return gradient + x.sign(), None


class OwnBackward(nn.Module):
    """Two outputs; the second, or both, through a function of the user's own, or through a hook.

    Args:
        through: "function" or "hook": what adds to the gradient.
        both: whether both outputs come from it.
    """

    def __init__(self, through: str, both: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.full((8,), 7.0))
        self.through, self.both = through, both

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        own = Adding.apply(h, self.seen) if self.through == "function" else h * 1
        if self.through == "hook":
            own.register_hook(lambda gradient: gradient + 1)
        return (own.sin() if self.both else h.sin()), own.cos()


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize(("through", "both"), [("hook", False), ("hook", True), ("function", True)])
def test_backwards_that_add_something_of_their_own(through: str, both: bool, on: Place) -> None:
    model = on(OwnBackward(through, both))
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    for _ in range(2):
        for one in (net, eager):
            one(x)[0].sum().backward()
    assert_same_gradients(model, eager, rtol=on.near)
    torch.testing.assert_close(model.seen, eager.seen)
    net.close()


def test_an_autograd_function_that_only_outputs_without_a_gradient_come_from_is_refused() -> None:
    model = OwnBackward("function", both=False)
    net, eager = pair(model, torch.randn(6, 8))
    x = torch.randn(6, 8)
    with pytest.raises(InputError, match="no gradient came for output 1, which an autograd function") as refused:
        net(x)[0].sum().backward()
    assert "detach outputs" in refused.value.fix
    assert all(one.grad is None for one in model.parameters())
    for one in (net, eager):
        sum(part.sum() for part in one(x)).backward()
    assert_same_gradients(model, eager)
    net.close()


def test_branches_that_run_call_by_call_are_told_of_once() -> None:
    net, _ = pair(Poles(), torch.randn(6, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            net(torch.randn(6, 8))[0].sum().backward()
        net(torch.randn(6, 8))[0].sum().backward()
    assert ["output 1, 2, 3" in str(one.message) for one in told] == [True]
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


@pytest.mark.parametrize("forwards", ["before", "on the threads"])
def test_backwards_on_several_threads_add_up(forwards: str) -> None:
    model = perceptron()
    x = torch.randn(6, 8)
    net, eager = pair(model, x)
    eager(x).sum().backward()
    for _ in range(25):
        net.zero_grad()
        losses = [net(x).sum() for _ in range(4)] if forwards == "before" else None
        work = [partial(loss.backward) for loss in losses] if losses else [lambda: net(x).sum().backward()] * 4
        threads = [threading.Thread(target=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, 4 * theirs.grad)
    net.close()


@pytest.mark.parametrize("adding", [False, True], ids=["grad", "backward for some"])
def test_threads_search_one_graph(adding: bool) -> None:
    """Each thread gets eager's gradients of what it asks for, again and again, on one forward."""
    net, eager = pair(perceptron(), torch.randn(6, 8))
    x = torch.randn(6, 8)
    names = [name for name, _ in net.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(eager(x).sin().sum(), list(eager.parameters())), strict=True))
    loss = net(x).sin().sum()
    failed: list[BaseException] = []
    together = threading.Barrier(len(names))

    def search(name: str) -> None:
        try:
            together.wait(60)
            for _ in range(50):
                if adding:
                    loss.backward(inputs=[net.get_parameter(name)], retain_graph=True)
                else:
                    (found,) = torch.autograd.grad(loss, [net.get_parameter(name)], retain_graph=True)
                    torch.testing.assert_close(found, expected[name])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=search, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    for name in names if adding else ():
        torch.testing.assert_close(net.get_parameter(name).grad, 50 * expected[name])
    net.close()


class Overwriting:
    """A host executable whose inputs and outputs always are at the same place, as those of a captured graph."""

    def __init__(self, inner: Any, inputs: Sequence[torch.Tensor]) -> None:
        self.inner, self.arena, self.lock = inner, None, threading.Lock()
        self.buffers = [one.detach().clone() for one in inputs]
        self.outputs = [one.detach().clone() for one in inner.run(self.buffers, static=True)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        with self.lock, torch.no_grad():
            for buffer, one in zip(self.buffers, inputs, strict=True):
                buffer.copy_(one)
            for output, one in zip(self.outputs, self.inner.run(self.buffers, static=True), strict=True):
                output.copy_(one)
            return list(self.outputs) if static else [one.clone() for one in self.outputs]


@pytest.fixture
def overwriting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is prepared on the host keeps its results in memory that the next run overwrites, as on a GPU."""
    capture = HostDevice.capture

    def captured(self: HostDevice, recording: Any, schedule: Any, inputs: Any, *args: Any) -> Any:
        made = capture(self, recording, schedule, inputs, *args)
        return made if isinstance(made, Overwriting) else Overwriting(made, inputs)

    monkeypatch.setattr(HostDevice, "capture", captured)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("overwriting")
@pytest.mark.filterwarnings("ignore:.*runs in eager")
def test_no_thread_gets_numbers_of_another_ones_forward() -> None:
    """Its outputs are eager's; its backward is, or says that a later forward has overwritten what it needs."""
    net, eager = pair(perceptron(), torch.randn(6, 8))
    (engine,) = net.engines
    assert engine.backward is not None
    assert engine.backward.fixed
    failed: list[BaseException] = []
    late: list[InputError] = []
    together = threading.Barrier(8)

    def train(seed: int) -> None:
        inputs = torch.Generator().manual_seed(seed)
        together.wait(60)
        for _ in range(50):
            x = torch.randn(6, 8, generator=inputs)
            expected = eager(x)
            gradients = torch.autograd.grad(expected.sin().sum(), list(eager.parameters()))
            out = net(x)
            torch.testing.assert_close(out, expected)
            try:
                found = torch.autograd.grad(out.sin().sum(), list(net.parameters()))
            except InputError as error:
                late.append(error)
            else:
                torch.testing.assert_close(found, gradients)

    def guarded(seed: int) -> None:
        try:
            train(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    assert all("the backward of an earlier forward" in str(error) for error in late)
    net.close()


def test_an_alias_of_a_gradient_is_the_gradient(on: Place) -> None:
    model = on(perceptron())
    x = on(torch.randn(6, 8))
    net, eager = pair(model, x, options=on.options)
    for one in (net, eager):
        one(x).sum().backward()
        for parameter in one.parameters():
            parameter.grad = parameter.grad.detach()
        one(2 * x).sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
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


def test_called_twice_before_one_backward() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    a, b = torch.randn(6, 8), torch.randn(6, 8)
    for one in (net, eager):
        (one(a).sin().sum() + 2 * one(b).cos().sum()).backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_called_on_its_own_output() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    net, eager = pair(model, torch.randn(6, 8, requires_grad=True))
    x = torch.randn(6, 8)
    for one in (net, eager):
        one(one(x)).square().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_backward_of_an_earlier_forward_after_a_later_one() -> None:
    net, eager = pair(Residual(), images()[0])
    x, y = images()[0], images()[0]
    for one in (net, eager):
        first, second = one(x), one(y)
        second.sin().sum().backward()
        first.cos().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
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


def test_recomputing_in_the_backward_equals_eager() -> None:
    net, eager = pair(Recomputed(0.0), torch.randn(6, 8))
    x = torch.randn(6, 8)
    for model in (net, eager):
        torch.manual_seed(1)
        model(x).sin().sum().backward()
    assert_same_gradients(net, eager)
    net.close()


# -- mixed precision, accumulation, clipping -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_autocast_equals_eager(name: str) -> None:
    found = made(name)
    eager = copy.deepcopy(found.model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net = Nimble(found.model, QUICK).prepare(found.draw()[0], training=True)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for _ in range(4):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(found, model, inputs, targets)
            loss.backward()
            optimizer.step()
        assert_same_gradients(found.model, eager)
        assert_same(state_of(found.model, mine), state_of(eager, theirs))
    net.close()


def test_a_scaler_leaves_steps_out_as_in_eager() -> None:
    found, net, eager = prepared("mlp")
    training = [
        (model, OPTIMIZERS["adam"](model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
        for model in (net, eager)
    ]
    for at in range(5):
        inputs, targets = found.draw()
        if at == 2:
            inputs[0, 0] = float("inf")
        for model, optimizer, scaler in training:
            optimizer.zero_grad()
            scaler.scale(loss_of(found, model, inputs, targets)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert_same(
            state_of(found.model, training[0][1], training[0][2]), state_of(eager, training[1][1], training[1][2])
        )
    assert training[0][2].get_scale() == 128.0
    net.close()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads none", "grads zero"])
def test_accumulating_by_hand(set_to_none: bool) -> None:
    found, net, eager = prepared("resnet")
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for at in range(6):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            (loss_of(found, model, inputs, targets) / 3).backward()
            if at % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        assert_same_gradients(found.model, eager)
    assert_same(state_of(found.model, mine), state_of(eager, theirs))
    net.close()


def test_a_users_gradient_stays_the_users_tensor() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    mine = [torch.randn_like(one) for one in net.parameters()]
    for one, other, grad in zip(net.parameters(), eager.parameters(), mine, strict=True):
        one.grad, other.grad = grad, grad.clone()
    x = torch.randn(6, 8)
    for model in (net, eager):
        model(x).sin().sum().backward()
    assert all(one.grad is grad for one, grad in zip(net.parameters(), mine, strict=True))
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_gradients_kept_elsewhere_are_not_overwritten(on: Place, request: pytest.FixtureRequest) -> None:
    if on.cuda:
        why = "on CUDA .grad is the engine's memory, overwritten even where it is kept elsewhere"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    net, _ = pair(on(perceptron()), on(torch.randn(6, 8)))
    net(on(torch.randn(6, 8))).sin().sum().backward()
    kept = [one.grad for one in net.parameters()]
    values = [one.clone() for one in kept if one is not None]
    for one in net.parameters():
        one.grad = None
    net(on(torch.randn(6, 8))).sin().sum().backward()
    assert_values(kept, values)
    net.close()


class SameGradient(nn.Module):
    """Two parameters with one gradient, one whose gradient is a single number seen five times, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
        self.d = nn.Parameter(torch.ones(5))
        self.e = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.a + self.b + self.c + self.d.sum() + (self.e.t() @ x.new_ones(3, 4))


def test_each_gradient_has_memory_of_its_own(on: Place) -> None:
    net, eager = pair(on(SameGradient()), on(torch.randn(4, 4)))
    x = on(torch.randn(4, 4))
    for model in (net, eager):
        model(x).sin().sum().backward()
        for at, one in enumerate(model.parameters()):
            assert one.grad is not None
            one.grad.mul_(at + 2)
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


def test_gradients_are_laid_out_like_their_parameters(on: Place) -> None:
    net, eager = pair(on(Aliases()), on(torch.randn(6, 4)))
    x = on(torch.randn(6, 4))
    for model in (eager, net):
        model(x).sin().sum().backward()
        for one in model.parameters():
            assert one.grad is not None
            assert one.grad.stride() == one.stride()
    net.close()


def test_clipping_a_gradient_that_two_parameters_share() -> None:
    net, eager = pair(Tied(), torch.randint(0, 13, (2, 5)))
    x = torch.randint(0, 13, (2, 5))
    for model in (net, eager):
        model(x).sin().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


# -- what autograd is asked ------------------------------------------------------------------------------------------


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


def test_a_gradient_given_to_backward() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    x, weight = torch.randn(6, 8), torch.randn(6, 4)
    for model in (net, eager):
        model(x).backward(weight)
    assert_same_gradients(net, eager)
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


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_hooks_of_parameters_are_called_with_what_eager_gives_them(kind: str, on: Place) -> None:
    net, eager = pair(on(perceptron()), on(torch.randn(6, 8)))
    seen: dict[nn.Module, list[torch.Tensor]] = {net: [], eager: []}
    for model in (net, eager):
        weight = layer(model, 2).weight

        def doubled(grad: torch.Tensor, of: nn.Module = model) -> torch.Tensor:
            seen[of].append(grad.clone())
            return grad * 2

        def accumulated(one: torch.Tensor, of: nn.Module = model) -> None:
            assert one.grad is not None
            seen[of].append(one.grad.clone())

        if kind == "gradient":
            weight.register_hook(doubled)
        else:
            weight.register_post_accumulate_grad_hook(accumulated)
    x = on(torch.randn(6, 8))
    for model in (net, eager):
        for _ in range(2):
            model(x).sin().sum().backward()
    assert len(seen[net]) == len(seen[eager]) == 2
    assert_values(seen[net], seen[eager], rtol=on.near)
    assert_same_gradients(net, eager, rtol=on.near)
    net.close()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.stem(x).tanh()
        return self.first(h), self.second(h)


@pytest.mark.filterwarnings("ignore:no gradient came for output:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_hook_of_a_parameter_that_no_gradient_reaches_is_refused(used: tuple[int, ...]) -> None:
    net, eager = pair(Heads(), torch.randn(6, 8))
    for model in (net, eager):
        for name in ("stem.weight", "second.bias"):
            model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)
    x = torch.randn(6, 8)
    losses = []
    for model in (net, eager):
        outputs = model(x)
        losses.append(sum(outputs[at].sin().sum() for at in used))
    if used == (0,):
        with pytest.raises(InputError, match=r"second\.bias, which only leads there, has a hook"):
            losses[0].backward()
        assert all(one.grad is None for one in net.parameters())
    else:
        for loss in losses:
            loss.backward()
        assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_the_optimizer_in_the_backward() -> None:
    """Updates from hooks that run once a gradient is there, which is then freed."""
    net, eager = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8))
    for model in (net, eager):
        for one in model.parameters():
            optimizer = OPTIMIZERS["momentum"]([one])

            def update(parameter: torch.Tensor, by: torch.optim.Optimizer = optimizer) -> None:
                by.step()
                by.zero_grad()

            one.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        x = torch.randn(6, 8)
        for model in (net, eager):
            model(x).sin().sum().backward()
    assert_values(list(net.parameters()), list(eager.parameters()), rtol=1e-6)
    net.close()


def test_hooks_of_outputs_and_inputs() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8, requires_grad=True))
    data = torch.randn(6, 8)
    results = []
    for model in (net, eager):
        x = data.clone().requires_grad_()
        x.register_hook(lambda grad: grad * 3)
        out = model(x * 1)
        out.register_hook(lambda grad: grad * 2)
        out.retain_grad()
        out.sin().sum().backward()
        results.append((x.grad, out.grad))
    assert_values(results[0], results[1], rtol=1e-6)
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


@pytest.mark.filterwarnings("ignore:the .*hook scaled of 2:nimble_core.utils.errors.NimbleWarning")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_submodules_act_or_are_refused(kind: str) -> None:
    """A hook that is there when the module is prepared changes results as in eager."""

    def scaled(*given: Any) -> Any:
        if kind == "forward":
            return given[2] * 2
        if kind == "forward_pre":
            return (given[1][0] * 2,)
        return tuple(None if one is None else one * 2 for one in given[1])

    model = perceptron()
    eager = copy.deepcopy(model)
    for one in (model, eager):
        getattr(one[2], f"register_{kind}_hook")(scaled)
    net = Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True)
    x = torch.randn(6, 8)
    for one in (net, eager):
        one(x).sin().sum().backward()
    assert_same_gradients(model, eager, rtol=1e-6)
    net.close()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("way", ["in place of the model", "whole step"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_that_keep_something_are_warned_of(kind: str, way: str) -> None:
    model, kept = perceptron(), []

    def keeping(*given: Any) -> None:
        kept.append(given)

    getattr(model[2], f"register_{kind}_hook")(keeping)
    name = kind.removeprefix("full_").replace("_pre", " pre-") + ("hook" if "pre" in kind else " hook")
    x = torch.randn(6, 8)
    if way == "whole step":
        step = TrainStep(model, torch.Tensor.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
        prepare: Any = step.prepare
    else:
        prepare = partial(Nimble(model, QUICK).prepare, training=True)
    with pytest.warns(NimbleWarning, match=f"the {name} keeping of 2: what hooks compute is replayed"):
        prepared = prepare(x)
    kept.clear()
    prepared(x).sum()
    assert not kept
    prepared.close()


def test_inference_warns_of_no_hooks_of_the_backward() -> None:
    model = perceptron().requires_grad_(False)
    model[2].register_full_backward_hook(lambda *given: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NimbleWarning)
        Nimble(model, QUICK).prepare(torch.randn(6, 8)).close()


# -- autograd's guard over saved tensors -----------------------------------------------------------------------------


def test_an_output_written_before_its_backward_is_refused_where_it_is_needed() -> None:
    net, eager = pair(nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()), torch.randn(6, 8))
    for model in (net, eager):
        out = model(torch.randn(6, 8))
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    net.close()


def test_an_output_may_be_written_where_its_backward_does_not_need_it() -> None:
    net, eager = pair(nn.Linear(8, 4), torch.randn(6, 8))
    x = torch.randn(6, 8)
    for model in (net, eager):
        out = model(x)
        out.mul_(2).add_(1)
        out.sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


def test_an_input_written_before_the_backward_is_refused() -> None:
    net, eager = pair(nn.Linear(8, 4), torch.randn(6, 8))
    for model in (net, eager):
        x = torch.randn(6, 8)
        out = model(x)
        x.mul_(2)
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


# -- modes -----------------------------------------------------------------------------------------------------------


def test_training_and_evaluation_in_turn(on: Place) -> None:
    found, net, eager = prepared("resnet", on.options, on.device)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for _ in range(2):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            optimizer.zero_grad()
            loss_of(found, model.train(), inputs, targets).backward()
            optimizer.step()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", NimbleWarning)
            out = net.eval()(inputs)
        with torch.no_grad():
            assert_values(out, eager.eval()(inputs), rtol=on.exact)
    assert_same(state_of(found.model, mine), state_of(eager, theirs), rtol=on.exact)

    net.eval().prepare(inputs)
    assert len(net.engines) == 2
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_values(net(inputs), eager(inputs), rtol=on.exact)
    net.train()
    assert net(inputs).requires_grad
    net.close()


def test_evaluating_in_eager_is_said_once() -> None:
    """Whatever Python's own filter has forgotten: it does so in each ``catch_warnings``, and at each new line."""
    x = torch.randn(6, 8)
    nets = [pair(perceptron(), x)[0] for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            for net in nets:
                net.eval()(x)
                net.eval()(x)
                net.train()(x)
    said = [str(one.message) for one in caught]
    assert said == ["not prepared in evaluation mode: runs in eager"] * len(nets)
    for net in nets:
        net.close()


def test_without_gradients_the_forward_still_trains_statistics() -> None:
    found, net, eager = prepared("resnet")
    inputs, _ = found.draw()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out, expected = net(inputs), eager(inputs)
        assert not out.requires_grad
        assert torch.equal(out, expected)
    assert_same(state_of(found.model), state_of(eager))
    loss_of(found, net, *found.draw()).backward()
    net.close()


class CheckpointedNorm(nn.Module):
    """Its backward runs batch norm again, which counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


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


def test_checkpoints_go_back_and_forth() -> None:
    found, net, eager = prepared("resnet")
    loss_of(found, net, *found.draw()).backward()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    eager.load_state_dict(torch.load(file, weights_only=True))
    assert_same(state_of(found.model), state_of(eager))
    other = made("resnet").model
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(1.5)
    net.load_state_dict(other.state_dict())
    inputs, targets = found.draw()
    found.model.zero_grad()
    for model in (net, other):
        loss_of(found, model, inputs, targets).backward()
    assert_same_gradients(found.model, other)
    net.close()


def test_back_to_eager_in_the_middle() -> None:
    found, net, eager = prepared("resnet")
    mine, theirs = OPTIMIZERS["adam"](net.parameters()), OPTIMIZERS["adam"](eager.parameters())
    for at in range(6):
        inputs, targets = found.draw()
        for model, optimizer in ((net if at % 2 else found.model, mine), (eager, theirs)):
            optimizer.zero_grad()
            loss_of(found, model, inputs, targets).backward()
            optimizer.step()
        assert_same(state_of(found.model, mine), state_of(eager, theirs))
    net.close()


@pytest.mark.parametrize("answer", ["error", "eager", "prepare"])
def test_a_short_last_batch_follows_on_new_shape(answer: str) -> None:
    found, net, eager = prepared("resnet", Options(tune="off", policy="single", on_new_shape=answer))
    inputs, targets = found.draw()
    if answer == "error":
        with pytest.raises(InputError, match="no engine is prepared for these inputs"):
            net(inputs[:2])
        with pytest.raises(InputError, match="no engine is prepared for these inputs"):
            net(inputs.double())
        assert_same(state_of(found.model), state_of(eager))
    else:
        for model in (net, eager):
            loss_of(found, model, inputs[:2], targets[:2]).backward()
        assert_same_gradients(found.model, eager)
        assert_same(state_of(found.model), state_of(eager))
    net.close()


def test_two_shapes_and_two_structures() -> None:
    found, net, eager = prepared("resnet")
    inputs, targets = found.draw()
    net.prepare(inputs[:2], training=True)
    for size in (4, 2, 4):
        for model in (net, eager):
            loss_of(found, model, inputs[:size], targets[:size]).backward()
    assert len(net.engines) == 2
    assert_same_gradients(found.model, eager)
    net.close()


# -- preparing leaves no trace, bad input ----------------------------------------------------------------------------


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


def test_a_gradient_that_is_sparse_is_added_to_as_in_eager() -> None:
    model = perceptron()
    other, x = copy.deepcopy(model), torch.randn(6, 8)
    net = Nimble(model, QUICK).prepare(x, training=True)
    for one in (model, other):
        weight = next(one.parameters())
        weight.grad = torch.eye(*weight.shape).to_sparse()
    for _ in range(3):
        net(x).square().sum().backward()
        other(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=CLOSE, atol=CLOSE)
        assert mine.grad.layout is theirs.grad.layout
    net.close()


class Tangent(nn.Module):
    """Computes with a transform inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.jvp(lambda one: self.layer(one).tanh(), (x,), (torch.ones_like(x),))[1]
        return found


def test_a_transform_inside_of_the_model_is_recorded() -> None:
    net, eager = pair(Tangent(), torch.randn(6, 8))
    x = torch.randn(6, 8)
    for model in (net, eager):
        model(x).sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


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


def test_frozen_between_forward_and_backward() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    x = torch.randn(6, 8)
    for model in (net, eager):
        loss = model(x).sin().sum()
        layer(model, 0).weight.requires_grad_(False)
        loss.backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


MOVES: dict[str, Callable[[nn.Module], None]] = {
    "part of another type": lambda model: layer(model, 4).double(),
    "all of another type": lambda model: model.double(),
    "another shape": lambda model: setattr(layer(model, 4).weight, "data", torch.zeros(4, 17)),
}


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_moved_between_forward_and_backward_is_refused_and_adds_nothing(move: str, accumulated: bool) -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sin().sum()
    if accumulated:
        loss.backward()
        loss = net(torch.randn(6, 8)).sin().sum()
    MOVES[move](net._model)
    before = copy.deepcopy([one.grad for one in net.parameters()])
    with pytest.raises(InputError, match=r"\d\.\w+ was float32 \[.* in the forward, and is float") as error:
        loss.backward()
    assert error.value.fix
    for one, was in zip(net.parameters(), before, strict=True):
        assert (one.grad is None) == (was is None)
        assert was is None or torch.equal(one.grad, was)
    net.close()


def test_other_memory_of_the_same_kind_between_forward_and_backward() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    x = torch.randn(6, 8)
    for model in (net, eager):
        loss = model(x).sin().sum()
        weight = layer(model, 0).weight
        weight.data = weight.detach().clone()
        loss.backward()
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


def test_closed_between_forward_and_backward() -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sin().sum()
    net.close()
    with pytest.raises(NimbleError):
        loss.backward()
    assert all(one.grad is None for one in net.parameters())


# -- outputs that are no one's own -----------------------------------------------------------------------------------


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


# -- provenance ------------------------------------------------------------------------------------------------------


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


# -- what a review found -----------------------------------------------------------------------------------------------


def test_hooks_of_parameters_are_called_once() -> None:
    net, eager = pair(nn.Linear(8, 4), torch.randn(6, 8))
    hooked = nn.Linear(8, 4)
    hooked.load_state_dict(eager.state_dict())
    handle = hooked.weight.register_hook(lambda gradient: gradient * 0.5)
    prepared_with = Nimble(hooked, QUICK).prepare(torch.randn(6, 8), training=True)
    x = torch.randn(6, 8)
    for model in (net, prepared_with):
        model(x).sin().sum().backward()
    for mine, theirs in zip(hooked.parameters(), net.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        scale = 0.5 if mine is hooked.weight else 1.0
        torch.testing.assert_close(mine.grad, theirs.grad * scale)
    handle.remove()
    hooked.zero_grad()
    prepared_with(x).sin().sum().backward()
    torch.testing.assert_close(hooked.weight.grad, layer_grad(net))
    net.close()
    prepared_with.close()


def layer_grad(net: Nimble) -> torch.Tensor:
    gradient = next(iter(net.parameters())).grad
    assert gradient is not None
    return gradient


def test_a_recurrent_network_equals_eager() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    net, eager = pair(Last(), torch.randn(3, 5, 8))
    x = torch.randn(3, 5, 8)
    for model in (net, eager):
        model(x).sin().sum().backward()
    assert_same_gradients(net, eager)
    net.close()


class _Borrowing(torch.autograd.Function):
    """Whose gradient is memory of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, ctx.scale, None


def test_a_gradient_never_is_memory_of_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Borrowing.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]

    model = Scaled()
    net = Nimble(model, QUICK).prepare(torch.randn(8), training=True)
    net(torch.randn(8)).backward()
    assert model.weight.grad is not None
    model.weight.grad.zero_()
    assert torch.equal(model.get_buffer("scale"), torch.ones(8))
    net.close()


def test_preparing_leaves_a_backward_that_is_under_way_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    loss = model(torch.randn(6, 8)).sin().sum()
    Nimble(model, QUICK).prepare(torch.randn(6, 8), training=True).close()
    loss.backward()


def test_modules_that_share_gradients_are_refused() -> None:
    with pytest.raises(InputError, match="shares gradients in hooks"):
        Nimble(nn.DataParallel(nn.Linear(8, 4)), QUICK).prepare(torch.randn(6, 8), training=True)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Island, attention])
def test_a_backward_is_no_part_of_the_autocast_around_prepare(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    eager = make().train()
    model, x = copy.deepcopy(eager), torch.randn(3, 10, 8)
    with torch.autocast("cpu", dtype):
        net = Nimble(model, Options(tune="off", fuse="none")).prepare(x, training=True)
    for one in (net, eager):
        with torch.autocast("cpu", dtype):
            out = one(x)
        out.float().sin().sum().backward()
    assert all(one.grad is not None for one in net.parameters())
    assert_same_gradients(net, eager)
    net.close()


def test_a_backward_called_under_autocast_casts_nothing_and_says_so_once() -> None:
    torch.manual_seed(0)
    eager = Island().train()
    model, x = copy.deepcopy(eager), torch.randn(3, 10, 8)
    with torch.autocast("cpu", torch.bfloat16):
        net = Nimble(model, Options(tune="off")).prepare(x, training=True)
        with pytest.warns(NimbleWarning, match=r"backward\(\) was called under torch.autocast to bfloat16"):
            net(x).sum().backward()
        net.zero_grad()
        net(x).sum().backward()  # no warning is an error here
        out = eager(x)
    out.sum().backward()
    assert_same_gradients(net, eager)
    net.close()


@pytest.mark.parametrize("norm", ["layer", "group", "batch"])
def test_compiled_forwards_keep_what_eagers_backwards_read_in_eagers_types(norm: str) -> None:
    """Norms of mixed types: compilers keep their statistics in another one."""
    torch.manual_seed(0)
    made = {"layer": nn.LayerNorm(8), "group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)}[norm]
    eager = nn.Sequential(nn.Linear(8, 8), made).train()
    model, x = copy.deepcopy(eager), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        net = Nimble(model, Options(tune="off", fuse="inductor")).prepare(x, training=True)
    assert net.engines[0].recorded.recording.program.fuse == "inductor", net.engines[0].notes
    for one in (net, eager):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        out.float().sin().sum().backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=3e-2, atol=3e-2)
    net.close()


def test_another_autocast_than_prepared_is_refused() -> None:
    net, _ = pair(nn.Linear(8, 4), torch.randn(6, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="autocast was off then"):
        net(torch.randn(6, 8))
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


def test_what_was_freed_is_prepared_for_training_again() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    net = Nimble(model, Options(tune="off", fuse="none", on_new_shape="prepare")).prepare(x, training=True)
    for free in (net.close, net.float):
        free()
        net(x).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = None
    net.eval()
    net.close()
    assert not net(x).requires_grad
    net.close()
