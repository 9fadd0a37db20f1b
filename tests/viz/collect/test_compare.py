from __future__ import annotations

import random
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.ir.timeline import Observation
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, InputError, NimbleWarning, NotStaticError
from nimble_viz.analysis.advice import inputs_of
from nimble_viz.collect.compare import compare
from nimble_viz.collect.progress import Progress
from nimble_viz.render.report import Report
from nimble_viz.report.data import EAGER_ALONE
from tests.support.compared_steps import Spy
from tests.support.models import Busy, Deep, Norms, Wide, make

FAST = Options(budget_s=0.05)
NIMBLE = Options(policy="nimble", budget_s=0.05)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_fake(model: Any, *args: Any, device: FakeDevice | None = None, **more: Any) -> Report:
    more = {"options": FAST, **more}
    return compare(model, *args, device=device or FakeDevice(), progress=Progress(), **more)


# -- the report ----------------------------------------------------------------------------------------------------


def test_a_report_on_the_host() -> None:
    model, x = Wide(branches=6, features=32), torch.randn(3, 32)
    spy = Spy()
    report = compare(model, x, progress=spy, options=FAST)
    assert (report.model, report.dtype, report.batch, report.complete) == ("Wide", "float32", 3, True)
    assert [taken.name for taken in report.measurements][:2] == ["eager", "single"]
    names = {plan.policy for plan in report.schedules}
    assert "single" in names
    assert {taken.name for taken in report.measurements} == names | {"eager"}
    assert {check.name for check in report.checks} == names
    assert all(check.passed for check in report.checks), report.checks
    assert report.chosen in names
    for name in names:
        ratio = report.ratio(name)
        assert ratio is not None
        assert ratio.low <= ratio.value <= ratio.high
    assert len({len(taken.samples_ns) + taken.dropped for taken in report.measurements}) == 1
    for plan in report.schedules:
        assert plan.counts.full >= plan.counts.meg >= plan.counts.planned >= 0
        assert len(plan.stream) == len(report.program.calls)
    assert report.schedule("single").streams == 1
    steps = [step.name for step in report.preparation]
    assert steps[:6] == ["warm-up", "record", "record again", "hazards", "capture single", "measure calls"]
    assert all(step.seconds >= 0 for step in report.preparation)
    assert "measure" not in steps
    assert {"measure", "check equality", "watch replays", "profile eager", "eager memory"} <= set(spy.names)
    assert spy.finished
    assert report.environment is not None
    assert report.timeline("single") is not None
    assert report.timeline("eager") is not None
    assert report.overhead is not None
    assert report.overhead.matched == report.overhead.total == len(report.eager_calls)
    assert len(report.costs.ns) == report.graph.size == len(report.program.calls)
    assert sum(report.costs.ns[call] for call in report.critical_path) == pytest.approx(report.critical_path_ns)


def test_exact_times_on_a_fake_device() -> None:
    device = FakeDevice(1000.0, overhead_ns_per_call=500.0)
    model, x = Wide(branches=4), torch.randn(2, 16)
    report = on_fake(device.eager(model), x, device=device, options=NIMBLE)
    calls = len(report.program.calls)
    assert calls == 10  # four linears, four ReLUs, stack, sum
    assert set(report.measurement("eager").samples_ns) == {calls * 1500.0}
    assert set(report.measurement("single").samples_ns) == {calls * 1000.0}
    assert set(report.measurement("nimble").samples_ns) == {4000.0}
    for baseline, speed in (("eager", 3.75), ("single", 2.5)):
        ratio = report.ratio("nimble", baseline)
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx((speed, speed, speed))
        assert ratio.verdict == "faster"
    assert report.chosen == "nimble"
    assert report.critical_path_ns == 4000.0
    assert report.schedule("nimble").streams == 4
    counts = report.schedule("nimble").counts
    assert (counts.full, counts.meg, counts.planned) == (3, 3, 3)
    assert report.schedule("single").counts.planned == 0


class Disturbed(FakeDevice):
    """Says that calls took a thousand times as long."""

    def observe(self, *args: Any) -> Observation:
        seen = super().observe(*args)
        slow = replace(seen.timeline, profiled_ns=1e3 * seen.timeline.profiled_ns)
        return Observation(slow, replace(seen.costs, ns=tuple(1e3 * ns for ns in seen.costs.ns)))


def test_costs_that_a_replay_refutes_are_unknown() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    report = on_fake(model, x, device=Disturbed())
    assert (report.costs.source, report.critical_path_ns) == ("uniform", 0.0)
    (warning,) = (one for one in report.warnings if "what each call costs is unknown" in one)
    assert "the machine was not quiet" in warning
    assert "Distance to the limit" in on_fake(model, x).to_text(full=True)
    assert "Distance to the limit" not in report.to_text(full=True)


