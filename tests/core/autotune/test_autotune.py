"""The measured choice, on a device whose times are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.autotune.autotune import _LESS, Tuned, eager_peak, tune
from nimble_core.ir.candidates import Candidate, simplicity
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.live_bytes import serial_peak
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.saved_plan import Plan, load_plan
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, ScheduleError
from nimble_core.validation.eager_cases import eager_cases
from tests.support.models import Wide


class Watched(FakeDevice):
    """Keeps count of what is open; engines of some policies can be made wrong, large or impossible."""

    def __init__(self, *args: Any, wrong: str = "", impossible: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrong, self.impossible = wrong, impossible
        self.open: list[str] = []
        self.captured: list[str] = []

    def capture(self, recording: Any, schedule: Schedule, *args: Any) -> Any:
        if self.impossible and schedule.policy.startswith(self.impossible):
            raise DeviceError("out of memory")
        made = super().capture(recording, schedule, *args)
        self.open.append(schedule.policy)
        self.captured.append(schedule.policy)
        run, close = made.run, made.close

        def closed() -> None:
            self.open.remove(schedule.policy)
            close()

        made.close = closed  # type: ignore[method-assign]
        if self.wrong and schedule.policy.startswith(self.wrong):
            made.run = lambda inputs, static=False: [out + 1 for out in run(inputs)]  # type: ignore[method-assign]
        return made


def recorded(device: FakeDevice, model: nn.Module | None = None) -> Recorded:
    torch.manual_seed(0)
    model, x = model or Wide().eval(), torch.randn(2, 16)
    return record_static(device, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())


@contextmanager
def tuning(
    device: Watched, options: Options = Options(), model: nn.Module | None = None, **kwargs: Any
) -> Iterator[Tuned]:
    found = recorded(device, *(() if model is None else (model,)))
    with state_kept(found):
        tuned = tune(device, found, options, step=Stopwatch(), **kwargs)
    yield tuned
    assert sorted(device.open) == sorted(one.schedule.policy for one in tuned.executables.values())
    tuned.close()
    assert not device.open


WAITS_COST_MORE = DeviceModel("waits", sync_ns=1e6)


def test_streams_are_chosen_where_they_pay() -> None:
    with tuning(Watched(1000.0)) as tuned:
        assert tuned.best.schedule.streams > 1
        chosen = [one for one in tuned.candidates if one.chosen]
        assert [one.name for one in chosen] == [tuned.best.schedule.policy]
        assert all(one.check and one.check.passed for one in tuned.candidates if one.measurement)
        assert {"single", tuned.best.schedule.policy} == set(tuned.executables)
        assert tuned.costs
        assert set(tuned.costs.ns) == {1000.0}


def test_one_stream_is_chosen_where_they_do_not() -> None:
    with tuning(Watched(1000.0, model=WAITS_COST_MORE)) as tuned:
        assert tuned.best.schedule.policy == "single"
        fastest = min(one.measurement.median_ns for one in tuned.candidates if one.measurement)
        (single,) = [one for one in tuned.candidates if one.name == "single"]
        assert single.measurement
        assert single.measurement.median_ns == fastest
        assert single.chosen
        assert len(tuned.executables) == 2, "the fastest of several streams is kept beside it"


def test_a_tie_goes_to_fewer_streams() -> None:
    with tuning(Watched(0.0)) as tuned:
        assert tuned.best.schedule.policy == "single"


class Broad(nn.Module):
    """Branches of 8 KB results that can all run at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [(x[:, at : at + 1].expand(2, 1 << 10) * at).relu().sum() for at in range(8)]
        return torch.stack(branches).sum() + x


