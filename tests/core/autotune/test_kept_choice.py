"""What is compiled ahead of tuning, and that tuning then compiles nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from nimble_core.autotune import autotune, kept_choice
from nimble_core.autotune.kept_choice import compile_for_tuning, kept_plan
from nimble_core.ir.program import KernelChoice
from nimble_core.scheduling.options import Options
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from tests.support.tuning import LikeCuda, Watched, recorded, tuning

COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
AMPLE = Options(budget_s=500.0)


class Drops(nn.Module):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leave out half."""
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("device", "model", "options"),
    [
        (Watched(1000.0), None, AMPLE),
        (LikeCuda(), None, replace(AMPLE, tune="off")),
        (LikeCuda(), None, replace(AMPLE, budget_s=1.0)),
        (LikeCuda(), None, replace(AMPLE, fuse="library")),
        (LikeCuda(), Drops(), AMPLE),
    ],
    ids=["on the host", "tuned off", "no budget", "libraries", "draws"],
)
def test_what_tuning_would_not_compile_is_not_compiled_ahead(
    device: Watched, model: nn.Module | None, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kept_choice, "compile_ahead")
    assert compile_for_tuning(device, recorded(device, model), options) is None


@COMPILES
@pytest.mark.parametrize(("expected_s", "fits"), [(940.0, True), (1001.0, False)])
def test_what_is_kept_for_choosing_may_go_on_compiling(
    expected_s: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, options = LikeCuda({"library": 0.5, "inductor": 0.1}), replace(AMPLE, budget_s=1000.0)
    for module in (kept_choice, autotune):
        monkeypatch.setattr(module, "compile_s", lambda program: expected_s)
    assert (compile_for_tuning(device, recorded(device), options) is not None) == fits
    with tuning(device, options) as tuned:
        assert tuned.recorded.recording.program.fuse == ("inductor" if fits else "library")


@COMPILES
@pytest.mark.parametrize("kept", ["library", "inductor", ""])
def test_what_was_kept_is_compiled_ahead_and_nothing_else(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"library": 0.1} if kept == "library" else {"library": 0.5, "inductor": 0.1}
    device = LikeCuda(slow)
    if kept:
        with tuning(device, AMPLE):
            pass
    asked: list[object] = []
    monkeypatch.setattr(kept_choice, "compile_ahead", lambda *args, **how: asked.append(args[2]) or ())
    found = recorded(device)
    plan = kept_plan(device, found, AMPLE)
    assert (plan.fuse if plan else "") == kept
    made = compile_for_tuning(device, found, AMPLE)
    assert asked == ([] if kept == "library" else [plan.kernels if plan else None])
    assert made == (None if kept == "library" else ())


@COMPILES
def test_kernels_that_were_compiled_ahead_are_the_ones_that_are_made() -> None:
    torch._dynamo.reset()
    device = LikeCuda({"inductor": 0.1})
    choices = compile_for_tuning(device, recorded(device), AMPLE)
    assert choices is not None
    assert all(isinstance(one, KernelChoice) for one in choices)
    with tuning(device, replace(AMPLE, budget_s=1.0), compiled=choices) as tuned:
        assert tuned.recorded.recording.program.fuse == "inductor"
        assert set(tuned.recorded.recording.program.choices) == set(choices)


@pytest.mark.parametrize(("sizes", "padded"), [((16, 64), False), ((1, 64), False), ((3, 64), True)])
def test_products_of_odd_sizes_may_be_timed_while_they_are_compiled(sizes: tuple[int, int], padded: bool) -> None:
    inputs = torch.randn(sizes)
    signature = check_inputs(layer := nn.Linear(64, 16).eval(), (inputs,), {})
    found = record_static(Watched(1000.0), layer, signature, strict=True, step=Stopwatch())
    assert kept_choice._may_be_padded(found.recording.program) == padded
