"""The code line by line: nothing is counted twice, nothing is lost, and what is shared out adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Origin
from nimble_viz.analysis.source import hottest, replay_times, source
from nimble_viz.render.report import Report
from nimble_viz.report.data import HostSync
from tests.support.sample_reports import RENDERED, fused_report, sample_report


def shown(report: Report) -> dict[str, Any]:
    found = source(report)
    assert found is not None
    return found


def row_at(found: dict[str, Any], line: int) -> dict[str, int]:
    at = found["lines"]["line"].index(line)
    return {name: column[at] for name, column in found["lines"].items()}


def both(found: dict[str, Any], name: str) -> int:
    return sum(found["totals"].get(key, 0) for key in (name, f"{name}_backward"))


@pytest.mark.parametrize("case", RENDERED)
def test_every_call_is_counted_once_and_lines_add_up_to_the_totals(case: str) -> None:
    report = RENDERED[case]()
    found = source(report)
    if found is None:
        assert not any(origin.file for call in report.eager_calls for origin in call.origins)
        return
    json.dumps(found, allow_nan=False)
    for name, total in found["totals"].items():
        rest = found["elsewhere"][name] if found["elsewhere"] else 0
        assert sum(found["lines"][name]) + rest == pytest.approx(total, abs=len(found["lines"]["line"]) + 1)
    assert both(found, "calls") == len(report.eager_calls)
    assert len(set(zip(found["lines"]["function"], found["lines"]["line"], strict=True))) == len(found["lines"]["line"])


@pytest.mark.parametrize("case", ["two streams", "host", "fused", "training", "training on the host", "fused thousand"])
def test_eager_times_are_those_of_the_profile(case: str) -> None:
    report = RENDERED[case]()
    found, profile = shown(report), report.overhead
    assert profile is not None
    work = sum(row.work_ns for row in profile.calls)
    on_gpu = report.environment.device == "cuda"
    assert both(found, "host") == pytest.approx(profile.overhead_ns + (0 if on_gpu else work), rel=1e-6, abs=2)
    assert both(found, "exposed") == pytest.approx(sum(row.exposed_ns for row in profile.calls), rel=1e-6, abs=2)
    assert both(found, "device") == pytest.approx(work if on_gpu else 0, rel=1e-6, abs=2)


@pytest.mark.parametrize("case", ["two streams", "fused", "fused thousand", "training", "interrupted", "wide"])
def test_replay_times_are_shared_out_and_not_lost(case: str) -> None:
    report = RENDERED[case]()
    times = replay_times(report)
    assert times is not None
    known = report.eager is None
    explained = sum(ns for call, ns in zip(report.program.calls, times[0], strict=True) if known or call.eager)
    assert both(shown(report), "replay") == pytest.approx(explained, rel=1e-6, abs=2)


def test_a_fused_call_is_shared_out_by_gpu_time() -> None:
    report = fused_report(20)
    call = next(one for one in report.program.calls if len(one.eager) == 2)
    assert report.overhead is not None
    first, second = call.eager
    rows = tuple(
        replace(row, work_ns={first: 3000.0, second: 1000.0}.get(row.call, 0.0)) for row in report.overhead.calls
    )
    lone = replace(
        report.eager,  # type: ignore[type-var]
        calls=tuple(
            replace(one, origins=(Origin("aten.x.default", "", "a.py", one.index + 1),)) for one in report.eager_calls
        ),
    )
    changed = replace(report, overhead=replace(report.overhead, calls=rows), eager=lone)
    times = replay_times(changed)
    assert times is not None
    found = shown(changed)
    spent = [row_at(found, index + 1)["replay"] for index in call.eager]
    assert spent == pytest.approx([0.75 * times[0][call.index], 0.25 * times[0][call.index]], abs=1)


def test_host_waits_stand_on_their_line_after_it_or_nowhere() -> None:
    report = sample_report(60)
    assert report.overhead is not None
    waits = (
        HostSync("a", 2, 20.0, "sample_net/modeling.py:30"),
        HostSync("b", 3, 30.0, "after sample_net/modeling.py:30"),
        HostSync("c", 4, 40.0, "after sample_net/modeling.py:30", "optimizer"),
        HostSync("d", 5, 50.0, ""),
        HostSync("e", 6, 60.0, "no line:x"),
    )
    found = shown(replace(report, overhead=replace(report.overhead, host_syncs=waits)))
    row = row_at(found, 30)
    assert (row["waits"], row["wait"], row["after"], row["after_wait"]) == (2, 20, 3, 30)
    assert found["elsewhere"]["waits"] + found["elsewhere"]["after"] == 15


def test_lines_stand_beside_their_text() -> None:
    found = shown(sample_report(60))
    (block,) = [one for one in found["functions"] if one["text"]]
    assert block["name"] == block["group"] + ".forward" == "Block.forward"
    assert block["text"][21 - block["first"]] == "        x = self.stem(x)  # line 21"
    best = hottest(found, "host", 2)
    assert best[0]["value"] >= best[1]["value"]
    assert best[0]["text"].startswith("b")
    assert 0 < best[0]["share"] < 1


def test_without_a_watched_replay_calls_count_alone() -> None:
    report = sample_report(60, timelines=False)
    assert replay_times(report) == (list(report.costs.ns), "each call alone, as no replay was watched")
    assert replay_times(replace(report, costs=uniform_costs(60))) is None
