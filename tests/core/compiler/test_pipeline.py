"""Other kernels for the same model, from the recording to the engine: right, traced back, or left out with a word."""

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
from nimble_core.api.engine import Engine
from nimble_core.compiler import pipeline
from nimble_core.compiler.attribution import unmapped
from nimble_core.ir.program import Program
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.saved_plan import fingerprint, load_plan
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.utils.errors import CaptureError, DeviceError, InputError
from nimble_viz import load
from nimble_viz.collect.compare import compare
from nimble_viz.collect.progress import Progress
from nimble_viz.render.text import plain_text
from tests.support.fused_models import MODELS, Residual, Tower, compiler_broken, made, mistaken
from tests.support.models import make

FUSED = ["library", "inductor"]
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def quick(fuse: Any, **more: Any) -> Options:
    return Options(**{"fuse": fuse, "tune": "off", "policy": "nimble", **more})


@cache
def prepared(name: str, fuse: str) -> tuple[Any, Callable[[], torch.Tensor], Nimble]:
    """Shared by tests that change nothing: compiling takes seconds."""
    model, draw = made(name)
    return model, draw, Nimble(model, quick(fuse)).prepare(draw())


def engine(net: Nimble) -> Engine:
    (found,) = net.engines
    return found


def programs(net: Nimble) -> tuple[Program, Program]:
    """What is replayed, and the eager calls it stands for."""
    recorded = engine(net).recorded
    assert recorded.eager is not None
    return recorded.recording.program, recorded.eager.recording.program


# -- right ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_as_close_to_float64_as_eagers(name: str, fuse: str) -> None:
    model, draw, net = prepared(name, fuse)
    assert programs(net)[0].fuse == fuse, engine(net).notes
    wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    for _ in range(3):
        x = draw()
        truth = wide(x.double())
        own, ours = ((out.double() - truth).norm() / truth.norm() for out in (model(x), net(x)))
        assert ours <= 3 * own + 2e-6


@torch.no_grad()
@pytest.mark.parametrize("fuse", FUSED)
def test_an_input_that_starts_elsewhere_in_its_memory(fuse: str) -> None:
    model, draw, net = prepared("attention", fuse)
    whole = torch.randn(4, 5, 16)
    torch.testing.assert_close(net(whole[1:3]), model(whole[1:3]))
    sliced = Nimble(model, quick(fuse)).prepare(whole[1:3])
    assert programs(sliced)[0].fuse == fuse
    for x in (whole[2:], whole[1:3], draw()):
        torch.testing.assert_close(sliced(x), model(x))


