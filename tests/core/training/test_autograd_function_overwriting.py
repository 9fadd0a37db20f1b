"""Forwards and gradients in memory that the next run overwrites, as on a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from nimble_core.runtime.host.device import HostDevice
from nimble_core.utils.errors import InputError
from tests.support.drop_in import assert_same_gradients, pair
from tests.support.training_problems import perceptron
from tests.support.training_steps import assert_values


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


@pytest.mark.usefixtures("overwriting")
def test_gradients_add_up_in_memory_that_the_next_backward_overwrites() -> None:
    net, eager = pair(perceptron(), torch.randn(6, 8))
    for _ in range(3):
        x = torch.randn(6, 8)
        for model in (net, eager):
            model(x).sin().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-6)
    net.close()


@pytest.mark.usefixtures("overwriting")
def test_the_backward_of_a_forward_that_was_overwritten_is_refused() -> None:
    net, _ = pair(perceptron(), torch.randn(6, 8))
    loss = net(torch.randn(6, 8)).sin().sum()
    loss.backward(retain_graph=True)
    net(torch.randn(6, 8)).sin().sum().backward()
    kept = [one.grad.clone() for one in net.parameters() if one.grad is not None]
    with pytest.raises(InputError, match="a later one has overwritten"):
        loss.backward()
    assert_values([one.grad for one in net.parameters()], kept)
    net.close()
