"""Many engines in one process: prepared, replayed and destroyed in any order, from any thread."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule, run_state_machine_as_test
from torch import nn

from nimble_core import DeviceError, InputError, Nimble, Options
from tests.support.engine_models import DEVICES, MODELS, OPTIONS, check, drawn, in_threads, made


class Engines(RuleBasedStateMachine):
    """Engines of several models, replayed and destroyed in any order."""

    device = "cpu"
    nets = Bundle("nets")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Nimble] = []

    @rule(target=nets, name=st.sampled_from(sorted(MODELS)), options=st.sampled_from(OPTIONS))
    def prepare(self, name: str, options: Options) -> Any:
        model = made(name, self.device)
        net = Nimble(model, options).prepare(drawn(self.device))
        self.open.append(net)
        return net, model

    @rule(net=nets, rows=st.sampled_from([4, 5]))
    def prepare_again(self, net: tuple[Nimble, nn.Module], rows: int) -> None:
        net[0].prepare(drawn(self.device, rows))

    @rule(net=nets)
    def replay(self, net: tuple[Nimble, nn.Module]) -> None:
        check(*net, drawn(self.device))

    @rule(net=nets)
    def replay_from_another_thread(self, net: tuple[Nimble, nn.Module]) -> None:
        in_threads([lambda: check(*net, drawn(self.device))])

    @rule(target=nets, net=consumes(nets))
    def close_and_prepare(self, net: tuple[Nimble, nn.Module]) -> Any:
        net[0].close()
        net[0].prepare(drawn(self.device))
        return net

    @rule(net=consumes(nets))
    def close(self, net: tuple[Nimble, nn.Module]) -> None:
        self.open.remove(net[0])
        net[0].close()
        net[0].close()
        assert net[0].engines == ()

    @rule(target=nets, net=consumes(nets))
    def drop(self, net: tuple[Nimble, nn.Module]) -> Any:
        self.open.remove(net[0])
        return multiple()

    def teardown(self) -> None:
        while self.open:
            self.open.pop().close()


class EnginesOnCuda(Engines):
    """The same on a GPU."""

    device = "cuda"


@pytest.mark.parametrize("machine", [Engines, pytest.param(EnginesOnCuda, marks=pytest.mark.gpu)])
def test_engines_come_and_go_in_any_order(machine: type[Engines]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=12, deadline=None))


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:.*runs in eager")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", ["branches", "deep"])
def test_threads_train_one_engine(name: str, locked: bool, device: str) -> None:
    """Each thread has inputs of its own.

    On a GPU a forward may overwrite what an earlier one has saved; the backward of that one says so. A thread that
    holds a lock from the forward to the end of the backward does not meet it.
    """
    model, eager = made(name, device).train(), made(name, device).train()
    example = drawn(device).requires_grad_()
    net = Nimble(model, OPTIONS[1]).prepare(example, training=True)
    lock = threading.Lock() if locked else nullcontext()
    early: list[InputError] = []

    def job(seed: int) -> None:
        inputs = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(4, 8, generator=inputs).to(device).requires_grad_()
            expected = eager(x)
            gradients = torch.autograd.grad(expected.square().sum(), [x, *eager.parameters()])
            with lock:
                out = net(x)
                torch.testing.assert_close(out, expected)
                try:
                    found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
                except InputError as error:
                    early.append(error)
                    continue
            torch.testing.assert_close(found, gradients)

    in_threads([partial(job, seed) for seed in range(8)])
    assert all("the backward of an earlier forward" in str(error) for error in early)
    assert not early or (device == "cuda" and not locked)
    assert all(one.grad is None for one in model.parameters())
    net.close()


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:.*runs in eager")
@pytest.mark.parametrize("device", DEVICES)
def test_backwards_of_eight_threads_add_up(device: str) -> None:
    """On a GPU what is in ``.grad`` is memory that the next backward overwrites."""
    model, eager = made("branches", device).train(), made("branches", device).train()
    net = Nimble(model, OPTIONS[1]).prepare(drawn(device), training=True)
    inputs = [drawn(device) for _ in range(8)]
    for x in inputs:
        eager(x).square().sum().backward()
    lock = threading.Lock() if device == "cuda" else nullcontext()

    def job(x: torch.Tensor) -> None:
        with lock:
            net(x).square().sum().backward()

    for _ in range(10):
        in_threads([partial(job, x) for x in inputs])
        found = [one.grad for one in model.parameters()]
        torch.testing.assert_close(found, [one.grad for one in eager.parameters()], rtol=1e-5, atol=1e-5)
        net.zero_grad()
    net.close()


@pytest.mark.parametrize("device", DEVICES)
def test_closing_waits_for_the_run_and_later_runs_are_refused(device: str) -> None:
    model = made("branches", device)
    other, rest = Nimble(model, OPTIONS[1]).prepare(drawn(device)), made("deep", device)
    remaining = Nimble(rest, OPTIONS[1]).prepare(drawn(device))
    executable = other.engines[0].executable
    refused: list[str] = []

    def run_until_closed() -> None:
        x = drawn(device)
        with torch.no_grad():
            expected = model(x)
        while True:
            try:
                (found,) = executable.run([x])
            except DeviceError as error:
                refused.append(error.what)
                return
            torch.testing.assert_close(found, expected)

    def close() -> None:
        for _ in range(20):
            check(remaining, rest, drawn(device))
        executable.close()

    in_threads([run_until_closed, run_until_closed, close])
    assert ["closed" in what for what in refused] == [True, True]
    check(remaining, rest, drawn(device))
    remaining.close()


@pytest.mark.parametrize("device", DEVICES)
def test_replays_go_on_while_the_same_model_is_prepared_again(device: str) -> None:
    model = made("branches", device)
    net = Nimble(model, OPTIONS[0]).prepare(drawn(device, 4)).prepare(drawn(device, 5))
    done = threading.Event()

    def replay() -> None:
        while not done.is_set():
            check(net, model, drawn(device))

    def prepare_again() -> None:
        try:
            for turn in range(30):
                net.prepare(drawn(device, 4 + turn % 2))
        finally:
            done.set()

    in_threads([replay, replay, prepare_again])
    assert len(net.engines) == 2
    net.close()


@pytest.mark.parametrize("device", DEVICES)
def test_threads_that_prepare_at_once_leave_the_random_state(device: str) -> None:
    model = made("branches", device)
    before = random.getstate(), torch.get_rng_state()
    x = torch.ones(4, 8, device=device)

    def come_and_go() -> None:
        net = Nimble(model, OPTIONS[1]).prepare(x)
        check(net, model, x)
        net.close()

    for _ in range(20):
        in_threads([come_and_go] * 3)
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
