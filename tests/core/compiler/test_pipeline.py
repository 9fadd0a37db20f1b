"""Other kernels for the same model, from recording to engine: right, traced back, and made again from a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.compiler import pipeline
from nimble_core.compiler.attribution import unmapped
from nimble_core.scheduling.saved_plan import fingerprint, load_plan
from nimble_core.utils.errors import InputError
from tests.support.fused_models import DEVICES, MODELS, Tower, engine, fused, made, programs, quick

FUSED = ["library", "inductor"]
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("fuse", FUSED),
]


@cache
def prepared(name: str, fuse: str, device: str) -> tuple[Any, Callable[[], torch.Tensor], Nimble]:
    """Prepare a model for all tests that change nothing: compiling takes seconds."""
    model, draw = made(name, device)
    net = Nimble(model, quick(fuse)).prepare(draw())
    assert fused(net) == fuse, engine(net).notes
    return model, draw, net


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare as closely as TF32 on a GPU allows."""
    near = {"rtol": 1e-2, "atol": 1e-2} if found.is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **near)


# -- right ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_as_close_to_float64_as_eagers(name: str, fuse: str, device: str) -> None:
    model, draw, net = prepared(name, fuse, device)
    wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    for _ in range(3):
        x = draw()
        truth = wide(x.double())
        own, ours = ((out.double() - truth).norm() / truth.norm() for out in (model(x), net(x)))
        assert ours <= 3 * own + (1e-3 if device == "cuda" else 2e-6)


def test_what_a_model_writes_is_written(fuse: str, device: str) -> None:
    """Running statistics, a counter, and the input itself."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            self.count.add_(x.mean((0, 2, 3)))
            return self.norm(self.conv(x)).relu()

    torch.manual_seed(0)
    model = Writing().train().to(device)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6, device=device)
    kept = x.clone()
    net = Nimble(model, quick(fuse)).prepare(x)
    assert fused(net) == fuse, engine(net).notes
    assert torch.equal(x, kept), "preparing leaves the input as it was"
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    for _ in range(2):
        ours = torch.randn(2, 3, 6, 6, device=device)
        theirs = ours.clone()
        with torch.no_grad():
            assert_close(net(ours), twin(theirs))
        assert_close(ours, theirs)
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, other)


def test_what_only_other_kernels_read_is_a_constant(fuse: str, device: str) -> None:
    """Its memory is there before any call: nothing may lie in its place until it is read."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.rand(64, 64, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * self.by) + 1

    net = Nimble(Scales(), quick(fuse, policy="single")).prepare(torch.rand(64, 64, device=device))
    recording = engine(net).recorded.recording
    assert recording.program.fuse == fuse
    assert [recording.program.storages[recording.storage_of[slot]].role for slot in recording.given] == ["constant"]
    net.close()


class Router(nn.Module):
    """What decides is computed in full precision, whatever autocast is around."""

    def __init__(self) -> None:
        super().__init__()
        self.decide, self.expert = nn.Linear(64, 4), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            chances = self.decide(x)
        return chances, self.expert(x).relu()


@pytest.mark.parametrize("training", [False, True])
def test_what_autocast_leaves_in_full_precision_stays_there(training: bool, fuse: str, device: str) -> None:
    torch.manual_seed(0)
    eager = Router().to(device).train(training)
    model, x = copy.deepcopy(eager), torch.randn(16, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        net = Nimble(model, quick(fuse)).prepare(x, training=training)
        assert fused(net) == fuse
        found, expected = net(x), eager(x)
    assert [one.dtype for one in found] == [one.dtype for one in expected] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=2e-2)
    if training:
        for out in (found, expected):
            (out[0].square().sum() + out[1].float().sum()).backward()
        torch.testing.assert_close(model.decide.weight.grad, eager.decide.weight.grad)
        torch.testing.assert_close(model.expert.weight.grad, eager.expert.weight.grad, rtol=2e-2, atol=2e-2)
    net.close()


# -- traced back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_traced_back_to_eager_calls(name: str, fuse: str, device: str) -> None:
    model, _, net = prepared(name, fuse, device)
    program, eager = programs(net)
    paths = {path for path, _ in model.named_modules()} if isinstance(model, nn.Module) else {""}
    # Inputs and weights in another layout, or padded, stand for no call: that is counted.
    layouts = [call for call in program.calls if not call.eager]
    assert unmapped(program) == len(layouts)
    assert len(layouts) <= 2 * sum(call.label in ("convolution", "addmm") for call in eager.calls)
    for call in program.calls:
        assert list(call.eager) == sorted(set(call.eager))
        assert call.origins
        if call in layouts:
            assert [origin.operator for origin in call.origins] == [call.operator]
            continue
        expected = {origin for index in call.eager for origin in eager.calls[index].origins}
        assert set(call.origins) == expected
        for origin in call.origins:
            assert origin.module in paths
            assert origin.file.endswith(".py")
            assert origin.line > 0
    done = {index for call in program.calls for index in call.eager}
    assert done == set(range(len(eager.calls))), "every eager call is done by someone"
    assert len(program.calls) - len(layouts) <= len(eager.calls)