class Fed(nn.Module):
    """A chain that reads another 8 KB result at each of its steps: these may be made early, but need not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chain = x
        for at in range(10):
            fed = x[:, at : at + 1].expand(2, 1 << 10) * at
            chain = chain.tanh().exp().sin() + (fed * chain[:, :1]).mean()
        return chain


@pytest.mark.parametrize(("model", "lean"), [(Broad(), False), (Fed(), True)])
def test_memory_has_to_be_worth_it(model: nn.Module, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    device = Watched(1000.0)
    found = recorded(device, model)
    with state_kept(found):
        tuned = tune(device, found, Options(policy="auto"), step=Stopwatch())
    named = {one.name: one for one in tuned.candidates}
    (other,) = [one for name, one in named.items() if name.endswith("less memory")]
    heavy, single = named[other.name.removesuffix(", less memory")], named["single"]
    assert heavy.nbytes > 1.2 * single.nbytes + (4 << 10)
    assert other.nbytes <= 1.2 * single.nbytes if lean else other.nbytes < heavy.nbytes
    assert device.captured.count(other.name) == (1 if lean else len(_LESS))
    assert other.check is not None
    assert other.check.passed
    assert (other if lean else heavy).chosen
    assert tuned.best.schedule.policy == (other if lean else heavy).name
    tuned.close()
    assert not device.open


@pytest.mark.parametrize("worth", [1.0, 100.0])
def test_how_much_faster_is_the_callers_to_say(worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    with tuning(Watched(1000.0), Options(policy="auto"), model=Broad(), worth=worth) as tuned:
        named = {one.name: one for one in tuned.candidates}
        (lean,) = [name for name in named if name.endswith("less memory")]
        heavy = lean.removesuffix(", less memory")
        assert (
            named[heavy].measurement.median_ns
            < named[lean].measurement.median_ns
            < 100 * named[heavy].measurement.median_ns
        )
        assert tuned.best.schedule.policy == heavy if worth == 1.0 else tuned.best.nbytes < named[heavy].nbytes


class Many(nn.Module):
    """Sixteen branches of several 8 KB results: the more memory, the more of them run at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [(x[:, at : at + 1].expand(2, 1 << 10) * at).relu().sin().exp().tanh().sum() for at in range(16)]
        return torch.stack(branches).sum() + x


def test_the_more_speed_has_to_be_worth_the_less_memory_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    held, tried = [], []
    for worth in (1.1, 2.0, 3.0, 100.0):
        device = Watched(1000.0)
        with tuning(device, Options(policy="auto"), model=Many(), worth=worth) as tuned:
            held.append(tuned.best.nbytes)
            tried.append(sum(name.endswith("less memory") for name in device.captured))
            (chosen,) = [one for one in tuned.candidates if one.chosen]
            assert chosen.nbytes == tuned.best.nbytes
            assert len([check for check in tuned.checks if check.name == chosen.name]) == 1
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4, "what lies between all and as little as can be is tried, too"
    assert tried[0] == len(_LESS)
    assert min(tried) < len(_LESS), "until one is kept"