# -- the model stays as it was -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "fake"])
def test_the_model_is_left_as_it_was(device: str | None) -> None:
    model, x = Busy().train(), torch.randn(4, 3)
    tensors = [*model.state_dict().values(), model.tensor, x]
    identities = [id(tensor) for tensor in model.buffers()]
    kept = [tensor.clone() for tensor in tensors]
    state, drawn = torch.get_rng_state(), random.getstate()
    chosen = FakeDevice() if device else None
    report = compare(model, x, options=FAST, progress=Progress(), device=chosen)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    assert [id(tensor) for tensor in model.buffers()] == identities
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == drawn
    assert (model.history, model.table, model.number, model.gone) == ([1], {"a": 1}, 1, "here")
    assert not hasattr(model, "fresh")
    assert any("history" in warning for warning in report.warnings)


def test_the_mode_that_eager_runs_in_is_said() -> None:
    model, args, kwargs = make("gradient_inside")
    usual = on_fake(Deep(), torch.randn(1, 8))
    for report, said in (
        (on_fake(model, *args, kwargs=kwargs), "inference_mode fails"),
        (on_fake(Norms().train(), torch.randn(4, 3, 6, 6)), "in training mode"),
    ):
        assert any(said in warning for warning in report.warnings)
        assert not any(said in warning for warning in usual.warnings)


# -- checks --------------------------------------------------------------------------------------------------------


class Wrong(FakeDevice):
    def capture(self, *args: Any) -> Any:
        made = super().capture(*args)
        run = made.run
        made.run = lambda inputs, static=False: [out + 1 for out in run(inputs)]  # type: ignore[method-assign]
        return made


@pytest.mark.parametrize(
    ("model", "device", "said"),
    [
        (lambda x: (x * 0).sum() + torch.ones(3), FakeDevice(), "void"),
        (lambda x: x * float("nan"), FakeDevice(), "not finite"),
        (torch.tanh, Wrong(), "differ from eager"),
    ],
)
def test_checks_that_do_not_pass_say_why(model: Any, device: FakeDevice, said: str) -> None:
    report = on_fake(model, torch.randn(4), device=device)
    assert not any(check.passed for check in report.checks)
    assert any(said in warning for warning in report.warnings)
    assert report.complete
    assert (report.chosen == "") == (said == "differ from eager")


# -- verdicts ------------------------------------------------------------------------------------------------------


class Wandering(FakeDevice):
    """A machine that takes up to a thousand times as long as it should, now and then."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.draw = random.Random(4)

    def synchronize(self) -> None:
        self.advance(10 ** self.draw.uniform(3, 7))


def test_sampling_goes_on_while_a_verdict_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_viz.collect.comparison._PATIENCE_S", 1.0)
    for device, most in ((Wandering(), 4096), (FakeDevice(1000.0), 512)):
        options = Options(policy="nimble", budget_s=60.0)
        report = on_fake(device.eager(Wide()), torch.randn(2, 16), device=device, options=options)
        rounds = {len(taken.samples_ns) + taken.dropped for taken in report.measurements}
        assert max(rounds) > 32
        assert max(rounds) <= most


class Told(Progress):
    """Keeps the names of steps and what was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def tell(self, text: str) -> None:
        self.lines.append(text)

    def _show(self, name: str) -> None:
        self.lines.append(name)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_first_verdict_comes_before_anything_is_compiled() -> None:
    told = Told()
    compare(Deep(), torch.randn(1, 8), options=Options(fuse="inductor", budget_s=60.0), progress=told)
    (at,) = (at for at, line in enumerate(told.lines) if line.startswith("first look, eager's own kernels replayed: "))
    assert "compile" not in told.lines[:at]
    assert "compile" in told.lines[at:]
    compare(Deep(), torch.randn(1, 8), options=Options(fuse="none", tune="off"), progress=(told := Told()))
    assert not any("first look" in line for line in told.lines)


def test_eager_is_measured_with_one_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x.relu()

    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        report = compare(model, torch.randn(2, 16), options=FAST)
        assert torch.get_num_threads() == 2
        assert set(seen) == {1, 2}
        assert report.ratio(report.chosen, EAGER_ALONE) is not None
        assert EAGER_ALONE not in {plan.policy for plan in report.schedules}
        torch.set_num_threads(1)
        assert compare(model, torch.randn(2, 16), options=FAST).measurement(EAGER_ALONE) is None
    finally:
        torch.set_num_threads(usual)


# -- interruptions -------------------------------------------------------------------------------------------------

