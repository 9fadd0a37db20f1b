"""The arena: no reader ever finds another's bytes, whatever the streams' speed, and it is as small as it can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import nimble_viz
from nimble_core.ir.call_graph import build_graph, graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import serial_peak
from nimble_core.scheduling.memory_planner import Lent, MemoryPlan, Needs, check_memory, plan_memory, reuse_hazards
from nimble_core.scheduling.policies import nimble, plan_streams, single
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError, ScheduleError
from tests.support.memory_models import happens_before, program_of, run_on_tagged_bytes, tensor_programs
from tests.support.strategies import programs

RECORDINGS = sorted((Path(__file__).parents[3] / "examples" / "recordings").glob("*.nimble"))
any_program = st.one_of(tensor_programs(), programs(max_calls=12, max_storages=6))


def drawn_schedule(program: Program, data: st.DataObject) -> Schedule:
    graph = build_graph(program)
    return nimble(graph, uniform_costs(graph.size), max_streams=data.draw(st.sampled_from([1, 2, 3, None])))


def drawn_run(schedule: Schedule, data: st.DataObject) -> list[int]:
    """Any order that streams and waits allow."""
    eager = data.draw(st.permutations(range(len(schedule.order))))
    return list(networkx.lexicographical_topological_sort(happens_before(schedule), key=eager.index))


def users_of(program: Program, storage: int) -> list[int]:
    return [call.index for call in program.calls if any(a.ref.storage == storage for a in call.accesses)]


def overlap(program: Program, plan: MemoryPlan, first: int, second: int) -> bool:
    a, b = plan.offsets[first], plan.offsets[second]
    sizes = program.storages[first].nbytes, program.storages[second].nbytes
    return a < b + sizes[1] and b < a + sizes[0] and all(sizes)


@given(any_program, st.data())
def test_every_reader_finds_its_own_bytes_in_any_allowed_run(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    plan = plan_memory(program, schedule, alignment=data.draw(st.sampled_from([1, 4])))
    assert check_memory(program, schedule, plan) is plan
    made = [at for at, storage in enumerate(program.storages) if storage.role == "intermediate"]
    assert [at for at, offset in enumerate(plan.offsets) if offset >= 0] == [at for at in made if users_of(program, at)]
    assert run_on_tagged_bytes(program, plan, drawn_run(schedule, data)) == []


@given(any_program, st.data())
def test_the_check_passes_exactly_the_plans_without_a_race(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    plan = plan_memory(program, schedule, alignment=1)
    placed = [storage for storage, offset in enumerate(plan.offsets) if offset >= 0]
    assume(placed)
    offsets = list(plan.offsets)
    for storage in data.draw(st.lists(st.sampled_from(placed), min_size=1, max_size=2)):
        offsets[storage] = data.draw(st.integers(0, plan.nbytes))
    spoilt = replace(plan, offsets=tuple(offsets), nbytes=plan.nbytes + 64)
    before = happens_before(schedule)
    outputs = {ref.storage for ref in program.outputs}

    def over(old: int, new: int) -> bool:
        pairs = ((u, v) for u in users_of(program, old) for v in users_of(program, new))
        return old not in outputs and all(before.has_edge(u, v) for u, v in pairs)

    safe = all(
        over(first, second) or over(second, first)
        for first in placed
        for second in placed
        if first < second and overlap(program, spoilt, first, second)
    )
    if safe:
        assert check_memory(program, schedule, spoilt) is spoilt
    else:
        with pytest.raises(ScheduleError, match=r"share bytes and nothing orders them|is an output"):
            check_memory(program, schedule, spoilt)


@given(any_program)
def test_one_stream_needs_at_least_its_live_peak(program: Program) -> None:
    schedule = single(build_graph(program), uniform_costs(len(program.calls)))
    assert plan_memory(program, schedule, alignment=1).nbytes >= serial_peak(program)


@given(any_program, st.data())
def test_reused_bytes_are_hazards_that_the_schedule_keeps(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    hazards = reuse_hazards(program, schedule, plan_memory(program, schedule))
    before = happens_before(schedule)
    assert all(before.has_edge(u, v) for u, v in hazards)
    if schedule.order == tuple(range(len(program.calls))):
        graph = build_graph(program)
        both = graph_from_edges(graph.size, {*graph.edges, *hazards})
        check_schedule(both, plan_streams(both, schedule.stream, policy="same"))


@given(any_program, st.data())
def test_scratch_is_shared_by_calls_that_never_run_together(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    size = len(program.calls)
    scratch = data.draw(st.lists(st.sampled_from([0, 3, 7]), min_size=size, max_size=size))
    plan = plan_memory(program, schedule, needs=Needs(scratch=tuple(scratch)), alignment=1)
    assert check_memory(program, schedule, plan) is plan
    assert plan_memory(program, schedule, alignment=1).nbytes == plan.nbytes
    assert [offset >= 0 for offset in plan.scratch_offsets] == [nbytes > 0 for nbytes in scratch]
    if schedule.streams == 1:
        assert plan.scratch_nbytes == max(scratch)


@given(any_program, st.data())
def test_workspaces_lie_among_storages_and_spoil_none(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    size = len(program.calls)
    workspaces = tuple(data.draw(st.lists(st.sampled_from([0, 3, 7]), min_size=size, max_size=size)))
    plan = check_memory(
        program, schedule, plan_memory(program, schedule, needs=Needs(workspaces=workspaces), alignment=1)
    )
    assert [offset >= 0 for offset in plan.workspace_offsets] == [nbytes > 0 for nbytes in workspaces]
    assert run_on_tagged_bytes(program, plan, drawn_run(schedule, data)) == []
    without = plan_memory(program, schedule, alignment=1).nbytes
    assert plan.nbytes <= without + sum(workspaces)
    assert plan.workspace_nbytes == max(workspaces, default=0)


@st.composite
def lent_to(draw: st.DrawFn, program: Program, alignment: int) -> Lent:
    """Memory in which some of the inputs lie, with gaps, and something that nobody here knows."""
    offset = 0
    homes, kept = [], []
    for storage in draw(st.permutations([at for at, one in enumerate(program.storages) if one.role != "intermediate"])):
        offset += draw(st.integers(0, 20)) * alignment
        if program.storages[storage].nbytes and draw(st.booleans()):
            homes.append((storage, offset))
            offset += -(-program.storages[storage].nbytes // alignment) * alignment
        if draw(st.booleans()):
            kept.append((offset, alignment))
            offset += alignment
    return Lent(offset + draw(st.integers(0, 40)), tuple(homes), tuple(kept), draw(st.sampled_from([0, 3, 6])))


@given(any_program, st.data())
def test_lent_memory_is_used_once_it_was_read(program: Program, data: st.DataObject) -> None:
    schedule, alignment = drawn_schedule(program, data), data.draw(st.sampled_from([1, 4]))
    written = {access.ref.storage for call in program.calls for access in call.accesses if access.write}
    lent = data.draw(lent_to(program, alignment))
    lent = replace(lent, homes=tuple(one for one in lent.homes if one[0] not in written))
    elsewhere = [at for at, one in enumerate(program.storages) if one.role == "input"]
    elsewhere = [at for at in elsewhere if at not in written and at not in dict(lent.homes)]
    inputs = tuple(sorted(data.draw(st.sets(st.sampled_from(elsewhere))))) if elsewhere else ()
    size = len(program.calls)
    workspaces = tuple(data.draw(st.lists(st.sampled_from([0, 9]), min_size=size, max_size=size)))
    needs = Needs(workspaces=workspaces, lent=lent, inputs=inputs)
    plan = plan_memory(program, schedule, needs=needs, alignment=alignment)
    assert check_memory(program, schedule, plan) is plan
    assert run_on_tagged_bytes(program, plan, drawn_run(schedule, data)) == []
    outputs = {ref.storage for ref in program.outputs}
    homes = dict(lent.homes)
    for storage, offset in enumerate(plan.offsets):
        if storage in homes:
            assert offset in (homes[storage], -1)
        elif 0 <= offset < plan.start and program.storages[storage].nbytes:
            assert storage not in outputs
            assert program.storages[storage].nbytes >= lent.least_nbytes
    assert all(plan.offsets[storage] >= 0 for storage in inputs if users_of(program, storage))
    assert plan.nbytes >= 0


CHAIN = program_of([([0], [1]), ([1], [2]), ([2], [3]), ([3], [4])], [1000, 10, 20, 30, 40], outputs=[4])


def test_a_chain_needs_two_neighbours_at_a_time() -> None:
    schedule = single(build_graph(CHAIN), uniform_costs(4))
    plan = plan_memory(CHAIN, schedule, alignment=1)
    assert plan.nbytes == 70
    assert plan.offsets[0] == -1
    assert plan_memory(CHAIN, schedule).nbytes == 1024
    assert all(offset % 512 == 0 for offset in plan_memory(CHAIN, schedule).offsets[1:])


def test_only_what_is_named_is_placed() -> None:
    schedule = single(build_graph(CHAIN), uniform_costs(4))
    assert plan_memory(CHAIN, schedule, place=[3, 1], alignment=1) == MemoryPlan((-1, 0, -1, 0, -1), 30, alignment=1)


FORK = program_of([([0], [1]), ([1], [2]), ([0], [3]), ([2, 3], [4])], [8] * 5, outputs=[4])


def test_branches_share_nothing_and_sabotage_is_seen() -> None:
    """The pair of tests that must fail: a plan for one stream on two streams reads what another wrote."""
    graph = build_graph(FORK)
    one, two = single(graph, uniform_costs(4)), nimble(graph, uniform_costs(4))
    assert two.streams == 2
    plan = plan_memory(FORK, one, alignment=1)
    assert (plan.nbytes, plan.offsets[3]) == (24, plan.offsets[1])
    with pytest.raises(ScheduleError, match=r"storage 1 .8 bytes., used by call 1: .* and storage 3 .8 bytes."):
        check_memory(FORK, two, plan)
    assert run_on_tagged_bytes(FORK, plan, [0, 1, 2, 3]) == []
    assert run_on_tagged_bytes(FORK, plan, [0, 2, 1, 3]) == ["call 1 finds other bytes in storage 1"]
    safe = check_memory(FORK, two, plan_memory(FORK, two, alignment=1))
    assert not any(overlap(FORK, safe, 3, other) for other in (1, 2))


def test_two_first_users_on_two_streams_both_count() -> None:
    # Storage 2 is written by calls 1 and 2 on different streams, storage 1 is read by call 1 only: call 2 does not
    # wait for call 1, so storage 2 must not take the bytes of storage 1.
    program = program_of([([0], [1]), ([1], [2]), ([0], [2]), ([2], [3])], [8] * 4, outputs=[3])
    graph = graph_from_edges(4, [(0, 1), (1, 3), (2, 3)])
    schedule = plan_streams(graph, [0, 0, 1, 0], policy="given")
    assert not overlap(program, check_memory(program, schedule, plan_memory(program, schedule)), 1, 2)
    spoilt = MemoryPlan((-1, 0, 0, 8), 16, alignment=1)
    with pytest.raises(ScheduleError, match="share bytes and nothing orders them"):
        check_memory(program, schedule, spoilt)


def test_shared_scratch_of_calls_side_by_side_is_stopped() -> None:
    schedule = nimble(build_graph(FORK), uniform_costs(4))
    plan = plan_memory(FORK, schedule, needs=Needs(scratch=(4,) * 4), alignment=1)
    assert plan.scratch_nbytes == 8
    spoilt = replace(plan, scratch_offsets=(0, 0, 0, 0))
    with pytest.raises(ScheduleError, match=r"call 1: .* share scratch memory and nothing orders them"):
        check_memory(FORK, schedule, spoilt)


def test_bytes_behind_a_later_block_keep_their_owner() -> None:
    # Storage 3 lies in the middle of 1, which is dead by then; 4, on another stream, behind it in the same bytes.
    program = program_of([([0], [1]), ([1], [2]), ([2], [3]), ([0], [4])], [8, 24, 8, 8, 8], outputs=[3, 4])
    schedule = plan_streams(build_graph(program), [0, 0, 0, 1], policy="mine")
    with pytest.raises(ScheduleError, match=r"storage 1 .* and storage 4 .* share bytes and nothing orders them"):
        check_memory(program, schedule, MemoryPlan((-1, 0, 24, 8, 16), 32, alignment=1))


def test_an_output_is_not_overwritten_and_nothing_leaves_the_arena() -> None:
    program = program_of([([0], [1]), ([0], [2]), ([2], [3])], [8] * 4, outputs=[1, 3])
    schedule = single(build_graph(program), uniform_costs(3))
    with pytest.raises(ScheduleError, match=r"storage 1 .* is an output, and storage 2"):
        check_memory(program, schedule, MemoryPlan((-1, 0, 0, 8), 16))
    with pytest.raises(ScheduleError, match=r"storage 3 .* ends outside the arena of 16 bytes"):
        check_memory(program, schedule, MemoryPlan((-1, 0, 8, 12), 16))


def test_refuses_what_does_not_fit() -> None:
    schedule = single(build_graph(CHAIN), uniform_costs(4))
    with pytest.raises(InputError, match="scratch of 1 calls for a program of 4"):
        plan_memory(CHAIN, schedule, needs=Needs(scratch=(1,)))
    with pytest.raises(InputError, match="workspaces of 1 calls for a program of 4"):
        plan_memory(CHAIN, schedule, needs=Needs(workspaces=(1,)))
    with pytest.raises(InputError, match="storage 0 is not made by the calls"):
        plan_memory(CHAIN, schedule, place=[0])
    with pytest.raises(InputError, match="an alignment of 0"):
        plan_memory(CHAIN, schedule, alignment=0)


def test_a_chain_runs_in_what_it_was_lent() -> None:
    schedule = single(build_graph(CHAIN), uniform_costs(4))
    plan = plan_memory(CHAIN, schedule, needs=Needs(lent=Lent(1000, ((0, 0),))), alignment=1)
    assert plan.start == 1001
    assert plan.offsets == (0, 1001, 30, 0, 1001)  # its first result, made while the input is read; then its output
    assert plan.nbytes == 40


def test_misuse_of_lent_memory_is_stopped() -> None:
    schedule = single(build_graph(CHAIN), uniform_costs(4))
    needs = Needs(lent=Lent(1100, ((0, 100),), ((0, 50),)))  # its arena begins at 1101
    good = check_memory(CHAIN, schedule, plan_memory(CHAIN, schedule, needs=needs, alignment=1))
    for spoilt, what in {
        (100, 99, 200, 300, 1101): r"storage 0 .* and storage 1 .* share bytes and nothing orders them",
        (100, 1101, 45, 300, 1101): r"a part of lent memory is kept, and storage 2 .* takes its bytes at call 1",
        (100, 1101, 1090, 300, 1101): r"storage 2 .* ends outside lent memory",
        (100, 1101, 200, 300, 700): r"storage 4 .* is an output in lent memory",
    }.items():
        with pytest.raises(ScheduleError, match=what):
            check_memory(CHAIN, schedule, replace(good, offsets=spoilt))
    twice = replace(good, needs=Needs(lent=Lent(1100, ((0, 100),), ((90, 20),))))
    with pytest.raises(ScheduleError, match=r"is kept, and storage 0 .* takes its bytes"):
        check_memory(CHAIN, schedule, twice)


def test_an_empty_program_needs_nothing() -> None:
    program = Program((), (), (), ())
    schedule = single(graph_from_edges(0, []), uniform_costs(0))
    plan = check_memory(program, schedule, plan_memory(program, schedule))
    assert plan == MemoryPlan((), 0)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_arenas_of_real_recordings_are_hardly_larger_than_what_is_alive(path: Path) -> None:
    report = nimble_viz.load(path)
    schedule = single(report.graph, report.costs)
    plan = check_memory(report.program, schedule, plan_memory(report.program, schedule))
    assert plan.nbytes <= 1.15 * serial_peak(report.program)