@pytest.mark.parametrize("rate", [0.0, 1e3])
def test_a_little_too_much_need_be_worth_only_little(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    monkeypatch.setattr("nimble_core.autotune.choice._RATE", rate)
    with tuning(Watched(1000.0), Options(policy="auto"), model=Broad(), worth=100.0) as tuned:
        heavy = max(tuned.candidates, key=lambda one: one.nbytes)
        assert (tuned.best.nbytes == heavy.nbytes) == (rate == 0.0)


class Owning(Broad):
    """The same, beside a parameter that is larger than all that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1 << 18))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.sum()


def test_what_is_small_beside_the_parameters_is_not_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    device = Watched(1000.0)
    found = recorded(device, Owning())
    with state_kept(found):
        tuned = tune(device, found, Options(policy="auto"), step=Stopwatch())
    named = {one.name: one for one in tuned.candidates}
    assert max(one.nbytes for one in named.values()) > 1.2 * named["single"].nbytes + (4 << 10)
    assert not any("less memory" in name for name in named)
    tuned.close()


@pytest.mark.parametrize(
    ("eager", "beside", "much"), [(None, 0, True), (1 << 30, 0, False), (1 << 30, 1 << 31, True)], ids=str
)
def test_much_memory_is_more_than_eager_holds(
    eager: int | None, beside: int, much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    device = Watched(1000.0)
    found = recorded(device, Broad())
    with state_kept(found):
        options = Options(policy="auto")
        tuned = tune(device, found, options, step=Stopwatch(), eager_nbytes=eager, beside_nbytes=beside)
    assert any("less memory" in one.name for one in tuned.candidates) is much
    tuned.close()


def test_eager_holds_what_its_calls_need_one_after_the_other() -> None:
    found = recorded(Watched(1000.0), Broad())
    assert eager_peak(Watched(1000.0), found) == serial_peak(found.recording.program)


def test_a_limit_of_the_users_is_not_tightened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.autotune.choice._HEAVY_NBYTES", 4 << 10)
    device = Watched(1000.0)
    found = recorded(device, Fed())
    with state_kept(found):
        tuned = tune(device, found, Options(policy="auto", memory_limit=1 << 30), step=Stopwatch())
    assert not any("less memory" in one.name for one in tuned.candidates)
    tuned.close()


def test_the_most_promising_are_captured() -> None:
    device = Watched(1000.0)
    with tuning(device) as tuned:
        left = [one for one in tuned.candidates if "simulated slower" in one.note]
        taken = [one for one in tuned.candidates if one.measurement and one.name != "single"]
        assert len(taken) == 1
        assert all(one.simulated_ns >= taken[0].simulated_ns for one in left)
        assert all(one.measurement is None and not one.nbytes for one in left)


def test_full_tuning_tries_caps_too() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="full")) as tuned:
        names = {one.name for one in tuned.candidates}
        assert "contention, 2 streams" in names
        assert set(device.captured) == names
        assert all(one.measurement for one in tuned.candidates)
        plans = [(one.streams, one.syncs) for one in tuned.candidates if one.name.endswith("2 streams")]
        assert all(streams <= 2 for streams, _ in plans)


def test_nothing_is_measured_without_tuning() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="off")) as tuned:
        assert device.captured == ["nimble"]
        assert tuned.best.schedule.policy == "nimble"
        assert tuned.observed is None
        assert not tuned.checks


def test_the_budget_bounds_the_candidates() -> None:
    device = Watched(1000.0)
    with tuning(device, Options(tune="full", budget_s=0.0)) as tuned:
        assert len(device.captured) == 2, "one stream, and one to compare it with"
        assert any("budget" in one.note for one in tuned.candidates)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_named_policy_is_taken_at_its_word(policy: str) -> None:
    device = Watched(1000.0, model=WAITS_COST_MORE)
    with tuning(device, Options(policy=policy)) as tuned:
        assert tuned.best.schedule.policy == policy
        assert set(device.captured) == {"single", policy}


def test_a_function_is_a_policy() -> None:
    def mine(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy="mine")

    with tuning(Watched(1000.0), Options(policy=mine)) as tuned:
        assert tuned.best.schedule.policy == "mine"
    with pytest.raises(InputError, match="returned a int"), tuning(Watched(), Options(policy=lambda graph, costs: 3)):
        pass


def test_wrong_outputs_win_nothing() -> None:
    device = Watched(1000.0, wrong="nimble")
    with tuning(device, Options(tune="full")) as tuned:
        wrong = [one for one in tuned.candidates if one.name.startswith("nimble")]
        assert wrong
        assert all(one.check and one.check.differs and "differ" in one.note for one in wrong)
        assert not tuned.best.schedule.policy.startswith("nimble")


def test_a_wrong_single_stream_is_said_and_refused_under_strict() -> None:
    with tuning(Watched(1000.0, wrong="single")) as tuned:
        assert "not what eager computes" in tuned.wrong
        assert tuned.best.schedule.policy != "single"
    device = Watched(1000.0, wrong="single")
    with pytest.raises(CaptureError, match="not what eager computes"), tuning(device, Options(strict=True)):
        pass
    assert not device.open


def test_a_candidate_that_does_not_fit_is_left_out() -> None:
    device = Watched(1000.0, impossible="contention")
    with tuning(device, Options(tune="full")) as tuned:
        assert any("out of memory" in one.note for one in tuned.candidates)
        assert any("contention: left out" in note for note in tuned.notes)
    with pytest.raises(DeviceError), tuning(Watched(impossible="single")):
        pass
    device = Watched(impossible="nimble")
    with pytest.raises(DeviceError), tuning(device, Options(policy="nimble")):
        pass
    assert not device.open


def test_an_interruption_closes_everything() -> None:
    class Interrupted(Watched):
        def clock_ns(self) -> float:
            if len(self.captured) > 1:
                raise KeyboardInterrupt
            return super().clock_ns()

    device = Interrupted(1000.0)
    with pytest.raises(KeyboardInterrupt), tuning(device):
        pass
    assert not device.open


def test_eager_cases_leave_no_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(self.norm(x), 0.5, True)

    model = Counting().train()
    found = recorded(FakeDevice(), model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = eager_cases(found), eager_cases(found)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    for (a, out), (b, again) in zip(first.eager, second.eager, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(out[0], again[0])
    assert not torch.equal(first.eager[0][0][0], first.eager[1][0][0])


# -- whose kernels --------------------------------------------------------------------------------------------------


class LikeCuda(Watched):
    """A device on which ``fuse="auto"`` tries everything; each call of some kernels takes longer."""

    kind = "cuda"

    def __init__(self, slow: dict[str, float] | None = None, **kwargs: Any) -> None:
        super().__init__(1000.0, **kwargs)
        self.slow = slow or {}
        self.recorded: list[str] = []

    def record(self, *args: Any, **kwargs: Any) -> Any:
        recording = super().record(*args, **kwargs)
        self.recorded.append(recording.program.fuse)
        return recording

    def costs(self, program: Any) -> Any:
        found = super().costs(program)
        return replace(found, ns=tuple(ns * self.slow.get(program.fuse, 1.0) for ns in found.ns))


@pytest.fixture
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No choices of other tests."""
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    return tmp_path


AMPLE = Options(budget_s=500.0)
COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def by_name(tuned: Tuned) -> dict[str, Any]:
    return {one.name: one for one in tuned.candidates}


@COMPILES
@pytest.mark.usefixtures("own_choices")
def test_all_kernels_are_tried_and_the_fastest_that_are_right_win() -> None:
    device = LikeCuda({"library": 0.5, "inductor": 0.1})
    with tuning(device, AMPLE) as tuned:
        assert device.recorded == ["none", "none", "library", "inductor"]
        assert tuned.recorded.recording.program.fuse == "inductor"
        found = by_name(tuned)
        assert {"single", "library, single", "inductor, single"} <= found.keys()
        for name, one in found.items():
            assert name.startswith(f"{one.fuse}, ") or (one.fuse == "none" and "library" not in name)
            assert (one.fuse_s > 0) == (one.fuse != "none")
            if one.measurement:
                assert one.check
                assert one.check.passed
                assert one.capture_s > 0
            else:
                assert one.note
        (chosen,) = [one for one in tuned.candidates if one.chosen]
        assert chosen.fuse == "inductor"
        assert chosen.measurement.median_ns == min(
            one.measurement.median_ns for one in found.values() if one.measurement
        )
        assert {"single", "inductor, single", chosen.name} <= set(tuned.executables)
        assert tuned.recorded.eager is not None
        assert tuned.costs
        assert len(tuned.costs.ns) == len(tuned.recorded.recording.program.calls)


@COMPILES
@pytest.mark.usefixtures("own_choices")
def test_kernels_that_are_hopeless_are_tried_on_one_stream_only() -> None:
    device = LikeCuda({"library": 100.0, "inductor": 100.0})
    with tuning(device, AMPLE) as tuned:
        assert tuned.recorded.recording.program.fuse == "none"
        assert "library, single" in device.captured
        assert not any(
            name.startswith(("library, ", "inductor, ")) and "single" not in name for name in device.captured
        )
        left = [one for one in tuned.candidates if "other kernels are faster" in one.note]
        assert all(one.fuse in ("library", "inductor") for one in left)


@pytest.mark.usefixtures("own_choices")
def test_a_budget_too_small_to_compile_in() -> None:
    device = LikeCuda({"library": 0.1})
    with tuning(device, Options(budget_s=1.0)) as tuned:
        assert "inductor" not in device.recorded
        (left,) = [one for one in tuned.candidates if one.fuse == "inductor"]
        assert left.name == "inductor"
        assert left.note.startswith("not compiled: about ")
        assert "budget_s=1" in left.note
        assert f"inductor: {left.note}" in tuned.notes
        assert tuned.recorded.recording.program.fuse == "library"


@pytest.mark.usefixtures("own_choices")
def test_nothing_is_rewritten_without_tuning_or_on_the_host() -> None:
    device = LikeCuda()
    with tuning(device, Options(tune="off")) as tuned:
        assert set(device.recorded) == {"none"}
        assert tuned.recorded.recording.program.fuse == "none"
    host = Watched(1000.0)
    with tuning(host, Options()) as tuned:
        assert all(one.fuse == "none" for one in tuned.candidates)


@COMPILES
def test_a_choice_is_recalled(own_choices: Path) -> None:
    options = Options(budget_s=400.0)
    first = LikeCuda({"library": 0.1, "inductor": 0.5})
    with tuning(first, options) as tuned:
        schedule, program = tuned.best.schedule, tuned.recorded.recording.program
        assert program.fuse == "library"
    (file,) = own_choices.iterdir()
    before = file.read_bytes()
    second = LikeCuda({"library": 0.1, "inductor": 0.5})
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
        assert any("chosen by an earlier process" in note for note in tuned.notes)
        assert any(str(own_choices) in note for note in tuned.notes)
    assert file.read_bytes() == before
    with tuning(LikeCuda({"library": 0.1}), options, measure_single=True) as tuned:
        assert len(tuned.candidates) > 1, "a report shows all that can be chosen from"


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize(
    "other",
    [{"budget_s": 1.5}, {"max_streams": 3}, {"memory_limit": 1 << 30}, {"tune": "full"}],
    ids=lambda one: next(iter(one)),
)
def test_a_choice_under_other_conditions_is_not(other: dict[str, Any]) -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda(), options):
        pass
    with tuning(LikeCuda(), replace(options, **other)) as tuned:
        assert not any("earlier process" in note for note in tuned.notes)
    with tuning(LikeCuda(), options) as tuned:
        assert any("earlier process" in note for note in tuned.notes)


