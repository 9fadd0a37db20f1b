"""Nodes of replayed graphs are told as the calls that captured them, in both ways."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core.ir.timeline import Timeline
from nimble_core.profiling.kernel_matching import replay_timeline
from nimble_core.utils.errors import InputError
from nimble_viz.collect.match_replays import Expected, Joined, expected, join
from nimble_viz.render.report import Report
from nimble_viz.traces.nsight import Export, read_export
from tests.support.nsys_exports import PID, TID, Profile, Ran, profile_of, write_export
from tests.support.sample_reports import sample_report

Names = dict[int, list[str]]


def exported(profile: Profile) -> Export:
    with TemporaryDirectory() as folder:
        return read_export(write_export(Path(folder) / "profile.sqlite", profile))


def plan_of(report: Report, line: Timeline | None = None) -> Expected:
    schedule = report.schedule(report.chosen)
    assert schedule is not None
    return expected(report.program, schedule, line)


def seen_before(report: Report, names: Names) -> Timeline:
    """The plan's replay as a report holds it, node ids included."""
    joined = join(exported(profile_of(report, report.chosen, 1, names=names, graph=3)), plan_of(report))
    schedule = report.schedule(report.chosen)
    assert schedule is not None
    return replay_timeline(joined.told, joined.raw, schedule, 1, clock="CUPTI activity")


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
    """Rows in any order, work outside graphs, launches of another graph, a replay of which the end is missing."""
    last = max(profile.launches)
    cut = [one for one in profile.ran if one.launch == last]
    profile.ran += [replace(one, launch=last + 1) for one in cut[: len(cut) // 2]]
    profile.launches[last + 1] = TID, profile.launches[last][1]
    profile.ran += [Ran("fill", at, at + 3, 7, 5000 + at, 0) for at in range(4)]
    profile.ran += [Ran("gemm", at, at + 3, 7, 6000, (90 << 32) + at) for at in range(9)]
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
    assert joined.way == "capture ranges"
    assert calls(joined) == profile.call_of
    assert joined.told.check.passed
    assert joined.strangers == ()
    whole = [one for one in joined.replays if one.launch < 100 + count]
    assert len(whole) == count
    for replay in whole:
        starts = {one.node: one.start for one in profile.ran if one.launch == replay.launch}
        assert {node: one.start_ns for node, one in zip(replay.nodes, replay.activities, strict=True)} == starts


@settings(max_examples=80, deadline=None)
@given(reports(), st.integers(1, 4))
def test_by_place_another_process_runs_the_same_nodes(given_: tuple[Report, Names], count: int) -> None:
    report, names = given_
    plan = plan_of(report, seen_before(report, names))
    profile = profile_of(report, report.chosen, count, names=names, graph=41, marked=False)
    joined = join(exported(profile), plan)
    assert joined.way == "graph node ids"
    assert calls(joined) == profile.call_of
    assert joined.told.check.passed
    assert (joined.missing, joined.strangers, len(joined.replays)) == ((), (), count)


@settings(max_examples=80, deadline=None)
@given(reports(), st.data())
def test_what_does_not_match_is_counted_by_name(given_: tuple[Report, Names], data: st.DataObject) -> None:
    report, names = given_
    plan = plan_of(report, seen_before(report, names))
    profile = profile_of(report, report.chosen, 2, names=names, marked=False)
    kernels = sorted({one.node: one for one in profile.ran if one.kind == "kernel"})
    most = len({one.node for one in profile.ran}) // 2
    changed = set(data.draw(st.lists(st.sampled_from(kernels), unique=True, max_size=most))) if kernels else set()
    before = {one.node: one.name for one in profile.ran}
    profile.ran = [replace(one, name="other") if one.node in changed else one for one in profile.ran]
    joined = join(exported(profile), plan)
    assert joined.way == "graph node ids"
    assert dict(joined.missing) == Counter(before[node] for node in changed)
    assert dict(joined.strangers) == Counter({"other": len(changed)} if changed else {})
    check = joined.told.check
    assert (check.expected, check.seen, check.unexpected) == (len(before), len(before) - len(changed), 2 * len(changed))
    assert check.passed == (not changed)
    assert calls(joined) == {node: None if node in changed else call for node, call in profile.call_of.items()}


def test_a_capture_that_was_given_up_says_nothing() -> None:
    report = sample_report(12)
    profile = profile_of(report, report.chosen)
    whole, *inside = (one for one in profile.ranges if one[1] < min(at for _, at in profile.launches.values()))
    end = whole[2]
    profile.ranges += [(TID, end + 1, end + 50, whole[3]), (TID, end + 2, end + 10, inside[0][3])]
    profile.nodes.append((TID, end + 5, 99 << 32, None))
    assert calls(join(exported(profile), plan_of(report))) == profile.call_of


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
    names = {k: ["k"] for k in range(30)}
    mine = profile_of(report, report.chosen, 2, names=names)
    other = profile_of(report, "single", 9, names=names, graph=30, begin=9_000_000, launch=700)
    ran, launches = [*other.ran, *mine.ran], mine.launches | other.launches
    plan = plan_of(report, seen_before(report, names))
    # Without a capture in the profile both graphs have the same kernels at the same places.
    joined = join(exported(Profile(ran, launches, [], [*mine.ranges, *other.ranges])), plan)
    assert ({replay.launch for replay in joined.replays}, joined.rivals) == ({100, 101}, 0)
    joined = join(exported(Profile(ran, launches)), plan)
    assert (len(joined.replays), joined.rivals) == (9, 1)


def test_graphs_that_fit_as_well_are_counted() -> None:
    report = sample_report(12)
    names = {k: ["k"] for k in range(12)}
    plan = plan_of(report, seen_before(report, names))
    few, many = (
        profile_of(report, report.chosen, count, names=names, graph=graph, marked=False, begin=begin, launch=begin)
        for count, graph, begin in ((2, 10, 1_000), (5, 20, 900_000))
    )
    joined = join(exported(Profile(few.ran + many.ran, few.launches | many.launches)), plan)
    assert (len(joined.replays), joined.rivals) == (5, 1)


def test_processes_are_told_apart() -> None:
    report = sample_report(12)
    profile = profile_of(report, report.chosen, 2)
    profile.ran += [replace(one, process=PID + (1 << 24)) for one in profile.ran]
    joined = join(exported(profile), plan_of(report))
    assert {replay.process for replay in joined.replays} == {PID}
    assert len(joined.replays) == 2


def test_a_graph_of_another_model_is_refused() -> None:
    report = sample_report(30)
    plan = plan_of(report, seen_before(report, {k: [f"k{k}"] for k in range(30)}))
    profile = profile_of(report, report.chosen, names={k: ["x"] for k in range(30)}, marked=False)
    with pytest.raises(InputError, match="the CUDA graph in the profile is not the plan 'nimble'"):
        join(exported(profile), plan)
    with pytest.raises(InputError, match="is not the plan"):
        join(exported(profile), plan_of(report))
