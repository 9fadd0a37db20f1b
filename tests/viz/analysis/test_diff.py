"""Differences of reports: nothing where nothing changed, the opposite when swapped, and what was put in is found."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nimble_core.ir.call_graph import graph_from_edges
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import ACROSS, Measurement, summarize
from nimble_core.ir.program import Call, Origin
from nimble_core.ir.schedule import Schedule
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.diff import Change, CostChange, SpeedChange, beside_eager, environment_changes, processes
from nimble_viz.render.report import Report
from nimble_viz.render.verdicts import Difference, diff, headline
from nimble_viz.report.data import HostSync
from tests.support.sample_reports import RENDERED, fused_report, sample_report, training_report


def call(operator: str = "aten.relu.default", module: str = "", line: int = 1, index: int = 0) -> Call:
    """A call that touches nothing."""
    return Call(index, operator, (), (), origins=(Origin(operator, module, "net.py", line),))


def numbered(calls: list[Call]) -> tuple[Call, ...]:
    return tuple(replace(one, index=k) for k, one in enumerate(calls))


def report_of(calls: list[Call], *, streams: list[int] | None = None, costs: list[float] | None = None) -> Report:
    """A report of these calls without edges, each on its stream, with a spread of 1 ns."""
    base, size = sample_report(0), len(calls)
    lanes = tuple(streams or [0] * size)
    plan = Schedule("nimble", lanes, tuple(range(size)), ())
    return replace(
        base,
        program=replace(base.program, calls=numbered(calls)),
        graph=graph_from_edges(size, []),
        costs=Costs(tuple(costs or [1000.0] * size), "given", (1.0,) * size),
        schedules=(plan,),
        chosen="nimble",
        timelines=(),
        overhead=None,
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Few kinds of calls, often repeated, on up to three streams."""
    kinds = st.builds(call, st.sampled_from(["a.mm.default", "a.relu.default"]), st.sampled_from("xy"),
                      st.integers(1, 2))  # fmt: skip
    calls = draw(st.lists(kinds, max_size=10))
    lanes = [draw(st.integers(0, 2)) for _ in calls]
    order = sorted(set(lanes))
    costs = [draw(st.sampled_from([900.0, 1000.0, 2000.0])) for _ in calls]
    return replace(
        report_of(calls, streams=[order.index(lane) for lane in lanes], costs=costs),
        measurements=tuple(draw(st.permutations([taken("eager", 100.0), taken("nimble", draw(times))]))),
        batch=draw(st.integers(1, 2)),
    )


times = st.sampled_from([50.0, 51.0, 100.0])


def taken(name: str, ns: float, spread: float = 0.02, samples: int = 40) -> Measurement:
    draw = random.Random(f"{name} {ns}")
    return summarize(name, [ns * (1 + spread * draw.uniform(-1, 1)) for _ in range(samples)])


@pytest.mark.parametrize("case", RENDERED)
def test_a_report_does_not_differ_from_itself(case: str) -> None:
    report = RENDERED[case]()
    found = report.diff(report)
    assert found.empty
    assert found.matched == len(report.program.calls)
    assert "nothing else changed" in headline(found)


def said(found: Difference) -> dict[str, set[tuple[Any, ...]]]:
    """What ``found`` says, as values before and after, without the order of its rows."""
    return {
        "calls": {(one, None) for one in found.removed} | {(None, one) for one in found.added},
        "moved": {(one.old, one.new) for one in found.moved},
        "recosted": {((one.old, one.old_ns), (one.new, one.new_ns)) for one in found.recosted},
        "speeds": {((one.name, one.old_ns), (one.name, one.new_ns)) for one in found.speeds},
        **{key: {((one.name, one.old), (one.name, one.new)) for one in some} for key, some in found.changes.items()},
    }


@given(reports(), reports())
def test_swapped_it_says_the_opposite(old: Report, new: Report) -> None:
    there, back = said(diff(old, new)), said(diff(new, old))
    assert there == {key: {pair[::-1] for pair in pairs} for key, pairs in back.items()}


@given(reports(), reports())
def test_every_call_is_matched_or_named(old: Report, new: Report) -> None:
    found = diff(old, new)
    assert len(found.added) + found.matched == len(new.program.calls)
    assert len(found.removed) + found.matched == len(old.program.calls)


def test_streams_are_compared_without_their_numbers() -> None:
    calls = [call(module=str(k)) for k in range(6)]
    old = report_of(calls, streams=[0, 0, 0, 1, 1, 1])
    assert diff(old, report_of(calls, streams=[1, 1, 1, 0, 0, 0])).moved == ()
    (moved,) = diff(old, report_of(calls, streams=[1, 1, 0, 0, 0, 0])).moved
    assert (moved.new.index, moved.old_stream, moved.new_stream) == (2, 0, 1)
    (fresh,) = diff(old, report_of(calls, streams=[0, 0, 2, 1, 1, 1])).moved
    assert (fresh.new.index, fresh.old_stream, fresh.new_stream) == (2, 0, None)