@pytest.mark.usefixtures("own_choices")
def test_a_choice_under_other_precision_is_not() -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda(), options):
        pass
    torch.set_float32_matmul_precision("high")
    try:
        with tuning(LikeCuda(), options) as tuned:
            assert not any("earlier process" in note for note in tuned.notes)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_policies_of_the_users_own_are_not_kept(own_choices: Path) -> None:
    def mine(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy="mine")

    for policy in (mine, "nimble"):
        with tuning(LikeCuda(), Options(policy=policy, budget_s=1.0)):
            pass
    assert not list(own_choices.iterdir())


def spoiled(plan: Plan) -> Plan:
    return replace(plan, fingerprint="0" * 64)


def racing(plan: Plan) -> Plan:
    schedule = plan.schedule
    order = (*reversed(schedule.order),)
    return replace(plan, schedule=replace(schedule, order=order))


@pytest.mark.parametrize("spoil", [spoiled, racing])
def test_a_choice_that_does_not_fit_any_more_is_made_again(own_choices: Path, spoil: Any) -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options):
        pass
    (file,) = own_choices.iterdir()
    good = file.read_bytes()
    spoil(load_plan(file)).save(file)
    device = LikeCuda({"library": 0.1})
    with tuning(device, options) as tuned:
        assert any("could not be made again" in note for note in tuned.notes)
        assert tuned.recorded.recording.program.fuse == "library"
        assert len(tuned.candidates) > 1
    assert file.read_bytes() == good, "the next process finds what was chosen now"


