"""A refusal shows the user's lines, and nothing of what lies between."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nimble_viz
from nimble_core import CaptureError, InputError, Nimble, TrainStep
from nimble_core.utils.tracebacks import short_traceback


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Reads())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


def trained(model: nn.Module, x: torch.Tensor) -> object:
    step = TrainStep(model.train(), nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return step.prepare(x, x)


@pytest.mark.parametrize(
    "call", [lambda model, x: Nimble(model).prepare(x), nimble_viz.compare, trained], ids=["prepare", "compare", "step"]
)
@pytest.mark.parametrize("full", [False, True])
def test_frames_of_a_refusal(call: Callable[..., object], full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if full:
        monkeypatch.setenv("NIMBLE_TRACEBACK", "full")
    with pytest.raises(CaptureError, match="host would have to wait") as caught:
        call(Branches().eval(), torch.rand(2, 4))
    frames = traceback.extract_tb(caught.tb)
    files = [frame.filename for frame in frames if frame.filename != __file__]
    lines = [frame.line for frame in frames if frame.filename == __file__]
    assert lines[-1] == "return x * 2 if x.sum().item() > 0 else x"
    assert "return self.inner(x)" in lines
    assert len(files) > 10 if full else not files


def test_a_refusal_that_the_model_hides_is_raised_and_ends() -> None:
    class Hides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x * 2 if x.sum().item() > 0 else x
            except Exception as error:
                raise RuntimeError("mine") from error

    with pytest.raises(CaptureError, match="host would have to wait"):
        Nimble(Hides().eval()).prepare(torch.rand(2, 4))


def test_other_errors_and_names_stay() -> None:
    def fails(kind: type[Exception]) -> None:
        """Fail."""
        raise kind("why")

    short = short_traceback(fails)
    assert short.__doc__ == "Fail."
    assert inspect.signature(short) == inspect.signature(fails)
    with pytest.raises(ZeroDivisionError) as other:
        short(ZeroDivisionError)
    assert len(other.traceback) == 3
    with pytest.raises(InputError) as refused:
        short(InputError)
    assert refused.traceback[-1].name == "fails"