@pytest.mark.parametrize(
    ("new_ns", "spread", "changed"), [(1099, 1, False), (1111, 1, True), (1111, 60, False), (880, 1, True)]
)
def test_costs_change_beyond_their_spread(new_ns: float, spread: float, changed: bool) -> None:
    old, new = report_of([call()], costs=[1000.0]), report_of([call()], costs=[new_ns])
    old, new = (replace(one, costs=replace(one.costs, spread_ns=(spread,))) for one in (old, new))
    first, second = old.program.calls[0], new.program.calls[0]
    wanted = (CostChange(first, second, 1000.0, new_ns, spread, spread),) if changed else ()
    assert diff(old, new).recosted == wanted


@pytest.mark.parametrize(
    ("old_ns", "new_ns", "spread", "samples", "verdict"),
    [
        (100, 50, 0.02, 40, "faster"),
        (50, 100, 0.02, 40, "slower"),
        (100, 99, 0.0, 40, "no difference"),
        (100, 100 / ACROSS, 0.02, 40, "undecided"),
        (100, 80, 0.5, 40, "undecided"),
        (100, 50, 0.0, 15, "undecided"),
        (0, 50, 0.0, 40, "undecided"),
    ],
)
def test_runs_are_faster_only_if_all_says_so(
    old_ns: float, new_ns: float, spread: float, samples: int, verdict: str
) -> None:
    old, new = taken("nimble", old_ns, spread, samples), taken("nimble", new_ns, spread, samples)
    assert SpeedChange("nimble", old_ns, new_ns, processes([new], [old]), None, None).verdict == verdict


sides = st.lists(st.lists(st.floats(1, 1e9), min_size=16, max_size=40), min_size=1, max_size=5)


@given(sides, sides)
def test_speeds_across_processes_mirror_and_lie_in_their_intervals(
    before: list[list[float]], after: list[list[float]]
) -> None:
    olds, news = [summarize("a", one) for one in before], [summarize("b", one) for one in after]
    there, back = processes(news, olds), processes(olds, news)
    assert (there.low, there.value, there.high) == pytest.approx((1 / back.high, 1 / back.value, 1 / back.low))
    assert there.low <= there.value <= there.high
    assert there.same == back.same == (1.02 if min(len(set(map(tuple, one))) for one in (before, after)) >= 3 else 1.05)


def test_three_processes_a_side_show_what_processes_differ_by() -> None:
    old, close, apart = (
        [taken("nimble", ns * (1 + by), 0.0) for by in (0.0, 0.002, 0.004)] for ns in (104.0, 103.0, 100.0)
    )
    assert processes(apart, old).verdict == "faster"
    assert processes(close, old).verdict == "no difference"
    assert processes(apart[:2], old).verdict == "no difference"  # two processes may differ by more than 1.04
    restless = [taken("nimble", ns) for ns in (90.0, 100.0, 112.0)]
    assert processes(restless, old).verdict == "undecided"
    few = [taken("nimble", ns, 0.0, samples=9) for ns in (100.0, 100.1, 100.2)]
    assert processes(few, few).verdict == "no difference"  # a process counts with its median, whatever it is made of
    assert processes([few[0]] * 3, [few[1]] * 3) == processes(few[:1], few[1:2])  # one process is one, however often


def test_several_reports_a_side_are_of_one_model() -> None:
    report = sample_report(12)
    assert diff([report] * 3, [report] * 4).empty
    assert diff([report] * 3, [report] * 3).chosen == replace(
        diff(report, report).chosen, ratio=processes([report.measurements[2]] * 3, [report.measurements[2]] * 3)
    )
    with pytest.raises(InputError, match="reports of one side differ: two different batches: 1 against 4"):
        diff(report, [report, replace(report, batch=4)])
    elsewhere = replace(report, environment=replace(report.environment, torch="1.0"))
    with pytest.raises(InputError, match="reports of one side are of different environments: torch"):
        diff(report, [report, elsewhere])


def test_that_two_models_are_compared_comes_before_any_number() -> None:
    old = sample_report(24)
    found = diff(old, replace(old, model="Other", batch=4, dtype="float32"))
    said = "two different models: SampleNet against Other, two different dtypes: float16 against float32"
    assert found.subjects == f"{said}, two different batches: 1 against 4"
    assert headline(found).startswith("Two different models: SampleNet against Other, ")


