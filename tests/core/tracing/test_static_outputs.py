"""Outputs of a drop-in that are the engine's own memory: what may be done with them, where memory stays in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from nimble_core import InputError, Nimble, Options
from nimble_core.api import prepare_engine
from nimble_core.runtime.device import Executable
from nimble_core.runtime.host.device import HostDevice

How = Literal["eager", "copy", "static"]


class Still:
    """A host executable whose inputs and outputs always are at the same place, as a captured graph's are."""

    arena = None

    def __init__(self, inner: Any, inputs: Sequence[torch.Tensor]) -> None:
        self._inner = inner
        self.buffers = [tensor.detach().clone() for tensor in inputs]
        self.outputs = [_view_of(one) for one in inner.run(self.buffers, static=True)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        for buffer, tensor in zip(self.buffers, inputs, strict=True):
            _view_of(buffer).copy_(tensor.detach())
        for mine, made in zip(self.outputs, self._inner.run(self.buffers, static=True), strict=True):
            if mine.data_ptr() != made.data_ptr():
                _view_of(mine).copy_(made.detach())
        return list(self.outputs) if static else [one.clone() for one in self.outputs]


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a version of its own, which a replayed graph does not count."""
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class StillDevice(HostDevice):
    """The host, holding memory still."""

    def capture(self, recording: Any, schedule: Any, inputs: Any, layout: Any = None, memory: Any = None) -> Executable:
        return Still(super().capture(recording, schedule, inputs, layout, memory), inputs)  # type: ignore[return-value]  # looked up


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_engine, "device_for", lambda device: StillDevice())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: None)


class Layer(nn.Module):
    """A linear layer, and what is returned beside its result."""

    def __init__(self, beside: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.beside = beside

    def forward(self, x: torch.Tensor) -> Any:
        return self.beside(self, x, self.layer(x))


def used(how: How, beside: Callable[..., Any], use: Callable[[Any, torch.Tensor], torch.Tensor | None]) -> Any:
    """Gradients of the layer after ``use``, and of what it returned; the error's first words where there is one."""
    torch.manual_seed(1)
    x = torch.randn(5, 4)
    model: Any = Layer(beside).train()
    if how != "eager":
        options = Options(fuse="none", policy="single", tune="off", outputs=how)
        model = Nimble(model, options).prepare(x.clone(), training=True)
    try:
        found = use(model, x)
    except (RuntimeError, InputError) as error:
        return " ".join(str(error).split()[:6])
    return [one.grad.clone() for one in model.parameters() if one.grad is not None] + [found]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return bool(a == b)
    return len(a) == len(b) and all(
        (x is None and y is None) or torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True)
    )


def plain(model: Any, x: torch.Tensor) -> None:
    out = model(x)
    kept = out.clone()
    out.square().sum().backward()
    assert torch.equal(out, kept)


def write_first(model: Any, x: torch.Tensor) -> None:
    first, result = model(x)
    with torch.no_grad():
        first.mul_(10)
    result.sum().backward()


def write_one_of_two(model: Any, x: torch.Tensor) -> None:
    first, second = model(x)
    loss = (second * second).sum()
    with torch.no_grad():
        first.mul_(3)
    loss.backward()


def write_a_constant(model: Any, x: torch.Tensor) -> None:
    for _ in range(2):
        result, constant = model(x)
        with torch.no_grad():
            constant.mul_(2)
        model.zero_grad()
        (result * constant).sum().backward()


@pytest.mark.parametrize(
    ("beside", "use", "as_in"),
    [
        (lambda _, x, y: y, plain, "eager"),
        (lambda _, x, y: (x, y), write_first, "copy"),
        (lambda one, x, y: (one.scale, y * one.scale), write_first, "copy"),
        (lambda _, x, y: (y, y.t()), write_one_of_two, "copy"),
        (lambda _, x, y: (y, torch.tensor([1.0, 2.0, 3.0])), write_a_constant, "eager"),
        (lambda one, x, y: (one.layer.weight, y), lambda model, x: model(x)[1].sum().backward(), "eager"),
    ],
)
def test_gradients_are_those_of_copies(beside: Any, use: Any, as_in: How) -> None:
    assert same(used("static", beside, use), used(as_in, beside, use))


def head_on_what_was_overwritten(model: Any, x: torch.Tensor) -> torch.Tensor:
    head = nn.Linear(3, 2)
    nn.init.ones_(head.weight)
    loss = head(model(x).detach()).sum()
    with torch.no_grad():
        model(x * 3 + 1)
    loss.backward()
    assert head.weight.grad is not None
    return head.weight.grad


def test_what_the_next_forward_overwrites_is_missed_by_name() -> None:
    def beside(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.relu()

    assert same(used("copy", beside, head_on_what_was_overwritten), used("eager", beside, head_on_what_was_overwritten))
    assert used("static", beside, head_on_what_was_overwritten) == "one of the variables needed for"


def test_an_output_that_the_backward_reads_may_not_be_written() -> None:
    def write(model: Any, x: torch.Tensor) -> None:
        out = model(x)
        with torch.no_grad():
            out.mul_(2)
        out.sum().backward()

    def needed(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid()

    def unneeded(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y

    assert used("static", needed, write) == "an output was written between the"
    assert same(used("static", unneeded, write), used("eager", unneeded, write))