@pytest.mark.usefixtures("own_choices")
def test_a_choice_that_is_wrong_now_is_made_again() -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options):
        pass
    with tuning(LikeCuda({"library": 0.1}, wrong="library"), options) as tuned:
        assert tuned.recorded.recording.program.fuse == "none"
        assert any(note.startswith("library: left out: outputs differ") for note in tuned.notes)


@pytest.mark.usefixtures("own_choices")
def test_a_choice_that_cannot_be_captured_now_is_made_again() -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options):
        pass
    with tuning(LikeCuda({"library": 0.1}, impossible="library"), options) as tuned:
        assert tuned.recorded.recording.program.fuse == "none"
        assert any("library, single: left out: out of memory" in note for note in tuned.notes)


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize("measure_single", [False, True])
def test_wrong_kernels_win_nothing(fuse: Any, measure_single: bool) -> None:
    device = LikeCuda({"library": 0.001}, wrong="library")
    with tuning(device, Options(fuse=fuse, budget_s=1.0), measure_single=measure_single) as tuned:
        wrong = [one for one in tuned.candidates if one.fuse == "library" and one.check]
        assert wrong
        assert all(one.check.differs and one.note == one.check.reason for one in wrong)
        (chosen,) = [one for one in tuned.candidates if one.chosen]
        assert chosen.fuse == "none"
        assert chosen.streams > 1, "eager's own kernels are planned as without the option"
        assert any(note.startswith("library: left out: ") for note in tuned.notes)
        assert not tuned.wrong
        assert len({check.name for check in tuned.checks}) == len(tuned.checks)


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("policy", ["nimble", "single"])
def test_a_named_policy_is_kept_when_the_kernels_are_not(policy: str) -> None:
    device = LikeCuda(wrong="library", model=WAITS_COST_MORE)
    with tuning(device, Options(fuse="library", policy=policy)) as tuned:
        assert tuned.best.schedule.policy == policy


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("impossible", ["library, single", "library"])
def test_kernels_that_do_not_fit_are_left_out(impossible: str) -> None:
    for fuse in ("auto", "library"):
        device = LikeCuda(impossible=impossible)
        with tuning(device, Options(fuse=fuse, budget_s=1.0)) as tuned:
            assert tuned.recorded.recording.program.fuse == "none"
            assert any("library, single: left out: out of memory" in note for note in tuned.notes)


