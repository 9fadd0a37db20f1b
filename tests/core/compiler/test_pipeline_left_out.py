"""Kernels that cannot be made, or are not right, are left out with the reason; reports say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core import Nimble, Options
from nimble_core.compiler import pipeline
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.utils.errors import CaptureError
from nimble_viz import load
from nimble_viz.collect.compare import compare
from nimble_viz.collect.progress import Progress
from nimble_viz.render.text import plain_text
from tests.support.fused_models import DEVICES, compiler_broken, engine, fused, made, mistaken, quick
from tests.support.models import make

FUSED = ["library", "inductor"]
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def left_out(net: Nimble, fuse: str) -> str:
    """Return the note of kernels that were left out, where eager's own run."""
    assert next(one for one in engine(net).candidates if one.chosen).fuse == fused(net) != fuse
    (note,) = [note for note in engine(net).notes if note.startswith(f"{fuse}: left out")]
    return note


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("not today\nnor tomorrow")


@pytest.mark.parametrize("tune", ["off", "fast"])
@pytest.mark.parametrize("policy", ["auto", "nimble", "single"])
def test_an_operator_that_a_compiler_does_not_know(policy: str, tune: Any) -> None:
    model, args, kwargs = make("custom_operators")  # has no fake kernel
    net = Nimble(model, Options(fuse="inductor", policy=policy, tune=tune)).prepare(*args, **kwargs)
    assert "Inductor could not compile the model" in left_out(net, "inductor")
    assert "no fake impl" in left_out(net, "inductor")
    (candidate,) = [one for one in engine(net).candidates if one.fuse == "inductor"]
    assert candidate.name == "inductor"
    assert candidate.note in left_out(net, "inductor")
    if policy != "auto":
        assert engine(net).schedule.policy == policy
    torch.testing.assert_close(net(*args, **kwargs), model(*args, **kwargs))


@torch.no_grad()
@pytest.mark.parametrize(
    ("place", "fuse"),
    [
        ("torch._inductor.compile", "inductor"),
        ("nimble_core.compiler.pipeline.share_equal", "library"),
        ("nimble_core.compiler.pipeline.split_constants", "inductor"),
        ("nimble_core.compiler.rerecord._Tracked.run_node", "library"),
    ],
)
def test_whatever_fails_while_kernels_are_made_leaves_them_out(
    place: str, fuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draw = made("tower")
    x = draw()
    monkeypatch.setattr(place, fail)
    net = Nimble(model, quick(fuse)).prepare(x)
    assert "ZeroDivisionError: not today" in left_out(net, fuse)
    assert "tomorrow" not in left_out(net, fuse)
    torch.testing.assert_close(net(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fuse", "scale"), [("inductor", 2.345), ("auto", 3.456)])
def test_a_kernel_that_does_not_compile_is_left_out(
    fuse: str, scale: float, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (fuse, device) == ("auto", "cpu"):
        pytest.skip("on a CPU nothing is compiled unless it is asked for")
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))

    def model(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * scale + 1).sigmoid() * x).softmax(-1)

    with compiler_broken():
        net = Nimble(model, Options(fuse=fuse, budget_s=200.0)).prepare(torch.randn(6, 7, device=device))
    assert "PassManager::run failed" in left_out(net, "inductor")
    (left,) = [one for one in engine(net).candidates if one.fuse == "inductor"]
    assert left.note in left_out(net, "inductor")
    for _ in range(3):
        x = torch.randn(6, 7, device=device)
        torch.testing.assert_close(net(x), model(x))


def test_a_launch_that_was_not_seen_is_an_error() -> None:
    class Blind(FakeDevice):
        def record(self, *args: Any, **kwargs: Any) -> Any:
            recording = super().record(*args, **kwargs)
            return recording if len(args) < 5 else replace(recording, unseen=2, unseen_where="after call 3")

    model, draw = made("tower")
    x, device = draw(), Blind()
    recorded = record_static(device, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())
    with pytest.raises(CaptureError, match="2 launches of the library kernels come from no call") as caught:
        pipeline.fuse(device, recorded, "library", step=Stopwatch())
    assert "after call 3" in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_that_compute_something_else_are_left_out(
    fuse: str, tune: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, draw = made("residual", device)
    net = Nimble(model, quick(fuse, tune=tune)).prepare(draw())
    assert "outputs differ from float64's" in left_out(net, fuse)
    wrong = [one for one in engine(net).candidates if one.fuse == fuse]
    assert wrong
    assert all(one.check and one.check.differs and one.name.startswith(f"{fuse}, ") for one in wrong)
    assert engine(net).schedule.policy == "nimble"
    x = draw()
    torch.testing.assert_close(net(x), model(x))


@pytest.mark.parametrize("fuse", FUSED)
def test_a_report_of_fused_kernels(fuse: Any, tmp_path: Path) -> None:
    model, draw = made("tower")
    options = Options(fuse=fuse, policy="nimble", budget_s=0.2)
    report = compare(model, draw(), options=options, progress=Progress())
    assert report.program.fuse == fuse
    assert report.eager is not None
    assert {index for call in report.program.calls for index in call.eager} == set(range(len(report.eager.calls)))
    assert {one.name for one in report.candidates} == {"single", f"{fuse}, single", f"{fuse}, nimble"}
    for one in report.candidates:
        assert one.check is not None
        assert one.check.passed
        assert one.check.reference == ("eager" if one.fuse == "none" else "float64")
    kept = load(report.save(tmp_path / "fused.nimble"))
    assert kept == report
    assert fuse in plain_text(kept, full=True)
    again = Nimble(model).prepare(draw(), plan=kept.plan)
    assert fused(again) == fuse
    x = draw()
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))
