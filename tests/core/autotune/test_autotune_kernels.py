"""The measured choice among kernels: the fastest that are right win, and what goes wrong leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core.autotune import autotune
from nimble_core.compiler import pipeline
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.saved_plan import Plan, load_plan
from nimble_core.torch_compat.unchanged import passes
from nimble_core.tracing.recorded import Recorded
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, ScheduleError
from nimble_core.validation import judge
from tests.support.tuning import LikeCuda, Noisy, NoisyHost, Watched, by_name, tuning

AMPLE = Options(budget_s=500.0)
QUICK = Options(budget_s=1.0)  # too little to compile
COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Choices of this test alone; what is compiled in C, once in a process, lies elsewhere."""
    passes()
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    return tmp_path


def kernels(tuned: Any) -> str:
    return tuned.recorded.recording.program.fuse


def mine(graph: Any, costs: Any) -> Schedule:
    return replace(POLICIES["nimble"](graph, costs), policy="mine")


@COMPILES
def test_all_kernels_are_tried_and_the_fastest_that_are_right_win() -> None:
    device = LikeCuda({"library": 0.5, "inductor": 0.1})
    with tuning(device, AMPLE) as tuned:
        assert device.recorded == ["none", "none", "library", "inductor"]
        assert kernels(tuned) == "inductor"
        found = by_name(tuned)
        assert {"single", "library, single", "inductor, single"} <= found.keys()
        for name, one in found.items():
            assert name.startswith(f"{one.fuse}, ") or (one.fuse == "none" and "library" not in name)
            assert (one.fuse_s > 0) == (one.fuse != "none")
            assert one.note or (one.measurement and one.check and one.check.passed and one.capture_s > 0)
        (chosen,) = [one for one in tuned.candidates if one.chosen]
        assert chosen.fuse == "inductor"
        assert chosen.measurement
        assert chosen.measurement.median_ns == min(
            one.measurement.median_ns for one in found.values() if one.measurement
        )
        assert {"single", "inductor, single", chosen.name} <= set(tuned.executables)
        assert tuned.recorded.eager is not None
        assert tuned.costs
        assert len(tuned.costs.ns) == len(tuned.recorded.recording.program.calls)


@COMPILES
def test_kernels_that_are_hopeless_are_tried_on_one_stream_only() -> None:
    device = LikeCuda({"library": 100.0, "inductor": 100.0})
    with tuning(device, AMPLE) as tuned:
        assert kernels(tuned) == "none"
        assert [name for name in device.captured if name.startswith(("library", "inductor"))] == [
            "library, single",
            "inductor, single",
        ]
        left = [one for one in tuned.candidates if "other kernels are faster" in one.note]
        assert left
        assert all(one.fuse in ("library", "inductor") for one in left)


@pytest.mark.parametrize(
    ("device", "options", "tried"),
    [
        (lambda: LikeCuda({"library": 0.1}), QUICK, {"none", "library"}),
        (lambda: LikeCuda({"library": 0.1}), Options(budget_s=0.0), {"none"}),
        (lambda: LikeCuda({"library": 0.1}), Options(fuse="library", budget_s=0.0), {"none", "library"}),
        (lambda: LikeCuda({"library": 0.1}), Options(tune="off"), {"none"}),
        (lambda: Watched(1000.0), Options(), {"none"}),
    ],
)
def test_what_the_budget_and_the_options_allow_is_tried(
    device: Callable[[], Watched], options: Options, tried: set[str]
) -> None:
    with tuning(device(), options) as tuned:
        assert kernels(tuned) == ("library" if "library" in tried else "none")
        left = {one.name: one.note for one in tuned.candidates if one.note.startswith("not ")}
        assert {one.fuse for one in tuned.candidates if one.name not in left} <= tried
        for name, note in left.items():
            if name in ("library", "inductor"):
                assert f"{name}: {note}" in tuned.notes
                assert note.startswith(f"not {'compiled' if name == 'inductor' else 'rewritten'}: about ")
                assert note.endswith(f"s left of budget_s={options.budget_s:g}")


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize("measure_single", [False, True])
def test_wrong_kernels_win_nothing(fuse: Any, measure_single: bool) -> None:
    device = LikeCuda({"library": 0.001}, wrong="library")
    with tuning(device, replace(QUICK, fuse=fuse), measure_single=measure_single) as tuned:
        wrong = [one for one in tuned.candidates if one.fuse == "library" and one.check]
        assert wrong
        assert all(one.check and one.check.differs and one.note == one.check.reason for one in wrong)
        (chosen,) = [one for one in tuned.candidates if one.chosen]
        assert chosen.fuse == "none"
        assert chosen.streams > 1, "eager's own kernels are planned as without the option"
        assert any(note.startswith("library: left out: ") for note in tuned.notes)
        assert not tuned.wrong
        assert len({check.name for check in tuned.checks}) == len(tuned.checks)


def only_eagers(graph: Any, costs: Any) -> Schedule:
    """Plan only what makes as many calls as eager."""
    if graph.size < 10:
        raise ValueError("made for 10 calls\nor more")
    return mine(graph, costs)