@pytest.mark.usefixtures("own_choices")
def test_a_named_policy_with_every_kind_of_kernels() -> None:
    device = LikeCuda({"library": 0.1})
    with tuning(device, Options(policy="nimble", budget_s=1.0)) as tuned:
        assert tuned.best.schedule.policy == "library, nimble"
        assert {"single", "nimble", "library, single", "library, nimble"} == set(device.captured)


@pytest.mark.usefixtures("own_choices")
def test_no_budget_at_all() -> None:
    with tuning(LikeCuda(), Options(budget_s=0.0)) as tuned:
        notes = {one.name: one.note for one in tuned.candidates if one.fuse != "none"}
        assert notes["library"].startswith("not rewritten: about 0 s expected, 0 s left")
        assert notes["inductor"].startswith("not compiled: about ")
        assert tuned.recorded.recording.program.fuse == "none"
    with tuning(LikeCuda(), Options(fuse="library", budget_s=0.0), measure_single=True) as tuned:
        assert tuned.recorded.recording.program.fuse == "library", "what is asked for by name is made whatever it takes"


def only_eagers(graph: Any, costs: Any) -> Schedule:
    """A policy that cannot do with fewer calls than eager makes."""
    if graph.size < 10:
        raise ValueError("made for 10 calls\nor more")
    return replace(POLICIES["nimble"](graph, costs), policy="mine")


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_that_a_policy_cannot_plan_are_left_out(fuse: Any, tune: Any) -> None:
    device = LikeCuda({"library": 0.1})
    options = Options(fuse=fuse, policy=only_eagers, tune=tune, budget_s=1.0)
    with tuning(device, options) as tuned:
        assert tuned.recorded.recording.program.fuse == "none"
        assert tuned.best.schedule.policy == "mine"
        if "library" in device.recorded:
            assert "library: left out: ValueError: made for 10 calls" in tuned.notes
            left = [one for one in tuned.candidates if one.fuse == "library"]
            assert left
            assert all("ValueError" in one.note and not one.measurement for one in left)
    if "library" in device.recorded:
        with pytest.raises(ValueError, match="made for 10"), tuning(LikeCuda(), replace(options, strict=True)):
            pass


