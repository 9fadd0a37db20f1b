"""``annotate``: the replay of a profile of Nsight Systems in a report, and what did not match."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nimble_viz.render.text
from nimble_core.utils.errors import InputError
from nimble_viz import annotate, load
from nimble_viz.analysis.timeline import axis_note
from nimble_viz.cli.command import main
from nimble_viz.collect.annotate import COLUMNS, Expected, Joined, expected, join
from nimble_viz.render.report import Report
from nimble_viz.report.consistency import check_report
from nimble_viz.traces.nsight import Export, read_export
from tests.support.nsys_exports import PID, TID, Profile, Ran, profile_of, write_export
from tests.support.nvtx_tool import listened
from tests.support.sample_reports import fused_report, profile_report, sample_report, training_report

TWO = {call: [f"kernel_{call}", "memcpy"][: 1 + call % 2] for call in range(60)}


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
    assert "in a run of its own, by Nsight Systems" in axis_note(found.report)
    told = "from p.sqlite, 3 replays, by the NVTX ranges in which the graph's nodes were captured"
    assert line.note.startswith(told)
    middle = [one for one in profile.ran if one.launch == 101]  # each replay takes a little longer than the last
    began = min(one.start for one in middle)
    drawn = {(span.start_ns, span.end_ns, span.call, span.lane) for span in line.spans}
    calls = {(one, profile.call_of[one.node]) for one in middle}
    assert drawn == {(one.start - began, one.end - began, call, schedule.stream[call]) for one, call in calls}
    assert set(line.streams) == {one.stream for one in middle}
    assert [one.run for one in found.report.timelines] == [one.run for one in report.timelines]
    assert replace(found.report, timelines=report.timelines) == report
    assert found.exit_code == 0
    assert found.to_text().splitlines()[-1] == "  every node matched"
    known = report.measurement(report.chosen)
    assert line.unprofiled_ns == (known.median_ns if known else 0)


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
    report = sample_report(40)
    profile = profile_of(report, report.chosen, 4)
    odd = sorted(profile.call_of)[3:6]
    profile.ran = [one for one in profile.ran if one.node != max(profile.call_of)]
    strange = [replace(one, node=one.node + 1000, name="fill") for one in profile.ran if one.node in odd]
    profile.ran = [one for one in [*profile.ran, *strange] if one.launch < 103 or one.node in odd]
    profile.gpu = "NVIDIA A10"
    found = annotate(write_export(tmp_path / "p.sqlite", profile), report)
    assert found.notes == (
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
    assert "39 of 40 nodes seen in every replay" in said
    assert said.endswith("  NOT every node matched: this timeline is unreliable\n")
    assert "UNRELIABLE" in nimble_viz.render.text.plain_text(found.report, full=True)


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
    ran = {(str(one.launch), str(one.node)): one for one in profile.ran}
    for row in rows:
        one = ran[row["correlationId"], row["graphNodeId"]]
        assert (row["start"], row["end"]) == (str(one.start), str(one.end))
        call = profile.call_of.get(one.node)
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
    assert annotate(write_export(tmp_path / "p.sqlite", made), report, "single").exit_code == 0


Names = dict[int, list[str]]


def exported(profile: Profile) -> Export:
    with TemporaryDirectory() as folder:
        return read_export(write_export(Path(folder) / "profile.sqlite", profile))


def plan_of(report: Report) -> Expected:
    schedule = report.schedule(report.chosen)
    assert schedule is not None
    return expected(report.program, schedule)


def calls(joined: Joined) -> dict[int, int | None]:
    return {node: joined.call(node) for node in joined.replays[0].nodes}


@st.composite
def reports(draw: st.DrawFn) -> tuple[Report, Names]:
    """A report, and the kernels that each of its calls launches: none, one or more, often of one name."""
    report = sample_report(draw(st.integers(1, 24)), width=draw(st.integers(1, 4)))
    kernels = st.lists(st.sampled_from(["gemm", "add", "memcpy", "memset"]), max_size=3)
    names = {call.index: draw(kernels) for call in report.program.calls}
    if not any(names.values()):
        names[0] = ["gemm"]
    return report, names


def disturbed(profile: Profile, seed: int) -> Profile:
    """Rows in any order, work outside graphs, launches of another graph, a replay of which the end is missing.

    And another process, and a capture that was given up.
    """
    whole, *inside = (one for one in profile.ranges if one[1] < min(at for _, at in profile.launches.values()))
    profile.ranges += [(TID, whole[2] + 1, whole[2] + 50, whole[3]), (TID, whole[2] + 2, whole[2] + 10, inside[0][3])]
    profile.nodes.append((TID, whole[2] + 5, 99 << 32, None))
    last = max(profile.launches)
    cut = [one for one in profile.ran if one.launch == last]
    profile.ran += [replace(one, launch=last + 1) for one in cut[: len(cut) // 2]]
    profile.launches[last + 1] = TID, profile.launches[last][1]
    profile.ran += [Ran("fill", at, at + 3, 7, 5000 + at, 0) for at in range(4)]
    profile.ran += [Ran("gemm", at, at + 3, 7, 6000, (90 << 32) + at) for at in range(9)]
    profile.ran += [replace(one, process=PID + (1 << 24)) for one in profile.ran]
    random.Random(seed).shuffle(profile.ran)
    random.Random(seed).shuffle(profile.nodes)
    random.Random(seed).shuffle(profile.ranges)
    return profile


@settings(max_examples=80, deadline=None)
@given(reports(), st.integers(1, 4), st.integers(0, 99))
def test_by_capture_every_node_is_the_call_that_captured_it(
    given_: tuple[Report, Names], count: int, seed: int
) -> None:
    report, names = given_
    profile = disturbed(profile_of(report, report.chosen, count, names=names), seed)
    joined = join(exported(profile), plan_of(report))
    assert calls(joined) == profile.call_of
    assert joined.told.check.passed
    assert joined.strangers == ()
    whole = [one for one in joined.replays if one.launch < 100 + count]
    assert len(whole) == count
    for replay in whole:
        assert replay.process == PID
        starts = {one.node: one.start for one in profile.ran if one.launch == replay.launch}
        assert {node: one.start_ns for node, one in zip(replay.nodes, replay.activities, strict=True)} == starts


def test_nodes_that_were_copied_twice() -> None:
    report = sample_report(12)
    profile = profile_of(report, report.chosen)
    again = 20 << 32
    profile.nodes += [(TID, at, again + (node & 0xFFFF), node) for _, at, node, source in profile.nodes if source]
    profile.ran = [replace(one, node=again + (one.node & 0xFFFF)) for one in profile.ran]
    found = calls(join(exported(profile), plan_of(report)))
    assert sorted(found.values(), key=str) == sorted(profile.call_of.values(), key=str)
    assert {node & 0xFFFF: call for node, call in found.items()} == {
        node & 0xFFFF: call for node, call in profile.call_of.items()
    }


def test_replays_of_another_plan_are_told_apart_by_their_ranges() -> None:
    report = sample_report(30)
    mine = profile_of(report, report.chosen, 2)
    other = profile_of(report, "single", 9, graph=30, begin=9_000_000, launch=700)
    ran, launches, nodes = [*other.ran, *mine.ran], mine.launches | other.launches, [*mine.nodes, *other.nodes]
    joined = join(exported(Profile(ran, launches, nodes, [*mine.ranges, *other.ranges])), plan_of(report))
    assert ({replay.launch for replay in joined.replays}, joined.rivals) == ({100, 101}, 0)


def test_of_a_model_that_was_prepared_twice_the_graph_that_ran_most_is_taken_and_the_other_said(tmp_path: Path) -> None:
    report = sample_report(30)
    seldom = profile_of(report, report.chosen, 2)
    often = profile_of(report, report.chosen, 5, graph=30, begin=9_000_000, launch=700)
    ran, launches, nodes = [*seldom.ran, *often.ran], seldom.launches | often.launches, [*seldom.nodes, *often.nodes]
    both = Profile(ran, launches, nodes, [*seldom.ranges, *often.ranges])
    joined = join(exported(both), plan_of(report))
    assert ({replay.launch for replay in joined.replays}, joined.rivals) == ({*range(700, 705)}, 1)
    said = annotate(write_export(tmp_path / "both.sqlite", both), report).to_text()
    assert "1 other graph in the profile would fit as well: this one was launched most" in said


def test_a_graph_of_another_model_is_refused() -> None:
    report = sample_report(30)
    profile = profile_of(report, report.chosen, marked=False)
    with pytest.raises(InputError, match="the CUDA graph in the profile is not the plan 'nimble'"):
        join(exported(profile), plan_of(report))
