"""The report of a training step, by phase."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch

import nimble_viz
from nimble_core.ir.program import Phase
from nimble_viz.analysis.dag_layout import nest
from nimble_viz.analysis.payload import unpack, view_data
from nimble_viz.analysis.phases import PHASES, phase_syncs, phases, span_phases
from nimble_viz.analysis.summary import verdict
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import HostSync
from tests.support.compared_steps import FAST, Net, batch, sgd, trained

TRAINED = get_args(Phase)


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    net, (x, y) = Net(), batch()
    return trained(net, x, target=y, optimizer=sgd(net), options=replace(FAST, policy="nimble"))


def test_the_report_of_a_step(report: Report) -> None:
    assert (report.model, report.dtype, report.batch) == ("Net", "float32", 4)
    calls = report.program.calls
    assert [phase for phase in PHASES if any(call.phase == phase for call in calls)] == list(TRAINED)
    assert {taken.name for taken in report.measurements} == {"eager", "single", "nimble"}
    assert any(call.module == "head" and call.phase == "backward" for call in calls)
    assert any(call.label == "_fused_sgd_" for call in calls if call.phase == "optimizer")
    assert report.ratio("single").value > 0
    assert next(check for check in report.checks if check.name == "single").passed
    assert "training" in verdict(report)
    assert report.overhead is not None
    assert not any("found in the profile" in text for text in report.overhead.warnings)


def test_phases_add_up_to_the_profiled_step(report: Report) -> None:
    found = report.overhead.phases
    assert {one.phase for one in found} == set(TRAINED)
    for one in found:
        # On the host nothing waits: every nanosecond of a phase is overhead or work.
        assert one.overhead_ns + one.work_ns == pytest.approx(one.host_ns)
        assert one.host_ns > 0
    assert sum(one.host_ns for one in found) <= report.overhead.profiled_ns
    ends = sorted(span for one in found for span in one.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    by_calls = sum(row.work_ns for row in report.overhead.calls if report.program.calls[row.call].phase == "forward")
    assert next(one for one in found if one.phase == "forward").work_ns >= 0.9 * by_calls


def test_a_row_for_each_phase(report: Report) -> None:
    rows = phases(report)["rows"]
    assert [row["phase"] for row in rows] == list(TRAINED)
    assert sum(row["calls"] for row in rows) == len(report.program.calls)
    assert sum(row["cost_ns"] for row in rows) == pytest.approx(report.costs.total_ns)
    assert len(rows[0]["replays"]) == len(phases(report)["runs"]) == 2
    assert all(time for row in rows for time in row["replays"])
    plan = report.schedule("nimble")
    assert sum(one["count"] for one in phase_syncs(report, plan)) == len(plan.syncs) > 0


def test_loss_and_update_stand_under_the_users_lines(report: Report) -> None:
    for call in report.program.calls:
        for origin in call.origins:
            assert "nimble_viz" not in origin.file, call
        if call.phase == "loss":
            assert any(origin.file.endswith("compared_steps.py") for origin in call.origins), call


def test_spans_have_the_phase_of_their_call(report: Report) -> None:
    for line in report.timelines:
        found = span_phases(report, line)
        for span, phase in zip(line.spans, found, strict=True):
            if span.call is not None:
                assert PHASES[phase] == report.program.calls[span.call].phase
        assert {PHASES[phase] for phase in found if phase >= 0} == set(TRAINED)


def test_text_page_and_file(report: Report, tmp_path: Path) -> None:
    text = plain_text(report, 100)
    assert "The training step by phase" in text
    assert "TrainStep(model, loss_fn, optimizer)" in text
    assert "waits: " in text
    page = view_data(report)
    assert json.loads(json.dumps(page))["summary"]["phases"]["rows"][0]["phase"] == "forward"
    named = [page["phases"][phase] for phase in unpack(page["timelines"][-1]["columns"]["phase"], page["strings"])]
    assert set(named) == set(TRAINED)
    assert nimble_viz.load(report.save(tmp_path / "step.nimble")) == report
    assert report.to_html(tmp_path / "step.html").stat().st_size > 10_000


def test_host_synchronisations_name_their_phase(report: Report) -> None:
    waits = (HostSync("aten::item", 3, 900.0, "net.py:4", "optimizer"),)
    told = replace(report, overhead=replace(report.overhead, host_syncs=waits))
    assert view_data(told)["host_syncs"][0]["phase"] == "optimizer"
    assert "aten::item (optimizer)" in plain_text(told, 120)


def test_memory_is_held_against_eagers_peak(report: Report) -> None:
    from nimble_viz.analysis.live_memory import memory

    held = dict(report.memory.engines)["single"]
    known = replace(report, memory=replace(report.memory, eager_peak=2 * held))
    on_host = memory(known)
    assert not any(row["against"] for row in on_host["engines"])  # how much a process grows is another measure
    assert on_host["facts"][0][0] == "Growth of the process in an eager run"
    assert "of eager's peak" not in plain_text(known, 120)
    known = replace(known, environment=replace(known.environment, device="cuda"))
    on_gpu = memory(known)
    assert next(row for row in on_gpu["engines"] if row["chosen"] or row["held"])["against"] == "0.50x"
    assert on_gpu["facts"][0][0] == "Eager's peak above model and optimizer state"
    assert "of eager's peak: what is held" in plain_text(known, 120)


def test_phases_are_the_outermost_groups_of_the_graph() -> None:
    boxes = nest(["0.a", "0.a", "0.a", "0.a"], ["forward", "forward", "backward", "backward"])
    assert boxes.name == ("forward", "backward")
    boxes = nest(["0", "1", "1", "1", "0"], ["forward"] * 3 + ["backward"] * 2)
    assert boxes.name == ("forward", "backward", "1")