def test_what_only_compiled_kernels_read_is_a_constant() -> None:
    """Its memory is there before any call: nothing may lie in its place until it is read."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.rand(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * self.by) + 1

    net = Nimble(Scales(), Options(fuse="inductor", policy="single", tune="off")).prepare(torch.rand(64, 64))
    recording = net.engines[0].recorded.recording
    assert recording.program.fuse == "inductor"
    assert [recording.program.storages[recording.storage_of[slot]].role for slot in recording.given] == ["constant"]
    net.close()


@torch.no_grad()
@pytest.mark.parametrize("fuse", FUSED)
def test_outputs_have_the_strides_of_eagers(fuse: str) -> None:
    model, draw, net = prepared("residual", fuse)
    x = draw()
    assert net(x).stride() == model(x).stride()
    x = x.to(memory_format=torch.channels_last)
    last = Nimble(model, quick("library")).prepare(x)
    assert last(x).stride() == model(x).stride()
    torch.testing.assert_close(last(x), model(x))


@pytest.mark.parametrize("fuse", FUSED)
def test_what_a_model_writes_is_written(fuse: str) -> None:
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
    model = Writing().train()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    kept = x.clone()
    net = Nimble(model, quick(fuse)).prepare(x)
    assert programs(net)[0].fuse == fuse, engine(net).notes
    assert torch.equal(x, kept), "preparing leaves the input as it was"
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    for seed in range(2):
        ours = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        theirs = ours.clone()
        with torch.no_grad():
            torch.testing.assert_close(net(ours), twin(theirs))
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


# -- traced back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_traced_back_to_eager_calls(name: str, fuse: str) -> None:
    model, _, net = prepared(name, fuse)
    program, eager = programs(net)
    paths = {path for path, _ in model.named_modules()} if isinstance(model, nn.Module) else {""}
    # Inputs and weights in another layout stand for no call: that is counted.
    layouts = [call for call in program.calls if not call.eager]
    assert unmapped(program) == len(layouts)
    for call in layouts:
        made = {ref.storage for earlier in program.calls[: call.index] for ref in earlier.writes}
        assert not made & {ref.storage for ref in call.reads}
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
    assert len(program.calls) <= len(eager.calls)


def test_fewer_calls_do_the_same_work() -> None:
    tower, eager = programs(prepared("tower", "library")[2])
    assert not any("batch_norm" in call.operator for call in tower.calls)
    assert sum("batch_norm" in call.operator for call in eager.calls) == 2
    attention, eager = programs(prepared("attention", "library")[2])
    products = [call for call in attention.calls if call.label == "addmm"]
    assert sum(call.label == "addmm" for call in eager.calls) == 4
    assert sorted(len(call.eager) for call in products) == [1, 3], "query, key and value are one product"
    merged = max(products, key=lambda call: len(call.eager))
    assert {origin.module for origin in merged.origins} == {"query", "key", "value"}
    compiled, eager = programs(prepared("function", "inductor")[2])
    assert len(compiled.calls) == 1
    assert compiled.calls[0].eager == tuple(range(len(eager.calls)))


def test_the_steps_of_preparation_are_timed() -> None:
    seconds = engine(prepared("tower", "library")[2]).seconds
    assert {"rewrite for library", "warm up library calls", "record library"} <= seconds.keys()
    seconds = engine(prepared("tower", "inductor")[2]).seconds
    assert {"rewrite for inductor", "compile", "record inductor"} <= seconds.keys()


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", FUSED)
def test_folded_weights_follow(fuse: str) -> None:
    model, draw = made("tower")
    net = Nimble(model, quick(fuse)).prepare(draw())
    assert programs(net)[0].fuse == fuse
    x = draw()

    def same() -> bool:
        with torch.no_grad():
            return torch.allclose(net(x), model(x), rtol=1e-4, atol=1e-5)

    assert same()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    ):
        with torch.no_grad():
            before = model(x)
        model(draw()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert not torch.allclose(before, model(x), rtol=1e-2)
        assert same()
    other, _ = made("tower")
    model.load_state_dict(other.state_dict())
    assert same()
    with torch.no_grad():
        model.block.norm.running_mean.add_(1)
    assert same()
    model.block.first.weight.data.mul_(2)
    net.refresh()
    assert same()
    model.block.norm.weight = nn.Parameter(torch.ones(8))
    with pytest.raises(InputError, match=r"block\.norm\.weight is another tensor"):
        net(x)


def test_what_is_folded_is_said() -> None:
    _, _, net = prepared("tower", "library")
    assert engine(net).folded is not None
    assert any("folded into constants" in note for note in engine(net).notes)
    names = [name for name, _ in engine(net).folded.sources]
    assert {"block.first.weight", "block.norm.running_var", "block.second.bias"} <= set(names)
    assert len(names) == len(set(names))


# -- what cannot be made, or is not right ------------------------------------------------------------------------------


def left_out(net: Nimble, fuse: str) -> str:
    """The note of kernels that were left out; eager's own run."""
    assert engine(net).recorded.recording.program.fuse == "none"
    assert next(one for one in engine(net).candidates if one.chosen).fuse == "none"
    (note,) = [note for note in engine(net).notes if note.startswith(f"{fuse}: ")]
    return note


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


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("not today\nnor tomorrow")


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
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


def test_a_kernel_that_does_not_compile_is_left_out() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * 1.234 + 1).sigmoid() * x).softmax(-1)

    with compiler_broken():
        net = Nimble(model, quick("inductor")).prepare(torch.randn(6, 7))
    assert "PassManager::run failed" in left_out(net, "inductor")
    x = torch.randn(6, 7)
    torch.testing.assert_close(net(x), model(x))


def test_an_interruption_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "share_equal", stop)
    model, draw = made("tower")
    with pytest.raises(KeyboardInterrupt):
        Nimble(model, quick("library")).prepare(draw())


@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_that_compute_something_else_are_left_out(
    fuse: str, tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch)
    model, draw = made("residual")
    x = draw()
    net = Nimble(model, quick(fuse, tune=tune)).prepare(x)
    assert "outputs differ from float64's" in left_out(net, fuse)
    wrong = [one for one in engine(net).candidates if one.fuse == fuse]
    assert wrong
    assert all(one.check and one.check.differs and one.name.startswith(f"{fuse}, ") for one in wrong)
    assert engine(net).schedule.policy == "nimble"
    with torch.no_grad():
        assert torch.equal(net(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("fuse", FUSED)
def test_logits_that_are_masked_by_infinity_leave_nothing_out(fuse: str) -> None:
    class Masked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x).flatten(1)
            return logits.masked_fill(torch.arange(logits.shape[1]) % 3 == 0, -torch.inf)

    model = Masked(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 6, 6)
    net = Nimble(model, quick(fuse)).prepare(x)
    assert programs(net)[0].fuse == fuse, engine(net).notes
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)


