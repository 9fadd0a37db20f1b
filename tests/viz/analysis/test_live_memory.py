"""Live bytes: against a simulation call by call, for any program and order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.program import Access, Call, Program, Role, Storage, TensorRef
from nimble_core.utils.units import format_bytes
from nimble_viz.analysis.live_memory import HOLDERS, live_bytes, live_memory, memory
from nimble_viz.report.data import EngineMemory, Memory
from tests.support.sample_reports import (
    CASES,
    RENDERED,
    fused_report,
    old_report,
    plan_report,
    profile_report,
    sample_report,
    training_report,
)
from tests.support.tables import shown


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Calls that touch a few storages of several roles."""
    roles: list[Role] = draw(
        st.lists(st.sampled_from(["intermediate", "intermediate", "parameter"]), min_size=1, max_size=8)
    )
    storages = tuple(Storage(draw(st.integers(0, 100)), role) for role in roles)
    refs = [TensorRef(k, 0, (1,), (1,), "int8", 1) for k in range(len(roles))]
    touched = draw(st.lists(st.lists(st.sampled_from(refs), max_size=4), min_size=1, max_size=10))
    calls = tuple(
        Call(k, "aten.x.default", (), tuple(Access(ref, draw(st.booleans())) for ref in own))
        for k, own in enumerate(touched)
    )
    outputs = tuple(draw(st.lists(st.sampled_from(refs), max_size=2)))
    return Program(calls, storages, (), outputs)


@given(program=programs(), data=st.data())
def test_bytes_are_those_of_results_between_first_and_last_use(program: Program, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(program.calls))))
    live, spans = live_bytes(program, order)
    outputs = {ref.storage for ref in program.outputs}
    for position in range(len(order)):
        expected = 0
        for storage, one in enumerate(program.storages):
            uses = [
                at
                for at, call in enumerate(order)
                if any(x.ref.storage == storage for x in program.calls[call].accesses)
            ]
            if one.role == "intermediate" and uses:
                end = len(order) - 1 if storage in outputs else uses[-1]
                assert spans[storage] == (uses[0], end)
                expected += one.nbytes if uses[0] <= position <= end else 0
        assert live[position] == expected


@pytest.mark.parametrize("case", RENDERED)
def test_holders_and_the_rest_are_the_peak(case: str) -> None:
    report = RENDERED[case]()
    found = live_memory(report)
    if found is None:
        assert not any(one.role == "intermediate" for one in report.program.storages)
        return
    json.dumps(found, allow_nan=False)
    for run in found["runs"]:
        held = [row["bytes"] for row in run["holders"]]
        assert held == sorted(held, reverse=True)
        assert len(held) <= HOLDERS
        assert sum(held) + run["more_bytes"] == run["peak"] == max(run["columns"]["live"])
        assert run["columns"]["live"][run["peak_at"]] == run["peak"]
        assert all(row["first"] <= run["peak_at"] <= row["last"] for row in run["holders"])
        assert sum(run["columns"]["makes"]) == run["total"]
        assert sorted(run["columns"]["call"]) == list(range(len(run["columns"]["call"])))


def test_a_fused_program_has_a_curve_of_its_own() -> None:
    report = fused_report()
    found = live_memory(report)
    assert found is not None
    eager, replay = found["runs"]
    assert (eager["eager"], replay["eager"]) == (True, False)
    assert len(eager["columns"]["call"]) == len(report.eager_calls)
    assert len(replay["columns"]["call"]) == len(report.program.calls)
    assert not found["alike"]


def test_what_was_measured_and_planned_stands_beside() -> None:
    report = replace(
        sample_report(60),
        memory=Memory(5000, (("nimble", 9000),), 0, (EngineMemory("nimble", 4096, 10_000, 512),)),
    )
    found = live_memory(report)
    assert found is not None
    eager, replay = found["runs"]
    assert eager["marks"] == [("measured peak above the model", 5000)]
    assert replay["marks"] == [("arena of what was planned", 4096), ("held by the engine", 9000)]
    assert dict(replay["facts"])["Of that not in the arena (outputs, what the device placed)"] == format_bytes(
        replay["total"] - 10_000
    )
    training = live_memory(training_report())
    assert training is not None
    assert training["runs"][0]["marks"][0][0] == "measured peak above model and optimizer state"


def test_what_an_optimizer_keeps_is_no_buffer_of_the_model() -> None:
    report = sample_report(60)
    own = (
        Storage(4096, "parameter", "conv.weight"),
        Storage(512, "buffer", "norm.running_mean"),
        Storage(4096, "buffer", "conv.weight exp_avg"),
        Storage(1024, "buffer", "conv.weight exp_avg_sq"),
        Storage(2048, "buffer", "conv.weight gradient"),
    )
    program = replace(report.program, storages=(*report.program.storages, *own))
    before, after = (dict(live_memory(one)["fixed"]) for one in (report, replace(report, program=program)))
    assert {name: text for name, text in after.items() if name not in before} == {
        "Buffers": "512 B",
        "Optimizer state": "5.00 KiB",
        "Kept gradients": "2.00 KiB",
    }


def test_nothing_is_known_of_a_profile_and_little_of_a_plan() -> None:
    assert live_memory(profile_report()) is None
    assert "not known" in profile_report().live_memory().to_text()
    found = live_memory(plan_report())
    assert found is not None
    assert [run["marks"] for run in found["runs"]] == [[], []]


def test_memory_says_what_reuse_saved():
    report = sample_report(60)
    table = memory(report)["engines"]
    assert list(shown(table)["nimble replay"].values())[1:6] == [
        "46.0 MiB", "160 MiB", "114 MiB (71.2%)", "64.0 MiB", "164 MiB",
    ]  # fmt: skip
    assert [row["cells"][0]["tags"] for row in table["rows"]] == [[], [("chosen", "good")]]
    assert ("Held by nimble replay", "164 MiB") in memory(old_report())["facts"]
    assert memory(old_report())["engines"] is None
    assert memory(CASES["host"]()) is None
    none = replace(report, memory=Memory(planned=(EngineMemory("nimble", 512, 500, 0),)))
    assert shown(memory(none)["engines"])["nimble replay"]["Saved by reuse"] == "nothing"