@pytest.mark.usefixtures("own_choices")
def test_a_policy_that_cannot_plan_eagers_kernels_is_an_error() -> None:
    def never(graph: Any, costs: Any) -> Schedule:
        raise ValueError("not for any")

    for fuse in ("auto", "none", "library"):
        device = LikeCuda()
        with pytest.raises(ValueError, match="not for any"):
            tune(device, recorded(device), Options(fuse=fuse, policy=never, budget_s=1.0), step=Stopwatch())
        assert not device.open


@pytest.mark.parametrize("fuse", ["auto", "library"])
@pytest.mark.parametrize(
    ("place", "error", "said", "strict"),
    [
        ("fusing.attributed", KeyError("x"), "KeyError: 'x'", True),
        ("fusing.build_graph", RuntimeError("no graph"), "RuntimeError: no graph", True),
        ("fusing.lift", InputError("not such a model"), "not such a model", True),
        ("fusing.lift", ScheduleError("a race"), "a race", True),
        ("fusing.lift", CaptureError("cannot be issued", where="here"), "cannot be issued (here)", False),
        ("tuning.observe", DeviceError("the device is gone"), "the device is gone", False),
        ("tuning.observe", AssertionError("wrong"), "AssertionError: wrong", True),
        ("tuning.observe", AssertionError(), "AssertionError", True),
    ],
)
def test_whatever_goes_wrong_with_other_kernels_leaves_them_out(
    fuse: Any,
    place: str,
    error: Exception,
    said: str,
    strict: bool,
    own_choices: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is raised under ``strict`` where it is no refusal that kernels may meet."""
    from nimble_core.autotune import autotune
    from nimble_core.compiler import pipeline

    module, name = {"fusing": pipeline, "tuning": autotune}[place.partition(".")[0]], place.partition(".")[2]
    real = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        variant = args[1] if name == "observe" else None
        if isinstance(variant, Recorded) and variant.recording.program.fuse == "none":
            return real(*args, **kwargs)
        raise error

    monkeypatch.setattr(module, name, failing)
    options = Options(fuse=fuse, budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options) as tuned:
        assert tuned.recorded.recording.program.fuse == "none"
        assert f"library: left out: {said}" in tuned.notes
        assert tuned.best.schedule.streams > 1
        assert all(one.note == f"left out: {said}" for one in tuned.candidates if one.fuse == "library")
        assert any(one.fuse == "library" for one in tuned.candidates)
    for choice in own_choices.iterdir():
        choice.unlink()
    device = LikeCuda()
    found = recorded(device)
    with state_kept(found):
        if strict:
            with pytest.raises(type(error)):
                tune(device, found, replace(options, strict=True), step=Stopwatch())
        else:
            tune(device, found, replace(options, strict=True), step=Stopwatch()).close()
    assert not device.open


@pytest.mark.usefixtures("own_choices")
def test_whatever_goes_wrong_with_an_earlier_choice_lets_it_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from nimble_core.autotune import autotune

    options = Options(budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options):
        pass

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("gone")

    monkeypatch.setattr(autotune, "follow", failing)
    with tuning(LikeCuda({"library": 0.1}), options) as tuned:
        assert "what an earlier process chose could not be made again: KeyError: 'gone'" in tuned.notes
        assert tuned.recorded.recording.program.fuse == "library"


@pytest.mark.usefixtures("own_choices")
def test_kernels_that_cannot_be_checked_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from nimble_core.validation.judge import Judge

    real = Judge.judged

    def failing(self: Judge, name: str, *args: Any) -> Any:
        if name.startswith("library"):
            raise IndexError("no such output")
        return real(self, name, *args)

    monkeypatch.setattr(Judge, "judged", failing)
    with tuning(LikeCuda({"library": 0.1}), Options(budget_s=1.0)) as tuned:
        assert "library, single: left out: IndexError: no such output" in tuned.notes
        assert tuned.recorded.recording.program.fuse == "none"


@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("strict", [False, True])
def test_what_goes_wrong_with_eagers_kernels_is_not_put_down_to_others(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are judged when all is captured, and an error then is one, even if it would not come again."""
    from nimble_core.validation.judge import Judge

    real, judged = Judge.judged, []

    def failing(self: Judge, name: str, *args: Any) -> Any:
        judged.append(name)
        if judged.count("single") == 1 and name == "single":
            raise IndexError("no such output")
        return real(self, name, *args)

    monkeypatch.setattr(Judge, "judged", failing)
    device = LikeCuda({"library": 0.1})
    with pytest.raises(IndexError), tuning(device, Options(budget_s=1.0, strict=strict)):
        pass
    assert judged[0] == "library, single"
    assert judged.count("single") == 1
    assert not device.open


def test_a_policy_may_have_the_name_of_eagers_kernels() -> None:
    """Where its plan does not fit, that one is left out, and not all that runs eager's kernels."""

    def none(graph: Any, costs: Any) -> Schedule:
        return replace(POLICIES["nimble"](graph, costs), policy="none")

    with tuning(Watched(impossible="none"), Options(policy=none), measure_single=True) as tuned:
        assert [one.note for one in tuned.candidates] == ["", "left out: out of memory"]
        assert list(tuned.executables) == ["single"]


# -- what nothing decides ---------------------------------------------------------------------------------------------


class Noisy(LikeCuda):
    """A machine on which every call takes up to a hundred times as long as it should."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draw = random.Random(5)

    def synchronize(self) -> None:
        self.advance(10 ** self.draw.uniform(4, 7))


class NoisyHost(Noisy):
    kind = "cpu"


@COMPILES
def test_where_nothing_is_decided_compiled_kernels_run_on_one_stream(own_choices: Path) -> None:
    with tuning(Noisy({"inductor": 0.5}), AMPLE) as tuned:
        assert tuned.best.schedule.policy == "inductor, single"
        assert len([one for one in tuned.candidates if one.measurement]) > 2
    assert not list(own_choices.iterdir()), "what was not decided is not kept"


@pytest.mark.usefixtures("own_choices")
def test_where_nothing_is_decided_the_host_runs_one_stream() -> None:
    with tuning(NoisyHost()) as tuned:
        assert tuned.best.schedule.policy == "single"
        assert len(tuned.executables) == 2


def test_where_nothing_is_decided_what_was_kept_runs_on(own_choices: Path) -> None:
    options = Options(budget_s=1.0)
    with tuning(LikeCuda({"library": 0.1}), options) as tuned:
        kept = tuned.best.schedule.policy
    (before,) = [file.read_bytes() for file in own_choices.iterdir()]
    with tuning(Noisy({"library": 0.1}), options, measure_single=True) as tuned:
        assert len(tuned.candidates) > 2, "tried again for the report"
        assert tuned.best.schedule.policy == kept
    assert [file.read_bytes() for file in own_choices.iterdir()] == [before]


@pytest.mark.parametrize(
    ("names", "simplest"),
    [
        (["inductor, nimble", "inductor, single", "single"], "single"),
        (["inductor, nimble", "nimble", "inductor, single"], "inductor, single"),
        (["inductor, nimble, 4 streams", "nimble", "library, nimble"], "inductor, nimble, 4 streams"),
        (["inductor, nimble", "library, nimble, 2 streams"], "library, nimble, 2 streams"),
    ],
)
def test_the_simplest_comes_first(names: list[str], simplest: str) -> None:
    def made(name: str) -> Candidate:
        fuse = name.partition(",")[0] if name.startswith(("inductor", "library")) else "none"
        streams = 1 if name.endswith("single") else int(name.split()[-2]) if name.endswith("streams") else 5
        return Candidate(name, streams, streams - 1, fuse=fuse)

    assert min(map(made, names), key=simplicity).name == simplest
