"""What a profile of code as it is shows: the bound, phases, sums, causes of an idle device; and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.measurement import summarize
from nimble_viz.analysis.overhead import PARTS, grouped, idle_causes, overhead
from nimble_viz.analysis.phases import PHASES, phases, span_phases, spent
from nimble_viz.analysis.tiles import verdict
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import Bound
from tests.support.sample_reports import eager_optimizer_report, profile_report, sample_report, training_report
from tests.support.tables import shown


@pytest.fixture(scope="module")
def report() -> Report:
    return profile_report()


def with_bound(report: Report, *ns: float, unprofiled: float = 0.0, loader: float = -1.0) -> Report:
    assert report.sampling is not None
    taken = replace(report.sampling, bound=Bound(*ns), loader_ns=loader, timed=9)
    measured = (summarize("eager", [unprofiled] * 9),) if unprofiled else ()
    return replace(report, sampling=taken, measurements=measured)


def test_the_verdict_is_the_largest_share(report: Report) -> None:
    told = verdict(report)
    assert "host-bound: host 51.8% (518 µs), device 26.2% (262 µs), input 22.0% (220 µs); under the profiler" in told
    assert "the host waits for the device 2 times in it" in told
    assert "input-bound: host 10.0%" in verdict(with_bound(report, 60, 30, 10))
    assert "device-bound: host 20.0%" in verdict(with_bound(report, 30, 50, 20))
    assert "between device-bound and host-bound: host 48.0%" in verdict(with_bound(report, 0, 52, 48))
    host = replace(report, environment=replace(report.environment, device="cpu"))
    assert "compute-bound: host 20.0% (20 ns), computing 50.0%" in verdict(with_bound(host, 30, 50, 20))
    assert "waits for" not in verdict(host)


def test_shares_are_those_without_the_profiler_where_it_was_timed(report: Report) -> None:
    # Of 220 µs of input 200 were the loader's, under the profiler; without it the loader took 300.
    timed = with_bound(report, 220_000, 262_000, 518_000, unprofiled=700_000, loader=300_000)
    found = spent(timed)
    assert found is not None
    assert {row["name"]: row["ns"] for row in found["rows"]} == {"input": 320_000, "device": 262_000, "host": 118_000}
    assert (found["bound"], found["basis"]) == ("input", "of an iteration without the profiler")
    assert "takes 700 µs; input-bound: host 16.9% (118 µs), device 37.4% (262 µs), input 45.7%" in verdict(timed)
    short = spent(with_bound(report, 220_000, 262_000, 518_000, unprofiled=100_000, loader=90_000))
    assert short is not None
    assert [row["ns"] for row in short["rows"]] == [100_000, 0, 0]


def test_without_a_gpu_the_rest_is_split_as_under_the_profiler(report: Report) -> None:
    host = replace(report, environment=replace(report.environment, device="cpu"))
    found = spent(with_bound(host, 200_000, 600_000, 200_000, unprofiled=500_000, loader=100_000))
    assert found is not None
    assert [row["ns"] for row in found["rows"]] == [100_000, 300_000, 100_000]


def test_phases_know_which_calls_copy_input(report: Report) -> None:
    calls = {phase: row["Calls"] for phase, row in shown(phases(report)).items()}
    assert calls == {"loader": "0", "copy": "1", "forward": "2", "backward": "1", "optimizer": "1"}
    line = report.timelines[0]
    found = {span.name: PHASES[at] for span, at in zip(line.spans, span_phases(report, line), strict=True) if at >= 0}
    assert (found["data loader"], found["aten::to"], found["Memcpy HtoD (Pageable -> Device)"]) == (
        "loader",
        "copy",
        "copy",
    )
    assert (found["gemm_backward"], found["aten::item"]) == ("backward", "forward")


@pytest.mark.parametrize("made", [sample_report, training_report, profile_report])
def test_every_grouping_adds_up_to_the_same(made) -> None:
    report = made()
    assert report.overhead is not None
    for by in ("operator", "module"):
        rows = grouped(report, by)
        assert sum(row["calls"] for row in rows) == len(report.overhead.calls)
        for part in PARTS:
            whole = sum(getattr(row, f"{part}_ns") for row in report.overhead.calls)
            assert sum(row[part] for row in rows) == pytest.approx(whole)
        assert [row["overhead"] for row in rows] == sorted((row["overhead"] for row in rows), reverse=True)


def test_causes_of_an_idle_device_add_up(report: Report) -> None:
    assert report.overhead is not None
    assert idle_causes(report.overhead) == [
        ("Idle: host late, nothing queued", "709 µs, 70.9%"),
        ("Idle: launch latency", "29.0 µs, 2.9%"),
        ("Idle: dependency, queued behind others", "0 ns, 0.0%"),
    ]
    assert idle_causes(replace(report.overhead, idle=None)) == []
    assert dict(overhead(report)["facts"])["Unattributed"] == "300 µs, 30.0%"


def test_an_optimizer_whose_calls_eager_did_not_make_has_one_row() -> None:
    report = eager_optimizer_report()
    name = "optimizer (eager runs other operators: 0 of 2 calls found)"
    (row,) = (one for one in grouped(report, "operator") if one["whole"])
    assert (row["name"], row["calls"]) == (name, 2)
    assert row["overhead"] == report.overhead.calls[-1].overhead_ns
    modules = {row["name"]: row["calls"] for row in grouped(report, "module")}
    assert modules["(the optimizer)"] == len(report.overhead.shared)
    assert overhead(report)["shared"] == {"name": name, "calls": list(report.overhead.shared)}
    assert name in plain_text(report, 140, full=True)
