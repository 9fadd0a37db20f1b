"""``annotate``: the replay of a profile of Nsight Systems in a report, and what did not match."""

from __future__ import annotations

import csv
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import nimble_viz.render.text
from nimble_core.utils.errors import InputError
from nimble_viz import annotate, load
from nimble_viz.cli.command import main
from nimble_viz.collect.annotate import COLUMNS
from nimble_viz.render.report import Report
from nimble_viz.report.consistency import check_report
from tests.support.nsys_exports import Ran, profile_of, write_export
from tests.support.nvtx_tool import listened
from tests.support.sample_reports import fused_report, profile_report, sample_report, training_report

TWO = {call: [f"kernel_{call}", "memcpy"][: 1 + call % 2] for call in range(60)}


def profiled(report: Report) -> Report:
    """``report`` with the nodes of its replay, as ``compare`` leaves it."""
    schedule = report.schedule(report.chosen)
    assert schedule is not None
    names = {call: ["kernel"] for call in range(len(report.program.calls))}
    from tests.viz.collect.test_match_replays import seen_before

    return replace(report, timelines=(report.timelines[0], seen_before(report, names)))


@pytest.mark.parametrize("make", [sample_report, fused_report, training_report])
def test_the_replay_is_that_of_the_profile(tmp_path: Path, make: type[Report]) -> None:
    report = make(40)  # type: ignore[call-arg]
    names = {call.index: TWO[call.index % 60] for call in report.program.calls}
    profile = profile_of(report, report.chosen, 3, names=names)
    found = annotate(write_export(tmp_path / "p.sqlite", profile), report)
    line, schedule = found.report.timeline(report.chosen), report.schedule(report.chosen)
    assert line is not None
    assert schedule is not None
    assert (line.source, line.clock, line.reliable) == ("measured", "Nsight Systems, GPU clock", True)
    told = "from p.sqlite, 3 replays, by the NVTX ranges in which the graph's nodes were captured"
    assert line.note.startswith(f"{told}; kernels of the report's replay that this one does not run: ")
    middle = [one for one in profile.ran if one.launch == 101]  # each replay takes a little longer than the last
    began = min(one.start for one in middle)
    drawn = {(span.start_ns, span.end_ns, span.call, span.lane) for span in line.spans}
    calls = {(one, profile.call_of[one.node]) for one in middle}
    assert drawn == {(one.start - began, one.end - began, call, schedule.stream[call]) for one, call in calls}
    assert set(line.streams) == {one.stream for one in middle}
    assert sorted(line.nodes) == sorted(one.node & 0xFFFFFFFF for one in middle)
    assert [one.run for one in found.report.timelines] == [one.run for one in report.timelines]
    assert replace(found.report, timelines=report.timelines) == report
    assert found.exit_code == 0
    assert found.to_text().splitlines()[-1] == "  every node matched"
    known = report.measurement(report.chosen)
    assert line.unprofiled_ns == (known.median_ns if known else 0)


def test_its_node_ids_tell_the_next_profile(tmp_path: Path) -> None:
    report = sample_report(40)
    first = annotate(write_export(tmp_path / "a.sqlite", profile_of(report, report.chosen)), report).report
    other = profile_of(report, report.chosen, graph=50, marked=False)
    found = annotate(write_export(tmp_path / "b.sqlite", other), first)
    assert (found.joined.way, found.check.passed) == ("graph node ids", True)
    without = replace(first, timelines=tuple(replace(line, nodes=()) for line in first.timelines))
    with pytest.raises(InputError, match="the ranges of the capture tell the calls"):
        annotate(tmp_path / "b.sqlite", without)


def test_a_report_that_could_not_see_its_kernels(tmp_path: Path) -> None:
    report = sample_report(40, timelines=False)  # as compare makes it under Nsight Systems
    path = write_export(tmp_path / "p.sqlite", profile_of(report, report.chosen))
    found = annotate(path, report)
    assert (found.check.passed, found.notes) == (True, ())
    assert [line.run for line in found.report.timelines] == [report.chosen]
    unmarked = write_export(tmp_path / "q.sqlite", profile_of(report, report.chosen, marked=False))
    with pytest.raises(InputError, match="--trace=cuda,nvtx"):
        annotate(unmarked, report)


def test_what_did_not_match_is_named(tmp_path: Path) -> None:
    report = profiled(sample_report(40))
    names = {call: ["kernel"] for call in range(40)}
    profile = profile_of(report, report.chosen, 4, names=names, marked=False)
    odd = sorted(profile.call_of)[3:6]
    profile.ran = [replace(one, name="fill") if one.node in odd else one for one in profile.ran]
    profile.ran = [one for one in profile.ran if one.launch < 103 or one.node in odd]
    profile.gpu = "NVIDIA A10"
    found = annotate(write_export(tmp_path / "p.sqlite", profile), report)
    assert found.notes == (
        "kernels of the report's replay that this one does not run: 3 x kernel",
        "in each replay, of no call: 3 x fill",
        "left out: 1 replay that the profile holds in part",
        f"profiled on NVIDIA A10, the report is of {report.environment.device_name}",
    )
    line = found.report.timeline(report.chosen)
    assert line is not None
    assert (line.reliable, line.unprofiled_ns) == (False, 0)
    assert all(note in line.note for note in found.notes)
    assert found.exit_code == 1
    said = found.to_text()
    assert "37 of 40 nodes seen in every replay" in said
    assert said.endswith("  NOT every node matched: this timeline is unreliable\n")
    assert "UNRELIABLE" in nimble_viz.render.text.plain_text(found.report)