def test_the_chosen_runs_are_compared_whatever_their_names() -> None:
    report = sample_report()
    assert beside_eager([report], "nobody") is None
    found = diff(replace(report, chosen="single"), report)
    assert found.chosen is not None
    assert found.chosen.name == "single -> nimble"
    assert found.chosen.verdict == "faster"
    assert Change("chosen", "single", "nimble") in found.facts


def test_runs_of_one_report_only() -> None:
    report = sample_report()
    less = replace(report, measurements=report.measurements[:2])
    assert {one.name: one.verdict for one in diff(less, report).speeds} == {
        "eager": "no difference",
        "single": "no difference",
        "nimble": "added",
    }
    assert not diff(less, report).empty


def test_facts_counts_memory_checks_and_environment() -> None:
    old = sample_report()
    assert old.overhead is not None
    plan = replace(old.schedules[1], counts=replace(old.schedules[1].counts, planned=7))
    new = replace(
        old,
        model="OtherNet",
        schedules=(old.schedules[0], plan),
        memory=replace(old.memory, engines=(("single", 5), *old.memory.engines[1:])),
        checks=(replace(old.checks[0], passed=False, reason="differs"), *old.checks[1:]),
        overhead=replace(old.overhead, host_syncs=(*old.overhead.host_syncs, HostSync("aten::item", 3, 1.0, "a.py:1"))),
        environment=replace(old.environment, torch="9.9", settings=(), date="later", load=7.0),
    )
    found = diff(old, new)
    assert found.facts == (Change("model", "SampleNet", "OtherNet"),)
    assert found.plans == (Change("nimble: waits, planned", old.schedules[1].counts.planned, 7),)
    assert found.memory == (Change("single: held", 96_468_992, 5),)
    assert found.checks == (Change("single", "equal", "differs"),)
    assert found.host_syncs == (Change("aten::item at a.py:1", None, 3),)
    assert found.environment == (Change("torch", "2.11.0+cu130", "9.9"), Change("cudnn.allow_tf32", "True", None))
    assert found.environment == environment_changes(old.environment, new.environment)
    assert (found.added, found.moved, found.recosted) == ((), (), ())


def test_kernels_of_other_makers_are_compared_by_eager_calls() -> None:
    old, new = sample_report(60), fused_report(60)
    found = diff(old, new)
    assert (found.added, found.removed, found.matched) == ((), (), 60)
    assert "different makers" in found.notes[0]
    assert Change("kernels", "eager's own", "inductor") in found.facts
    assert not any((found.recosted, found.moved))


@pytest.mark.parametrize("case", [name for name in RENDERED if name != "ten thousand"])
def test_text_fits_and_is_harmless(case: str) -> None:
    for found in (diff(sample_report(24), RENDERED[case]()), diff(RENDERED[case](), sample_report(24))):
        text = found.to_text(60)
        assert max(cell_len(line) for line in text.splitlines()) <= 60
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
        assert json.loads(found.to_json())["empty"] is found.empty


def test_text_says_what_changed() -> None:
    old = sample_report(60)
    slow = tuple(summarize(one.name, [3 * ns for ns in one.samples_ns]) for one in old.measurements)
    fewer = replace(old.program, calls=old.program.calls[:-1])
    text = diff(old, replace(old, program=fewer, measurements=slow)).to_text(120)
    assert "The prepared run is 3.00x slower than the old one (" in text
    assert "1 call removed" in text
    assert re.search(r"Calls removed \(1\)\n  - .*, call 59\n", text)
    assert "Environment" not in text


def test_memory_that_was_not_measured_is_said_to_be() -> None:
    old = sample_report(20)
    memory = replace(old.memory, eager_peak=0, engines=(("single", 0), *old.memory.engines[1:]), planned=())
    found = diff(old, replace(old, memory=memory))
    assert re.search(r"eager's peak +50\.0 MiB -> unknown\n", found.to_text(120))
    assert Change("eager's peak", 52_428_800, None) in found.memory


def test_json_holds_no_infinity() -> None:
    few = replace(sample_report(12), measurements=(taken("eager", 10.0, samples=3), taken("nimble", 5.0, samples=3)))
    data = json.loads(diff(few, few).to_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["chosen"]["ratio"] == {"value": 1.0, "low": 0.0, "high": None}
    assert data["nimble_diff"] == 1


def test_training_and_inference_are_not_the_same_work() -> None:
    found = diff(sample_report(), training_report())
    assert found.unlike == "one is of training steps, the other of inference"
    assert (found.chosen, found.speeds) == (None, ())
    assert "No times are compared" in found.to_text(120)