STEPS = [
    "warm-up", "record", "record again", "hazards", "capture single", "measure calls", "schedule", "capture nimble",
    "measure", "check equality", "watch replays", "profile eager", "eager memory",
]  # fmt: skip


@pytest.mark.parametrize("device", ["fake", "cpu"])
@pytest.mark.parametrize("at", STEPS)
def test_an_interruption_keeps_what_there_is(at: str, device: str) -> None:
    model, x = Norms().train(), torch.randn(2, 3, 4, 4)
    model = nn.ModuleDict({"a": model}).a
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spy = Spy(at)
    chosen = FakeDevice() if device == "fake" else None
    report = None
    with warnings.catch_warnings(record=True) as given, suppress(KeyboardInterrupt):
        warnings.simplefilter("always", NimbleWarning)
        report = compare(model, x, options=NIMBLE, progress=spy, device=chosen)
    told = [str(one.message) for one in given if issubclass(one.category, NimbleWarning)]
    reached = at in spy.names
    if not reached:
        assert at in ("profile eager", "capture nimble")
    if reached and STEPS.index(at) <= STEPS.index("measure"):
        assert report is None
        assert not any("interrupted" in one for one in told)
    else:
        assert report is not None
        assert report.complete == (not reached)
        assert bool(report.measurements)
        assert [step.name for step in report.preparation][:3] == ["warm-up", "record", "record again"]
        assert sum("interrupted" in one for one in told) == reached
        assert report.chosen in {"", *(plan.policy for plan in report.schedules)}
        assert len(report.critical_path) >= 1
    assert spy.finished
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("at", STEPS[:2] + STEPS[4:6] + STEPS[8:10])
def test_an_error_passes_through_and_frees_the_engines(at: str) -> None:
    closed: list[str] = []

    class Watched(FakeDevice):
        def capture(self, *args: Any) -> Any:
            made = super().capture(*args)
            real = made.close
            made.close = lambda: (closed.append(made.schedule.policy), real())  # type: ignore[method-assign]
            return made

    spy = Spy(at, RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        compare(Wide(), torch.randn(2, 16), options=NIMBLE, progress=spy, device=Watched())
    assert spy.finished
    expected = {0: [], 1: [], 4: [], 5: ["single"]}.get(STEPS.index(at), ["nimble", "single"])
    assert sorted(set(closed)) == expected


# -- refusals ------------------------------------------------------------------------------------------------------

X = torch.ones(2, 16)


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def draws(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()


@pytest.mark.parametrize(
    ("model", "inputs", "more", "error", "said"),
    [
        (Wide, [X], {}, InputError, "given type Wide itself"),
        (Wide(), [X, X.to("meta")], {}, InputError, "mixed devices"),
        (Wide(), [X], {"against": "inductor"}, InputError, "no peer called 'inductor'"),
        (Wide(), [X], {"kwargs": [X]}, InputError, "kwargs is a list"),
        (Wide(), [X], {"device": "cuda"}, InputError, "device is a str, not a Device"),
        (Wide(), [torch.ones(2, 5)], {}, RuntimeError, "shapes cannot be multiplied"),  # the model's own complaint
        (reads, [X], {}, CaptureError, "_local_scalar_dense"),
        (draws, [X], {}, NotStaticError, "other="),
    ],
)
def test_what_cannot_be_compared(
    model: Any, inputs: list[Any], more: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        compare(model, *inputs, **{"options": FAST, "progress": Progress(), **more})


def test_a_model_that_cannot_be_split_says_so() -> None:
    pytest.importorskip("numpy")
    from nimble_viz.render.text import plain_text

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.numpy()[0] = 1.0
        return y + 1

    report = compare(forward, torch.randn(8, 8), options=FAST)
    (said,) = [one for one in report.warnings if "as it is" in one]
    assert "changed outside of torch" in said
    assert "test_compare.py" in said
    assert "launch" not in said
    assert "the model is called as it is: " in " ".join(plain_text(report, full=True).split())
    assert all(check.passed for check in report.checks)


@pytest.mark.parametrize(
    ("args", "kwargs", "given"),
    [((X,), {}, "x"), ((X, X), {}, "*args"), ((), {"x": X, "y": X}, "**kwargs"), ((X,), {"y": 2.0}, "x, **kwargs")],
)
def test_what_is_to_be_pasted_has_all_inputs(args: Any, kwargs: Any, given: str) -> None:
    def scaled(x: torch.Tensor, y: Any = 1.0) -> torch.Tensor:
        return x.relu() * y

    report = compare(scaled, *args, kwargs=kwargs, device=FakeDevice(), options=Options(fuse="none", tune="off"))
    assert inputs_of(report) == given