def test_rows_join_to_the_export(tmp_path: Path) -> None:
    report = sample_report(40)
    profile = profile_of(report, report.chosen, 2, names={k: TWO[k] for k in range(40)})
    extra = (8 << 32) + 4000
    profile.ran += [
        Ran("stranger", one.end, one.end + 1, 99, one.launch, extra) for one in profile.ran if not one.node & 0xFFFF
    ]
    path = write_export(tmp_path / "p.sqlite", profile)
    found = annotate(path, report)
    with found.to_csv(tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == len(profile.ran)
    with closing(sqlite3.connect(path)) as export:
        for row in rows:
            table = "MEMCPY" if row["kernel"] == "memcpy" else "KERNEL"
            wanted = f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_{table} WHERE correlationId = ? AND graphNodeId = ?"
            ((start, end),) = export.execute(wanted, (row["correlationId"], row["graphNodeId"])).fetchall()
            assert (row["start"], row["end"]) == (str(start), str(end))
            call = profile.call_of.get(int(row["graphNodeId"]))
            assert row["call"] == ("" if call is None else str(call))
            assert row["operator"] == ("" if call is None else report.program.calls[call].operator)
    assert {row["replay"] for row in rows} == {"0", "1"}
    assert sum(row["call"] == "" for row in rows) == 2


def test_one_stream_can_be_asked_for(tmp_path: Path) -> None:
    report = sample_report(40)
    path = write_export(tmp_path / "p.sqlite", profile_of(report, "single"))
    assert annotate(path, report, "single").report.timeline("single").clock.startswith("Nsight")  # type: ignore[union-attr]
    with pytest.raises(InputError, match="the report has no plan 'opara'"):
        annotate(path, report, "opara")
    with pytest.raises(InputError, match="no plan was chosen"):
        annotate(path, profile_report())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = sample_report(40)
    saved = str(report.save(tmp_path / "r.nimble"))
    path = str(write_export(tmp_path / "p.sqlite", profile_of(report, report.chosen)))
    out = {suffix: tmp_path / f"out.{suffix}" for suffix in ("nimble", "html", "json")}
    for one in out.values():
        assert main(["annotate", path, "--report", saved, "-o", str(one)]) == 0
    assert load(out["nimble"]) == check_report(annotate(path, saved).report)
    for one in (out["html"], out["json"]):
        assert "Nsight Systems" in one.read_text(encoding="utf-8")
    assert capsys.readouterr().out.count("40 of 40 nodes seen in every replay") == 3
    assert main(["annotate", path, "--report", saved, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert (tmp_path / "rows.csv").read_text().startswith("globalPid,correlationId,graphNodeId,start,end,streamId,")
    assert main(["annotate", path, "--report", saved, "--plan", "single"]) == 2
    assert "is not the plan 'single'" in capsys.readouterr().err
    assert main(["annotate", str(tmp_path / "none.sqlite"), "--report", saved]) == 2
    assert main(["annotate", saved, "--report", saved]) == 2
    assert "not an SQLite database" in capsys.readouterr().err


def test_torch_is_not_needed(tmp_path: Path) -> None:
    report = sample_report(12)
    saved = report.save(tmp_path / "r.nimble")
    path = write_export(tmp_path / "p.sqlite", profile_of(report, report.chosen))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from nimble_viz import annotate; print(annotate({str(path)!r}, {str(saved)!r}).exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


COMPARED = """
import torch
from nimble_core import Options
from nimble_viz import compare
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).eval()
compare(model, torch.randn(2, 8), options=Options(policy="single", tune="off", fuse="none")).save(PATH)
print("null")
"""


@pytest.mark.compiler
def test_the_ranges_that_a_tool_hears_are_those_that_are_looked_for(tmp_path: Path) -> None:
    saved = tmp_path / "r.nimble"
    spoken = listened(COMPARED.replace("PATH", repr(str(saved))), tmp_path)
    report = load(saved)
    heard = [one for one in spoken.ranges if one.category in ("capture", "replay")]
    made = profile_of(report, "single")
    wanted = {text for *_, text in made.ranges if text.startswith(("capture ", "replay "))}
    assert {one.message for one in heard} == wanted == {"capture single", "replay single"}
    (capture,) = {tuple(call.message for call in one.inside) for one in heard if one.category == "capture"}
    assert list(capture) == [text for *_, text in made.ranges if text not in wanted]
    assert annotate(write_export(tmp_path / "p.sqlite", made), report, "single").joined.way == "capture ranges"