def test_kernels_of_which_nothing_can_be_shown_are_left_out() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x) + (x * 1e-9).tanh()

    net = Nimble(model, quick("library")).prepare(torch.randn(8))
    assert "void" in left_out(net, "library")


def test_a_replay_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from nimble_core.autotune import autotune

    real = autotune.capture

    def failing(device: Any, recorded: Any, schedule: Any, **more: Any) -> Any:
        made = real(device, recorded, schedule, **more)
        if recorded.recording.program.fuse != "none":

            def run(*args: Any, **kwargs: Any) -> Any:
                raise DeviceError("a call failed in the replay")

            monkeypatch.setattr(made, "run", run)
        return made

    monkeypatch.setattr(autotune, "capture", failing)
    model, draw = made("residual")
    net = Nimble(model, quick("library")).prepare(draw())
    assert engine(net).recorded.recording.program.fuse == "none"
    assert any("library, nimble: left out: a call failed" in note for note in engine(net).notes)


@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_that_cannot_be_captured_are_left_out(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nimble_core.autotune import autotune

    real = autotune.capture

    def failing(device: Any, recorded: Any, schedule: Any, **more: Any) -> Any:
        if recorded.recording.program.fuse != "none":
            raise CaptureError("cannot be issued again")
        return real(device, recorded, schedule, **more)

    monkeypatch.setattr(autotune, "capture", failing)
    model, draw = made("residual")
    net = Nimble(model, quick("library", tune=tune)).prepare(draw())
    assert engine(net).recorded.recording.program.fuse == "none"
    assert any(": left out: cannot be issued again" in note for note in engine(net).notes)
    monkeypatch.setattr(autotune, "capture", lambda *args, **more: fail())
    with pytest.raises(ZeroDivisionError):
        Nimble(model, quick("none")).prepare(draw())


def test_a_launch_that_was_not_seen_is_an_error() -> None:
    class Blind(FakeDevice):
        def record(self, *args: Any, **kwargs: Any) -> Any:
            from dataclasses import replace

            recording = super().record(*args, **kwargs)
            return recording if len(args) < 5 else replace(recording, unseen=2, unseen_where="after call 3")

    model, draw = made("tower")
    x, device = draw(), Blind()
    recorded = record_static(device, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())
    with pytest.raises(CaptureError, match="2 launches of the library kernels belong to no call") as caught:
        pipeline.fuse(device, recorded, "library", step=Stopwatch())
    assert "after call 3" in str(caught.value)


# -- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", FUSED)
def test_a_plan_makes_the_same_kernels_again(fuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = made("attention")
    x = draw()
    first = Nimble(model, quick(fuse, tune="fast")).prepare(x)
    plan = engine(first).plan
    assert plan is not None
    assert (plan.fuse, plan.kernels) == (fuse, programs(first)[0].choices)
    kept = load_plan(plan.save(tmp_path / "fused.plan.json"))
    assert kept == plan
    monkeypatch.setattr("nimble_core.runtime.host.device._fastest_ns", fail)  # nothing is measured again
    again = Nimble(model, Options()).prepare(x, plan=kept)
    one, other = (engine(net).recorded for net in (first, again))
    assert fingerprint(one.recording.program, one.graph) == fingerprint(other.recording.program, other.graph)
    assert other.recording.program.choices == plan.kernels
    assert engine(again).schedule.stream == engine(first).schedule.stream
    with torch.no_grad():
        assert torch.equal(first(x), again(x))


@pytest.mark.parametrize("fuse", FUSED)
def test_a_plan_for_another_model_is_refused_by_the_first_difference(fuse: str) -> None:
    _, _, net = prepared("attention", fuse)
    plan = engine(net).plan
    other, draw = made("perceptron")
    with pytest.raises(InputError, match="the plan was made for another program: ") as caught:
        Nimble(other).prepare(draw(), plan=plan)
    assert "make the plan again" in caught.value.fix
    assert "the plan" in caught.value.what


def test_a_plan_whose_kernels_are_wrong_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = made("residual")
    x = draw()
    plan = engine(prepared("residual", "library")[2]).plan
    real = pipeline.split_constants

    def wrong(module: Any, names: Any) -> Any:
        folded = real(module, names)
        for constant in folded.constants:
            constant.mul_(1.5)
        return folded

    monkeypatch.setattr(pipeline, "split_constants", wrong)
    with pytest.warns(UserWarning, match="the plan's kernels are not right here"):
        Nimble(model).prepare(x, plan=plan)


# -- compare --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", FUSED)
def test_a_report_of_fused_kernels(fuse: str, tmp_path: Path) -> None:
    model, draw = made("tower")
    options = Options(fuse=fuse, policy="nimble", budget_s=0.2)
    report = compare(model, draw(), options=options, progress=Progress())
    assert report.program.fuse == fuse
    assert report.chosen in {f"{fuse}, single", f"{fuse}, nimble"}, "whichever was faster"
    assert report.eager is not None
    assert {index for call in report.program.calls for index in call.eager} == set(range(len(report.eager.calls)))
    names = {"single", f"{fuse}, single", f"{fuse}, nimble"}
    assert {one.name for one in report.candidates} == names
    assert {taken.name for taken in report.measurements} == names | {"eager"}
    for one in report.candidates:
        assert one.fuse == ("none" if one.name == "single" else fuse)
        assert (one.fuse_s > 0) == (one.fuse != "none")
        assert one.capture_s > 0
        assert one.check is not None
        assert one.check.passed
        assert one.check.reference == ("eager" if one.fuse == "none" else "float64")
        assert not one.note
    assert [one.name for one in report.candidates if one.chosen] == [report.chosen]
    assert {plan.policy for plan in report.schedules} == names - {"single"}
    assert all(len(plan.stream) == len(report.program.calls) for plan in report.schedules)
    assert {line.run for line in report.timelines} == {"eager", *names} - {"single"}
    assert len(report.costs.ns) == len(report.program.calls)
    kept = load(report.save(tmp_path / "fused.nimble"))
    assert kept == report
    assert fuse in plain_text(kept)
    again = Nimble(model).prepare(draw(), plan=kept.plan)
    assert again.engines[0].recorded.recording.program.fuse == fuse
    x = draw()
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))