def test_fewer_calls_do_the_same_work(fuse: str, device: str) -> None:
    tower, eager = programs(prepared("tower", fuse, device)[2])
    assert not any("batch_norm" in call.operator for call in tower.calls)
    assert sum("batch_norm" in call.operator for call in eager.calls) == 2
    attention, eager = programs(prepared("attention", fuse, device)[2])
    products = {call.index for call in eager.calls if call.label == "addmm"}
    assert len(products) == 4
    merged = max(attention.calls, key=lambda call: ("mm" in call.operator, len(products & set(call.eager))))
    assert len(products & set(merged.eager)) == 3, "query, key and value are one product"
    assert {"query", "key", "value"} <= {origin.module for origin in merged.origins}
    if fuse == "inductor":
        compiled, eager = programs(prepared("function", fuse, device)[2])
        assert [call.eager for call in compiled.calls] == [tuple(range(len(eager.calls)))]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "trilinear"])
@pytest.mark.parametrize("resized", [{"scale_factor": 2.5}, {"size": 9, "align_corners": True}], ids=["scale", "size"])
def test_interpolation_is_compiled_with_what_is_around_it(
    mode: str, resized: dict[str, Any], fuse: str, device: str
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x * 2, mode=mode, **resized).relu()

    x = torch.randn(1, 3, *[5, 6, 7][: 3 if mode == "trilinear" else 2], device=device)
    net = Nimble(model, quick(fuse)).prepare(x)
    assert_close(net(x), model(x))
    if fuse == "inductor":
        (call,) = programs(net)[0].calls
        assert len(call.eager) == 3


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer", "load_state_dict", "data", "statistics"])
def test_weights_that_change_are_followed(how: str, fuse: str, device: str) -> None:
    model, draw = made("tower", device)
    net = Nimble(model, quick(fuse)).prepare(draw())
    assert fused(net) == fuse, engine(net).notes
    assert not engine(net).check_first or device == "cpu", "asked while the device is busy with the run"
    x = draw()
    with torch.no_grad():
        before = model(x).clone()
        assert_close(net(x), before)
    folds = engine(net).watch.values.folds
    if how == "load_state_dict":
        torch.manual_seed(11)
        model.load_state_dict(Tower().state_dict())
    elif how == "data":
        model.block.first.weight.data.mul_(-2)
        model.block.second.weight.data.mul_(-2)
        net.refresh()
    elif how == "statistics":
        with torch.no_grad():
            model.block.norm.running_mean.add_(1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model(draw()).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert not torch.allclose(before, model(x), rtol=5e-2, atol=5e-2)
        assert_close(net(x), model(x))
    assert engine(net).watch.values.folds > folds, "the first run after the change is right already"
    model.block.norm.weight = nn.Parameter(torch.ones(8, device=device))
    with pytest.raises(InputError, match=r"block\.norm\.weight is another tensor"):
        net(x)


# -- plans ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["tower", "attention"])
def test_a_plan_makes_the_same_kernels_again(
    name: str, fuse: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draw = made(name, device)
    x = draw()
    first = Nimble(model, quick(fuse, tune="fast")).prepare(x)
    plan = engine(first).plan
    assert plan is not None
    assert (plan.fuse, plan.kernels) == (fuse, programs(first)[0].choices)
    kept = load_plan(plan.save(tmp_path / "fused.plan.json"))
    assert kept == plan
    # Nothing is measured again.
    monkeypatch.setattr("nimble_core.runtime.host.device._fastest_ns", lambda call: pytest.fail("measured"))
    again = Nimble(model, Options()).prepare(x, plan=kept)
    one, other = (engine(net).recorded for net in (first, again))
    assert fingerprint(one.recording.program, one.graph) == fingerprint(other.recording.program, other.graph)
    assert other.recording.program.choices == plan.kernels
    assert engine(again).schedule.stream == engine(first).schedule.stream
    assert_close(first(x), again(x))


def test_a_plan_whose_kernels_are_wrong_here_is_said(fuse: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = made("residual", device)
    x = draw()
    plan = engine(prepared("residual", fuse, device)[2]).plan
    real = pipeline.split_constants

    def wrong(module: Any, names: Any) -> Any:
        folded = real(module, names)
        for constant in folded.constants:
            constant.mul_(1.5)
        return folded

    monkeypatch.setattr(pipeline, "split_constants", wrong)
    with pytest.warns(UserWarning, match="the plan's kernels are not right here"):
        Nimble(model).prepare(x, plan=plan)
