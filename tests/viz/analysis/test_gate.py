"""The gate: exact bounds, intervals that decide or do not, baselines, files for CI, exit codes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nimble_core.ir.measurement import summarize
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.gate import EXIT_CODES, Outcome, Rules, Verdict
from nimble_viz.cli.command import main
from nimble_viz.render.report import Report
from nimble_viz.render.verdicts import gate
from nimble_viz.report.data import HostSync, PeerResult
from tests.support.sample_reports import HOSTILE, RENDERED, fused_report, sample_report

ORDER: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")


def timed(report: Report, **runs: tuple[float, ...]) -> Report:
    """``report`` with these samples."""
    return replace(report, measurements=tuple(summarize(name, samples) for name, samples in runs.items()))


def verdict(report: Report, rule: str, rules: Rules | None = None, baseline: Report | None = None) -> Verdict:
    (found,) = (one for one in gate(report, rules, baseline=baseline).verdicts if one.rule == rule)
    return found


@pytest.mark.parametrize(
    ("eager", "ours", "outcome"),
    [
        ((200.0,) * 40, (100.0,) * 40, "pass"),
        ((100.0,) * 40, (100.0,) * 40, "pass"),
        ((99.0,) * 40, (100.0,) * 40, "fail"),
        ((96.0, 104.0) * 20, (100.0,) * 40, "inconclusive"),
        ((200.0,) * 15, (100.0,) * 15, "inconclusive"),
        ((50.0, 400.0) * 20, (100.0,) * 40, "inconclusive"),
        ((400.0, 900.0) * 20, (100.0,) * 40, "pass"),
        ((), (), "inconclusive"),
    ],
)
def test_the_least_speed(eager: tuple[float, ...], ours: tuple[float, ...], outcome: Outcome) -> None:
    report = timed(sample_report(), eager=eager, nimble=ours) if eager else replace(sample_report(), measurements=())
    assert verdict(report, "min_speedup", Rules(min_speedup=1.0)).outcome == outcome


def test_the_least_speed_over_another_run() -> None:
    report = timed(sample_report(), eager=(900.0,) * 40, single=(100.0,) * 40, nimble=(90.0,) * 40)
    found = verdict(report, "min_speedup", Rules(min_speedup=1.5, over="single"))
    assert (found.outcome, found.limit) == ("fail", 1.5)
    assert found.value == pytest.approx(100 / 90)
    assert "nimble replay over one-stream replay: 1.11x" in found.text
    assert verdict(report, "min_speedup", Rules(min_speedup=1, over="nobody")).text == "nobody was not measured"
    peers = replace(fused_report(), peers=(PeerResult("compile", 31.0),))
    told = verdict(peers, "min_speedup", Rules(min_speedup=0.1, over="compile")).text
    assert "over compile, whose outputs were not shown to be eager's: " in told


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=12),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_a_higher_bar_is_never_easier(samples: list[tuple[float, float]], one: float, other: float) -> None:
    eager, ours = zip(*samples, strict=True)
    report = timed(sample_report(12), eager=eager, nimble=ours)
    low, high = sorted((one, other))
    easy, hard = (verdict(report, "min_speedup", Rules(min_speedup=bar)).outcome for bar in (low, high))
    assert ORDER.index(easy) <= ORDER.index(hard)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_counts_are_exact(more: int) -> None:
    report = sample_report(60)
    assert report.overhead is not None
    waits = report.schedules[1].counts.emitted
    assert waits
    rules = Rules(max_syncs=waits + more, max_host_syncs=3 + more, max_calls=60 + more, max_bytes=171_966_464 + more)
    found = gate(report, rules)
    outcomes = {one.rule: one.outcome for one in found.verdicts if one.rule.startswith("max_")}
    assert outcomes == dict.fromkeys(
        ("max_syncs", "max_host_syncs", "max_calls", "max_bytes"), "pass" if more >= 0 else "fail"
    )
    assert found.exit_code == (0 if more >= 0 else 1)


def test_what_is_not_known_decides_nothing() -> None:
    report = sample_report(60, device="cpu", overhead=False)
    found = gate(report, Rules(max_bytes=1, max_host_syncs=1))
    assert [one.outcome for one in found.verdicts[-2:]] == ["inconclusive"] * 2
    assert found.exit_code == 3


def test_outputs_and_completeness_are_always_asked_for() -> None:
    report = sample_report()
    good = gate(report)
    assert [(one.rule, one.outcome) for one in good.verdicts] == [("complete", "pass"), ("equal_outputs", "pass")]
    wrong = replace(report.checks[0], passed=False, reason="differs from eager")
    assert gate(replace(report, checks=(wrong, report.checks[1]))).outcome == "fail"
    void = replace(report.checks[1], passed=False, reason="void: outputs do not move")
    assert gate(replace(report, checks=(report.checks[0], void))).outcome == "inconclusive"
    assert gate(replace(report, checks=())).outcome == "inconclusive"
    assert verdict(replace(report, complete=False), "complete").outcome == "inconclusive"


def slower(report: Report, **factors: float) -> Report:
    """``report`` with the samples of some runs multiplied."""
    runs = {one.name: tuple(ns * factors.get(one.name, 1) for ns in one.samples_ns) for one in report.measurements}
    return timed(report, **runs)


@pytest.mark.parametrize(
    ("factors", "outcome"),
    [
        ({}, "pass"),
        ({"nimble": 0.5}, "pass"),
        ({"nimble": 1.3}, "fail"),
        ({"nimble": 1.05}, "inconclusive"),
        ({"nimble": 1.3, "eager": 1.3}, "inconclusive"),
        ({"nimble": 1.6, "eager": 1.3}, "fail"),
    ],
)
def test_slower_than_the_baseline(factors: dict[str, float], outcome: Outcome) -> None:
    report = sample_report()
    found = verdict(slower(report, **factors), "max_slowdown", baseline=report)
    assert found.outcome == outcome
    assert ("this may be the machine" in found.text) == ("eager" in factors and outcome == "inconclusive")


def test_times_that_decide_nothing_come_with_a_remedy() -> None:
    report = sample_report()
    for factors, open_ in (({"nimble": 1.05}, True), ({}, False), ({"nimble": 1.3}, False)):
        found = gate(slower(report, **factors), baseline=report)
        assert [note.startswith("to do: give three or more reports a side") for note in found.notes] == [True] * open_
    assert "judge counts alone" in " ".join(gate(slower(report, nimble=1.05), baseline=report).to_text(100).split())
    unmeasured = replace(report, measurements=())
    assert gate(unmeasured, baseline=report).notes == ()
    assert gate(report, Rules(min_speedup=1.0)).notes == ()


def test_without_eager_a_slowdown_stands() -> None:
    report = timed(sample_report(), nimble=(100.0,) * 40)
    assert verdict(slower(report, nimble=2.0), "max_slowdown", baseline=report).outcome == "fail"


def test_each_of_several_reports_has_to_keep_to_the_rules() -> None:
    report = sample_report()
    late = replace(report, complete=False)
    assert verdict(report, "complete").outcome == "pass"
    assert gate([report, late, report]).outcome == "inconclusive"
    for wrong in ([], [report, None], "report"):
        with pytest.raises(InputError, match="expected a Report"):
            gate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="two different batches: 1 against 9"):
        gate([report, replace(report, batch=9)])


def test_no_count_may_exceed_the_baselines() -> None:
    old = sample_report(60)
    assert {one.outcome for one in gate(old, baseline=old).verdicts} == {"pass"}
    assert old.overhead is not None
    waits = replace(old.schedules[1], counts=replace(old.schedules[1].counts, emitted=99))
    new = replace(
        old,
        program=replace(old.program, calls=(*old.program.calls, replace(old.program.calls[0], index=60))),
        schedules=(old.schedules[0], waits),
        overhead=replace(old.overhead, host_syncs=(*old.overhead.host_syncs, HostSync("aten::item", 1, 1.0, ""))),
    )
    failed = [one.rule for one in gate(new, baseline=old).verdicts if one.outcome == "fail"]
    assert failed == ["baseline_calls", "baseline_syncs", "baseline_host_syncs"]
    assert gate(old, baseline=new).outcome == "pass"


def test_waits_of_another_plan_are_not_compared() -> None:
    old = sample_report(60)
    new = replace(old, schedules=(old.schedules[0],), chosen="single")
    assert verdict(new, "baseline_syncs", baseline=old).outcome == "inconclusive"
    assert verdict(fused_report(60), "baseline_calls", baseline=old).text == "eager calls: 60, in the baseline 60"


def test_another_environment_is_refused() -> None:
    report = sample_report()
    moved = replace(report, environment=replace(report.environment, torch="2.12", date="later", load=9.0))
    with pytest.raises(InputError, match=r"another environment(\n|.)*torch 2.12, now 2.11.0"):
        gate(report, baseline=moved)
    found = gate(report, baseline=moved, any_environment=True)
    assert found.outcome == "pass"
    assert "another environment" in found.notes[0]
    later = replace(moved, environment=replace(moved.environment, torch=report.environment.torch))
    assert gate(report, baseline=later).notes == ()


@pytest.mark.parametrize("change", [{"model": "Other"}, {"dtype": "float64"}, {"batch": 7}])
def test_another_subject_is_refused(change: dict[str, object]) -> None:
    report = sample_report()
    with pytest.raises(InputError, match="the baseline is about"):
        gate(report, baseline=replace(report, **change), any_environment=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [-1.0, math.nan, math.inf])
def test_bounds_are_numbers(bound: float) -> None:
    with pytest.raises(InputError, match="min_speedup"):
        Rules(min_speedup=bound)


@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_every_report_can_be_judged_and_shown(case: str) -> None:
    report = RENDERED[case]()
    rules = Rules(min_speedup=1.0, max_syncs=3, max_host_syncs=3, max_calls=3, max_bytes=3)
    found = gate(report, rules, baseline=report)
    text = found.to_text(60)
    assert max(cell_len(line) for line in text.splitlines()) <= 60
    data = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert (data["outcome"], data["exit_code"]) == (found.outcome, EXIT_CODES[found.outcome])
    assert len(data["verdicts"]) == len(found.verdicts)
    suite = ElementTree.fromstring(found.to_junit())[0]
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"]) == len(found.verdicts)
    assert len(suite.findall("testcase/failure")) == int(suite.attrib["failures"])
    assert len(suite.findall("testcase/skipped")) == int(suite.attrib["skipped"])
    rows = [line for line in found.to_markdown().splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(found.verdicts)


def test_names_cannot_leave_their_place() -> None:
    report = replace(sample_report(), model=f"{HOSTILE}\x00\x1b[2J|\ufffe\n# x")
    found = gate(report)
    page = found.to_markdown()
    assert "<script" not in page.replace("\\<", "")
    assert "\n#  x" not in page
    assert "\x1b" not in page + found.to_text() + found.to_junit()
    ElementTree.fromstring(found.to_junit())


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = timed(sample_report(), eager=(96.0, 104.0) * 20, nimble=(100.0,) * 40)
    path = report.save(tmp_path / "r.nimble")
    assert run("gate", path) == 0
    assert run("gate", path, "--min-speedup", 2) == 1
    assert run("gate", path, "--min-speedup", 1) == 3
    assert run("gate", path, "--min-speedup", -1) == 2
    other = replace(report, environment=replace(report.environment, driver="1")).save(tmp_path / "o.nimble")
    assert run("gate", path, "--baseline", other) == 2
    assert "driver 1, now 580.65" in capsys.readouterr().err
    assert run("gate", path, "--baseline", other, "--any-environment") == 0
    assert run("gate", path, path, path, "--baseline", path, path, path) == 0
    assert run("gate", "--baseline", path) == 2


def test_files_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sample_report().save(tmp_path / "r.nimble")
    page, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    assert run("gate", path, "--max-calls", 1, "--json", "--markdown", page, "--junit", junit) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "fail"
    assert "| max\\_calls | ❌ fail | calls: 60, allowed 1 |" in page.read_text(encoding="utf-8")
    failure = ElementTree.fromstring(junit.read_text(encoding="utf-8")).find(".//failure")
    assert failure is not None
    assert failure.attrib["message"] == "fail: calls: 60, allowed 1"