def test_a_report_where_the_kernels_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", fail)
    model, draw = made("attention")
    report = compare(model, draw(), options=Options(fuse="inductor", budget_s=0.1), progress=Progress())
    assert (report.program.fuse, report.eager) == ("none", None)
    (left,) = [one for one in report.candidates if one.fuse == "inductor"]
    assert (left.name, left.measurement, left.chosen) == ("inductor", None, False)
    assert "ZeroDivisionError: not today" in left.note
    assert any(warning == f"inductor: {left.note}" for warning in report.warnings)
    assert report.chosen in {plan.policy for plan in report.schedules}
    assert len(report.schedules) == 2, "eager's own kernels are planned as without the option"
    assert plain_text(report)


def test_a_report_where_the_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken(monkeypatch)
    model, draw = made("residual")
    report = compare(model, draw(), options=Options(fuse="library", budget_s=0.1), progress=Progress())
    assert (report.program.fuse, report.eager) == ("none", None)
    assert [one.fuse for one in report.candidates if one.chosen] == ["none"]
    assert all(check.passed for check in report.checks)
    assert len({check.name for check in report.checks}) == len(report.checks)
    assert any("library: left out: outputs differ" in warning for warning in report.warnings)


# -- around a module ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Tower(), Residual()], ids=["tower", "residual"])
def test_a_function_around_a_module(model: nn.Module) -> None:
    model.eval()
    x = torch.randn(1, 3, 8, 8)
    net = Nimble(lambda x: {"out": model(x), "same": x}, quick("library")).prepare(x)
    assert engine(net).recorded.recording.program.fuse == "library"
    y = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        found, expected = net(y), model(y)
    torch.testing.assert_close(found["out"], expected)
    assert torch.equal(found["same"], y)


class Router(nn.Module):
    """What decides is computed in full precision, whatever autocast is around."""

    def __init__(self) -> None:
        super().__init__()
        self.decide, self.expert = nn.Linear(64, 4), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            chances = self.decide(x)
        return chances, self.expert(x).relu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fuse", FUSED)
def test_what_autocast_leaves_in_full_precision_stays_there(fuse: str, training: bool, device: str) -> None:
    torch.manual_seed(0)
    eager = Router().to(device).train(training)
    model, x = copy.deepcopy(eager), torch.randn(16, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        net = Nimble(model, quick(fuse)).prepare(x, training=training)
        assert engine(net).recorded.recording.program.fuse == fuse
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
