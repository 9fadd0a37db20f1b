"""A plan is a value: kept as JSON, proved to fit, refused in words where it does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph, build_graph, graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Access, Call, Origin, Program, Storage, TensorRef
from nimble_core.scheduling.policies import nimble
from nimble_core.scheduling.saved_plan import (
    MAX_BYTES,
    PLAN_VERSION,
    Plan,
    load_plan,
    make_plan,
    plan_notes,
    require_match,
    schedule_of,
)
from nimble_core.utils.errors import InputError, ReportFileError, ScheduleError
from nimble_viz import load
from tests.support.sample_reports import CASES, HOSTILE, sample_report, tangled_report


def program(calls: int = 5, device: str = "cuda") -> Program:
    """A program whose call k reads what calls k - 1 and k - 2 made."""

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (8, 64), (64, 1), "float32", 4)

    return Program(
        calls=tuple(
            Call(
                index,
                "aten.mm.default" if index % 2 else "aten.add.Tensor",
                (
                    ("self", f"%{index}"),
                    ("other", f"%{max(index - 1, 0)}"),
                    ("device", f"device(type='{device}')"),
                    ("generator", "<torch.Generator object at 0x7f00aa>"),
                ),
                (
                    Access(ref(index), write=False),
                    Access(ref(max(index - 1, 0)), write=False),
                    Access(ref(index + 1), write=True),
                ),
                origins=(Origin("aten.mm.default", f"layer.{index}", "net.py", index),),
            )
            for index in range(calls)
        ),
        storages=(Storage(2048, "input", "args[0]"), *(Storage(2048, "intermediate") for _ in range(calls))),
        inputs=(ref(0),),
        outputs=(ref(calls),),
        device=device,
    )


def planned(made: Program, policy: Callable[..., Any] = nimble) -> tuple[Plan, CallGraph]:
    graph = build_graph(made)
    return make_plan(made, graph, policy(graph, uniform_costs(graph.size)), device_name="NVIDIA H200"), graph


def with_call(made: Program, index: int, **changes: Any) -> Program:
    calls = list(made.calls)
    calls[index] = replace(calls[index], **changes)
    return replace(made, calls=tuple(calls))


def renumbered(made: Program) -> Program:
    """The same program, its storages in the opposite order."""
    last = len(made.storages) - 1

    def other(ref: TensorRef) -> TensorRef:
        return replace(ref, storage=last - ref.storage)

    return replace(
        made,
        storages=made.storages[::-1],
        inputs=tuple(map(other, made.inputs)),
        outputs=tuple(map(other, made.outputs)),
        calls=tuple(
            replace(
                call,
                accesses=tuple(replace(access, ref=other(access.ref)) for access in call.accesses),
                arguments=tuple(
                    (name, re.sub(r"%(\d+)", lambda match: f"%{last - int(match[1])}", text))
                    for name, text in call.arguments
                ),
            )
            for call in made.calls
        ),
    )


# ---------------------------------------------------------------- the value


@pytest.mark.parametrize("case", CASES)
def test_json_gives_the_same_plan_back(case: str, tmp_path: Path) -> None:
    report = CASES[case]()
    for schedule in report.schedules:
        plan = make_plan(report.program, report.graph, schedule, device_name=HOSTILE, torch="2.13.0")
        assert Plan.from_json(plan.to_json()) == plan
        assert load_plan(plan.save(tmp_path / "one.plan.json")) == plan
        made = report.program
        assert (plan.policy, plan.fuse, plan.kernels) == (schedule.policy, made.fuse, made.choices)
        assert plan.schedule.counts.emitted is None  # a capture's counts are no part of it
    assert [path.name for path in tmp_path.iterdir()] == ["one.plan.json"]


# ---------------------------------------------------------------- the fingerprint


@pytest.mark.parametrize(
    "same",
    [
        renumbered,
        lambda made: replace(made, notes=("a note",), host_steps=7),
        lambda made: with_call(made, 1, origins=(Origin("aten.mm.default", "other", "elsewhere.py", 99),)),
        lambda made: replace(made, storages=tuple(replace(storage, name="w") for storage in made.storages)),
        lambda made: with_call(
            made,
            1,
            arguments=(
                ("self", "%1"),
                ("other", "%0"),
                ("device", "device(type='cuda', index=3)"),
                ("generator", "<torch.Generator object at 0x7fbb12>"),
            ),
        ),
    ],
    ids=["storages", "notes", "origins", "names", "device number and address"],
)
def test_the_fingerprint_is_blind_to(same: Callable[[Program], Program]) -> None:
    made = program()
    other = same(made)
    assert other != made
    plan, _ = planned(made)
    require_match(plan, other, build_graph(other))


@given(st.integers(2, 30), st.data())
def test_any_change_of_a_call_is_noticed_and_named(calls: int, data: st.DataObject) -> None:
    made = program(calls)
    plan, _ = planned(made)
    index = data.draw(st.integers(0, calls - 1))
    call = made.calls[index]
    access = call.accesses[0]
    renamed, other = {"operator": "aten.sub.Tensor"}, "the same operators with other tensors, arguments or hazards"
    kind, changes = data.draw(
        st.sampled_from(
            [
                (f"call {index} is aten.sub.Tensor where the plan has", renamed),
                (other, {"arguments": (*call.arguments, ("alpha", "2"))}),
                (other, {"accesses": (replace(access, ref=replace(access.ref, sizes=(8, 65))), *call.accesses[1:])}),
                (other, {"accesses": (replace(access, ref=replace(access.ref, dtype="half")), *call.accesses[1:])}),
            ]
        )
    )
    changed = with_call(made, index, **changes)
    with pytest.raises(InputError, match=kind):
        require_match(plan, changed, build_graph(changed))


# ---------------------------------------------------------------- match


def test_another_kind_of_device_is_refused_and_another_model_of_it_noted() -> None:
    plan, _ = planned(program())
    host = program(device="cpu")
    with pytest.raises(InputError, match="one for cuda, this one runs on cpu"):
        schedule_of(plan, host, build_graph(host))
    (note,) = plan_notes(plan, device_name="NVIDIA A100")
    assert "NVIDIA H200" in note
    assert "NVIDIA A100" in note
    assert plan_notes(plan, device_name="NVIDIA H200", torch="2.13.0") == ()
    assert plan_notes(replace(plan, torch="2.11.0"), torch="2.13.0") != ()


def test_the_number_of_calls_and_inputs_is_named() -> None:
    plan, _ = planned(program(5))
    longer = program(7)
    with pytest.raises(InputError, match="it has 7 calls, the plan 5; up to the end of the shorter one"):
        require_match(plan, longer, build_graph(longer))
    other = with_call(longer, 3, operator="aten.addmm.default")
    with pytest.raises(InputError, match=r"7 calls, the plan 5; call 3 is aten.addmm.default where .* aten.mm.default"):
        require_match(plan, other, build_graph(other))
    ref = longer.inputs[0]
    more = replace(program(5), inputs=(ref, ref))
    with pytest.raises(InputError, match="one with 1 tensor inputs, this one has 2"):
        require_match(plan, more, build_graph(more))
    batch = replace(program(5), inputs=(replace(ref, sizes=(16, 64)),))
    with pytest.raises(InputError, match=r"args\[0\] is float32\[16, 64\] where the plan has float32\[8, 64\]"):
        require_match(plan, batch, build_graph(batch))


def test_other_hazards_are_refused() -> None:
    made = program(4)
    plan, graph = planned(made)
    moved = graph_from_edges(4, [*graph.edges[:-1], (0, 3)])
    assert len(moved.edges) == len(graph.edges)
    with pytest.raises(InputError, match="arguments or hazards"):
        require_match(plan, made, moved)


def test_a_schedule_that_would_race_is_refused_though_the_program_fits() -> None:
    report = tangled_report(3)
    graph = report.graph
    plan = make_plan(report.program, graph, nimble(graph, uniform_costs(graph.size)))
    assert plan.schedule.syncs
    syncs = plan.schedule.syncs[1:]
    counts = replace(plan.schedule.counts, planned=len(syncs))
    racing = replace(plan, schedule=replace(plan.schedule, syncs=syncs, counts=counts, minimum_syncs=False))
    with pytest.raises(ScheduleError, match="hazard that nothing orders"):
        schedule_of(Plan.from_json(racing.to_json()), report.program, graph)


# ---------------------------------------------------------------- damaged and hostile texts


TEXT = planned(program(6))[0].to_json()


@settings(max_examples=300)
@given(st.integers(0, len(TEXT) - 1), st.sampled_from('0123456789-{}[]",:.eEntf\x00\u2028é'))
def test_a_changed_character_gives_a_consistent_plan_or_an_error(at: int, character: str) -> None:
    try:
        plan = Plan.from_json(TEXT[:at] + character + TEXT[at + 1 :])
    except ReportFileError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    made = program(6)
    try:
        schedule = schedule_of(plan, made, build_graph(made))
    except (InputError, ScheduleError):
        return
    assert sorted(schedule.order) == list(range(6))


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(TEXT), **fields})


def rescheduled(**fields: Any) -> str:
    data = json.loads(TEXT)
    return json.dumps({**data, "schedule": {**data["schedule"], **fields}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{}", "the plan has format 0"),
        ("[" * 100_000, "not a plan"),
        (changed(schema_version=PLAN_VERSION + 1), "format 3, this version reads format 2"),
        (changed(fingerprint="g" * 64), "not a SHA-256"),
        (changed(kernels=[{"call": -1, "kernel": "k"}]), "-1 is not between 0 and"),
        (rescheduled(stream=[0] * 5), "5 streams for 6 calls"),
        (rescheduled(stream=[0, 0, 0, 0, 0, 2]), "streams have gaps"),
        (rescheduled(order=[0] * 6), "does not name every call once"),
        (rescheduled(syncs=[[0, 77]]), "77 is not between 0 and 5"),
        (rescheduled(priority=[1]), "one priority for each call"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ReportFileError, match=re.escape(words)):
        Plan.from_json(text)


def test_a_huge_text_is_refused_unread() -> None:
    with pytest.raises(ReportFileError, match="longer than"):
        Plan.from_json(b" " * (MAX_BYTES + 1))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.plan.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ReportFileError, match=r"bad\.plan\.json"):
        load_plan(path)
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "absent.plan.json")


# ---------------------------------------------------------------- reports


def test_a_report_gives_its_chosen_plan_if_there_is_one_and_so_does_its_file(tmp_path: Path) -> None:
    report = sample_report(60)
    plan = report.plan
    assert (plan.policy, plan.device, plan.device_name) == ("nimble", "cuda", "NVIDIA H200")
    assert load(report.save(tmp_path / "r.nimble")).plan == plan
    with pytest.raises(InputError, match="no plan was chosen"):
        _ = replace(report, chosen="").plan
