"""What would help next: parts that add up, gains that no change can exceed, and a basis for each."""

from __future__ import annotations

from dataclasses import replace
from math import fsum, inf

import pytest

from nimble_core.ir.measurement import summarize
from nimble_viz.analysis.advice import advice
from nimble_viz.export.tables import make_table
from nimble_viz.render.report import Report
from nimble_viz.report.data import HostSync
from tests.support.sample_reports import RENDERED, fused_report, profile_report, sample_report, timed

SMALL = [case for case in RENDERED if "ten thousand" not in case]


@pytest.mark.parametrize("case", SMALL)
def test_parts_add_up_and_gains_are_possible(case: str) -> None:
    report = RENDERED[case]()
    found = advice(report)
    if found.replay is not None:
        shares = make_table(report, "split")["share"]
        assert fsum(shares) == pytest.approx(1.0 if found.replay.rows else 0.0)
    for change in found.changes:
        assert 0 < change.gain_ns <= change.of_ns
        assert change.basis in change.gain
        assert report.measurement(change.run) or report.sampling
    gains = [change.gain_ns for change in found.changes if not change.per_sample]
    assert gains == sorted(gains, reverse=True)


def test_the_replay_is_taken_apart_along_its_longest_chain() -> None:
    report = fused_report(60)
    found = advice(report).replay
    assert found is not None
    parts = {name: ns for name, ns, _ in found.rows}
    assert parts["contention"] > 0.3 * parts["calls"]
    assert found.run == report.chosen
    first = advice(report).first
    assert first is not None
    assert first.what == "put fewer or other calls side by side"
    assert first.gain.startswith("at most ")


def faster(report: Report, name: str, factor: float) -> Report:
    """``report`` in which the run ``name`` takes ``factor`` of what the chosen replay takes."""
    taken = report.measurement(report.chosen)
    assert taken is not None
    samples = [ns * factor for ns in taken.samples_ns]
    others = tuple(one for one in report.measurements if one.name != name)
    return replace(report, measurements=(*others, summarize(name, samples, 3)))


def test_a_run_that_was_faster_is_a_measured_gain() -> None:
    report = faster(sample_report(60), "eager", 0.25)
    first = advice(report).first
    assert first is not None
    assert (first.what, first.basis) == ("stay with eager", "measured")
    assert first.share == pytest.approx(0.75)
    assert first.gain.startswith(("1", "2", "3", "4", "5", "6", "7", "8", "9"))


def test_a_faster_median_alone_is_no_advice() -> None:
    report = timed(sample_report(24), {"eager": 0.9e5, "single": 1e5, "nimble": 1e5}, noise=1.5)
    assert report.measurement("eager").median_ns < report.measurement("nimble").median_ns
    assert not [one for one in advice(report).changes if one.basis == "measured"]


def test_what_a_run_varies_by_is_no_time_outside() -> None:
    report = with_time_outside(sample_report(60))
    names = {name for name, _, _ in advice(report).replay.rows}
    taken = report.measurement(report.chosen)
    restless = [taken.median_ns * (1 + 0.5 * (k % 5 - 2)) for k in range(50)]
    noisy = replace(report, measurements=(report.measurements[0], summarize(report.chosen, restless)))
    found = advice(noisy).replay
    assert "outside" in names
    assert "outside" not in {name for name, _, _ in found.rows}
    assert "± 100%" in found.note
    assert not any("in place" in change.what for change in advice(noisy).changes)


def test_a_run_with_wrong_outputs_is_not_advised() -> None:
    report = faster(fused_report(60), "cuda-graph", 0.25)
    right = [one for one in advice(report).changes if one.basis == "measured"]
    wrong = replace(
        report,
        peers=tuple(
            replace(peer, check=replace(peer.check, relative_error=inf, passed=False)) if peer.check else peer
            for peer in report.peers
        ),
    )
    assert [one for one in advice(wrong).changes if one.basis == "measured"] == []
    assert all("instead" in one.what for one in right)


def test_code_without_a_replay_is_told_of_its_input_and_its_waits() -> None:
    found = {change.what.partition(" (")[0]: change for change in advice(profile_report()).changes}
    assert "load data ahead" in found
    report = sample_report(60)
    assert report.overhead is not None
    waits = (HostSync("aten::item", 3, 0.2 * report.overhead.profiled_ns, "train.py:7"),)
    bare = replace(
        report,
        schedules=(),
        chosen="",
        checks=(),
        candidates=(),
        timelines=(),
        measurements=report.measurements[:1],
        overhead=replace(report.overhead, host_syncs=waits, device_idle_share=0.5),
    )
    changes = advice(bare).changes
    assert any("aten::item at train.py:7" in change.what for change in changes)
    assert all(change.basis == "bound" and change.run == "eager" for change in changes)


def with_time_outside(report: Report) -> Report:
    """Every run takes three times as long, watched as before."""
    slower = tuple(summarize(one.name, [3 * ns for ns in one.samples_ns]) for one in report.measurements)
    return replace(report, measurements=slower)