@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_that_a_policy_cannot_plan_are_left_out(fuse: Any, tune: Any) -> None:
    device = LikeCuda({"library": 0.1})
    options = replace(QUICK, fuse=fuse, policy=only_eagers, tune=tune)
    with tuning(device, options) as tuned:
        assert kernels(tuned) == "none"
        assert tuned.best.schedule.policy == "mine"
    if "library" in device.recorded:
        left = [one for one in tuned.candidates if one.fuse == "library"]
        assert "library: left out: ValueError: made for 10 calls" in tuned.notes
        assert left
        assert all("ValueError" in one.note and not one.measurement for one in left)
        with pytest.raises(ValueError, match="made for 10"), tuning(LikeCuda(), replace(options, strict=True)):
            pass


@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize(
    ("module", "name", "error", "said", "strict"),
    [
        (pipeline, "attributed", KeyError("x"), "the library kernels do not run: KeyError: 'x'", False),
        (pipeline, "build_graph", OSError("none"), "the library kernels do not run: OSError: none", False),
        (pipeline, "lift", InputError("not such a model"), "not such a model", True),
        (pipeline, "lift", ScheduleError("a race"), "a race", True),
        (pipeline, "lift", CaptureError("cannot be issued", where="here"), "cannot be issued (here)", False),
        (autotune, "observe", DeviceError("the device is gone"), "the device is gone", False),
        (autotune, "observe", AssertionError("wrong"), "AssertionError: wrong", True),
        (autotune, "observe", AssertionError(), "AssertionError", True),
    ],
)
def test_whatever_goes_wrong_with_other_kernels_leaves_them_out(
    fuse: Any,
    module: Any,
    name: str,
    error: Exception,
    said: str,
    strict: bool,
    own_choices: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is raised under ``strict`` where it is no refusal that kernels may meet."""
    real = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        variant = args[1] if name == "observe" else None
        if isinstance(variant, Recorded) and variant.recording.program.fuse == "none":
            return real(*args, **kwargs)
        raise error

    monkeypatch.setattr(module, name, failing)
    options = replace(QUICK, fuse=fuse)
    with tuning(LikeCuda({"library": 0.1}), options) as tuned:
        assert kernels(tuned) == "none"
        assert f"library: left out: {said}" in tuned.notes
        assert tuned.best.schedule.streams > 1
        assert {one.note for one in tuned.candidates if one.fuse == "library"} == {f"left out: {said}"}
    for choice in own_choices.iterdir():
        choice.unlink()
    try:
        with tuning(LikeCuda(), replace(options, strict=True)):
            assert not strict
    except type(error):
        assert strict


# -- what an earlier process chose ------------------------------------------------------------------------------------


@COMPILES
def test_a_choice_is_recalled(own_choices: Path) -> None:
    options = replace(AMPLE, budget_s=400.0)
    slow = {"library": 0.1, "inductor": 0.5}
    with tuning(LikeCuda(slow), options) as tuned:
        schedule, program = tuned.best.schedule, tuned.recorded.recording.program
        assert program.fuse == "library"
    (file,) = own_choices.iterdir()
    before = file.read_bytes()
    second = LikeCuda(slow)
    with tuning(second, options) as tuned:
        assert second.recorded == ["none", "none", "library"]
        assert second.captured == [schedule.policy]
        assert (tuned.best.schedule.policy, tuned.best.schedule.stream) == (schedule.policy, schedule.stream)
        assert tuned.recorded.recording.program.choices == program.choices
        (one,) = tuned.candidates
        assert one.chosen
        assert one.fuse_s > 0
        assert one.check
        assert one.check.passed
        (note,) = [note for note in tuned.notes if "chosen by an earlier process" in note]
        assert str(own_choices) in note
    assert file.read_bytes() == before
    with tuning(LikeCuda({"library": 0.1}), options, measure_single=True) as tuned:
        assert len(tuned.candidates) > 1, "a report shows all that can be chosen from"


@pytest.mark.parametrize(
    "other",
    [{"budget_s": 1.5}, {"max_streams": 3}, {"memory_limit": 1 << 30}, {"tune": "full"}, {}],
    ids=lambda one: next(iter(one), "precision"),
)
def test_a_choice_under_other_conditions_is_not(other: dict[str, Any]) -> None:
    def recalled(options: Options) -> bool:
        with tuning(LikeCuda(), options) as tuned:
            return any("earlier process" in note for note in tuned.notes)

    assert not recalled(QUICK)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision if other else "high")
    try:
        assert not recalled(replace(QUICK, **other))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert recalled(QUICK)


@pytest.mark.parametrize("fuse", ["none", "library"])
def test_a_choice_among_plans_of_the_same_kernels_is_recalled(fuse: Any) -> None:
    with tuning(LikeCuda(), replace(QUICK, fuse=fuse)) as tuned:
        assert len(tuned.candidates) > 1
    with tuning(second := LikeCuda(), replace(QUICK, fuse=fuse)) as again:
        assert second.captured == [again.best.schedule.policy] == [tuned.best.schedule.policy]
    with tuning(LikeCuda(), QUICK) as tuned:
        assert len(tuned.candidates) > 1, "other kernels were not compared"


@pytest.mark.parametrize("shown", [True, False])
def test_kernels_that_were_shown_to_be_right_are_held_against_eager_alone(
    shown: bool, own_choices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tuning(LikeCuda({"library": 0.1}), QUICK):
        pass
    (file,) = own_choices.iterdir()
    assert len(load_plan(file).shown) == 64
    if not shown:
        replace(load_plan(file), shown="0" * 64).save(file)
    asked: list[bool] = []
    cases = judge.eager_cases
    monkeypatch.setattr(judge, "eager_cases", lambda one, truth=False: asked.append(truth) or cases(one, truth=truth))
    with tuning(LikeCuda({"library": 0.1}), QUICK) as tuned:
        (one,) = tuned.candidates
        assert one.check
        assert one.check.passed
    assert asked == [not shown]


@pytest.mark.parametrize("policy", [mine, "nimble"])
def test_policies_of_the_users_own_are_not_kept(policy: Any, own_choices: Path) -> None:
    with tuning(LikeCuda(), replace(QUICK, policy=policy)):
        pass
    assert not list(own_choices.iterdir())


def spoiled(plan: Plan) -> Plan:
    return replace(plan, fingerprint="0" * 64)


def racing(plan: Plan) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, order=(*reversed(plan.schedule.order),)))


@pytest.mark.parametrize("spoil", [spoiled, racing])
def test_a_choice_that_does_not_fit_any_more_is_made_again(own_choices: Path, spoil: Any) -> None:
    with tuning(LikeCuda({"library": 0.1}), QUICK):
        pass
    (file,) = own_choices.iterdir()
    good = file.read_bytes()
    spoil(load_plan(file)).save(file)
    with tuning(LikeCuda({"library": 0.1}), QUICK) as tuned:
        assert any("could not be made again" in note for note in tuned.notes)
        assert kernels(tuned) == "library"
        assert len(tuned.candidates) > 1
    assert file.read_bytes() == good, "the next process finds what was chosen now"


@pytest.mark.parametrize(
    ("now", "note"),
    [
        ({"wrong": "library"}, "library: left out: outputs differ"),
        ({"impossible": "library"}, "library, single: left out: out of memory"),
    ],
)
def test_a_choice_that_is_not_right_any_more_is_made_again(now: dict[str, str], note: str) -> None:
    with tuning(LikeCuda({"library": 0.1}), QUICK):
        pass
    with tuning(LikeCuda({"library": 0.1}, **now), QUICK) as tuned:
        assert kernels(tuned) == "none"
        assert any(one.startswith(note) for one in tuned.notes)


@pytest.mark.parametrize("budget_s", [1.0, 30.0])
def test_measuring_ends_where_replays_are_long_and_nothing_is_decided(
    budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(Noisy):
        def synchronize(self) -> None:
            self.advance(10 ** self.draw.uniform(7, 8))

    monkeypatch.setitem(autotune._PATIENCE_S, "fast", 1.0)
    taken_s: list[float] = []
    interleave = autotune.interleave

    def timed(*args: Any, clock_ns: Any, **kwargs: Any) -> Any:
        began = clock_ns()
        found = interleave(*args, clock_ns=clock_ns, **kwargs)
        taken_s.append((clock_ns() - began) / 1e9)
        return found

    monkeypatch.setattr(autotune, "interleave", timed)
    with tuning(Long(), replace(QUICK, budget_s=budget_s)):
        pass
    assert taken_s
    assert max(taken_s) < min(3.0, budget_s) + 2.0, "five rounds are taken in any case"


# -- what nothing decides ---------------------------------------------------------------------------------------------


@COMPILES
@pytest.mark.parametrize(("device", "best"), [(Noisy, "inductor, single"), (NoisyHost, "single")])
def test_where_nothing_is_decided_the_simplest_kernels_run_on_one_stream(device: type[Noisy], best: str) -> None:
    with tuning(device({"inductor": 0.5}), AMPLE) as tuned:
        assert tuned.best.schedule.policy == best
        assert len([one for one in tuned.candidates if one.measurement]) > 1
    with tuning(device({"inductor": 0.5}), AMPLE) as tuned:
        assert [one.name for one in tuned.candidates] == [best], "what was not decided is kept, and not measured again"


def test_where_nothing_is_decided_what_was_kept_runs_on(own_choices: Path) -> None:
    with tuning(LikeCuda({"library": 0.1}), QUICK) as tuned:
        kept = tuned.best.schedule.policy
    (before,) = [file.read_bytes() for file in own_choices.iterdir()]
    with tuning(Noisy({"library": 0.1}), QUICK, measure_single=True) as tuned:
        assert len(tuned.candidates) > 2, "tried again for the report"
        assert tuned.best.schedule.policy == kept
    assert [file.read_bytes() for file in own_choices.iterdir()] == [before]
