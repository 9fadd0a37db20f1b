"""Recording a model twice: what is checked before, what is refused, and what is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from nimble_core.ir.allocations import Ask
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.utils.errors import CaptureError, InputError, NotStaticError
from tests.support.models import Wide


def recorded(model: Any, *args: Any, device: FakeDevice | None = None, strict: bool = False, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    return record_static(device or FakeDevice(), model, signature, strict=strict, step=Stopwatch())


def test_inputs_are_checked() -> None:
    x = torch.randn(2, 16)
    assert check_inputs(Wide(), (x,), {}).paths == ["args[0]"]
    with pytest.raises(InputError, match="Wide itself"):
        check_inputs(Wide, (x,), {})
    with pytest.raises(InputError, match=r"kwargs\['x'\] is a Other, a class of its own"):
        check_inputs(Wide(), (), {"x": x.as_subclass(type("Other", (torch.Tensor,), {}))})
    with pytest.raises(InputError, match=r"parameter branches.0.weight is on meta, args\[0\] on cpu"):
        check_inputs(Wide().to("meta"), (x,), {})


def test_allocations_are_traced_in_the_second_recording_alone() -> None:
    class Traces(FakeDevice):
        def __init__(self) -> None:
            super().__init__()
            self.traced: list[bool] = []

        def record(self, *args: Any, traced: bool = True, **kwargs: Any) -> Any:
            self.traced.append(traced)
            recording = super().record(*args, traced=traced, **kwargs)
            asks = tuple((Ask(index),) for index in range(len(recording.program.calls)))
            return replace(recording, asks=asks if traced else ())

    device, x = Traces(), torch.randn(2, 16)
    recording = recorded(Wide(), x, device=device).recording
    assert device.traced == [False, True]
    assert recording.asks == tuple((Ask(index),) for index in range(len(recording.program.calls)))


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_a_branch_on_random_numbers_of_the_host_is_not_static(draw: Callable[[], float]) -> None:
    states = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(NotStaticError):
        recorded(lambda x: x * draw(), torch.randn(3))
    assert random.getstate() == states[0]
    assert (numpy.random.get_state()[1] == states[1]).all()


def test_values_made_out_of_sight() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    found = recorded(forward, torch.randn(3))
    assert found.whole
    assert "aten.add" in found.recording.unseen_where
    with pytest.raises(CaptureError, match="outside of torch") as caught:
        recorded(forward, torch.randn(3), strict=True)
    assert "aten.add" in caught.value.where

    class Cuda(FakeDevice):
        kind = "cuda"

    with pytest.raises(NotStaticError, match="outside of torch"):
        recorded(forward, torch.randn(3), device=Cuda())


def masked(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's masks do: a look at the values in eager, none in a capture."""
    if not torch.cuda.is_current_stream_capturing() and (x > 0).all():
        return x + 1
    return torch.where(x > 0, x, -x) + 1


def unmasked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.cuda.is_current_stream_capturing() else x + 1


def test_eagers_branch_is_recorded_where_it_can_be() -> None:
    program = recorded(unmasked, torch.ones(3)).recording.program
    assert [call.label for call in program.calls] == ["add"]
    assert program.notes == ()


def test_else_the_branch_that_the_model_keeps_for_captures() -> None:
    program = recorded(masked, torch.ones(3)).recording.program
    assert "where" in [call.label for call in program.calls]
    (note,) = program.notes
    assert "_local_scalar_dense" in note
    assert "test_record_static.py" in note


@pytest.mark.parametrize(("returned", "said"), [(lambda x: x * 2, 1), (lambda x: x + torch.from_numpy(x.numpy()), 0)])
def test_draws_are_said_but_not_of_what_is_called_as_it_is(returned: Callable[..., Any], said: int) -> None:
    """Two recordings agree more often than not on a branch that is seldom taken."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if random.random() > 2 else returned(x)

    found = recorded(forward, torch.randn(3))
    assert found.whole is (not said)
    assert len(found.said) == said
    assert found.recording.program.notes == found.said
    assert all("Python's random" in one for one in found.said)
