"""Who is dead before whom, what may be released when, and the peak of one stream: against their definitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Program
from nimble_core.scheduling.liveness import (
    conflict_sets,
    dead_before,
    happens_before,
    lifetimes,
    members,
    release_plan,
    serial_peak,
)
from nimble_core.scheduling.policies import nimble
from tests.support.memory_models import happens_before as closure
from tests.support.memory_models import tensor_programs
from tests.support.strategies import programs


@given(tensor_programs(), st.sampled_from([1, 2, 3, None]))
def test_conflicts_are_those_of_the_definition(program: Program, cap: int | None) -> None:
    schedule = nimble(build_graph(program), uniform_costs(len(program.calls)), max_streams=cap)
    made = [at for at, storage in enumerate(program.storages) if storage.role == "intermediate"]
    lives = lifetimes(program, schedule, made)
    before = closure(schedule)
    users = [
        [call.index for call in program.calls if any(a.ref.storage == life.storage for a in call.accesses)]
        for life in lives
    ]
    outputs = {ref.storage for ref in program.outputs}

    def over(old: int, new: int) -> bool:
        return lives[old].storage not in outputs and all(before.has_edge(u, v) for u in users[old] for v in users[new])

    assert [life.first[0] for life in lives] == sorted(min(map(schedule.order.index, calls)) for calls in users)
    dead = list(dead_before(happens_before(schedule), [life.last for life in lives]))
    for at, call in enumerate(schedule.order):
        assert members(dead[at]) == [
            index
            for index, life in enumerate(lives)
            if life.storage not in outputs and all(before.has_edge(use, call) for use in users[index])
        ]
    for index, row in enumerate(conflict_sets(happens_before(schedule), lives)):
        others = [other for other in range(len(lives)) if other != index]
        assert members(row) == [other for other in others if not over(index, other) and not over(other, index)]


def users_of(program: Program, storage: int) -> list[int]:
    return [call.index for call in program.calls if any(access.ref.storage == storage for access in call.accesses)]


@given(programs(), st.data())
def test_releases_at_the_first_safe_call_and_only_what_it_may(program: Program, data: st.DataObject) -> None:
    graph = build_graph(program)
    schedule = nimble(graph, uniform_costs(graph.size), max_streams=data.draw(st.sampled_from([1, 2, 3, None])))
    before = closure(schedule)
    outputs = {ref.storage for ref in program.outputs}
    expected: list[tuple[int, ...]] = [()] * graph.size
    for storage, made in enumerate(program.storages):
        users = users_of(program, storage)
        if made.role != "intermediate" or not users or storage in outputs:
            continue
        home = schedule.stream[min(users, key=schedule.order.index)]
        for at, call in enumerate(schedule.order):
            if schedule.stream[call] == home and all(before.has_edge(user, call) for user in users):
                expected[at] += (storage,)
                break
    assert release_plan(program, schedule) == expected


@given(programs(), st.data())
def test_one_call_after_the_other_needs_what_is_in_use_and_its_workspace(program: Program, data: st.DataObject) -> None:
    calls = range(len(program.calls))
    scratch = data.draw(st.lists(st.integers(0, 50), min_size=len(calls), max_size=len(calls)))
    outputs = {ref.storage for ref in program.outputs}
    owned = [at for at, storage in enumerate(program.storages) if storage.role == "intermediate"]
    users = {at: users_of(program, at) for at in owned}
    peak = 0
    for call in calls:
        alive = [at for at in owned if users[at] and users[at][0] <= call and (at in outputs or call <= users[at][-1])]
        peak = max(peak, sum(program.storages[at].nbytes for at in alive) + scratch[call])
    assert serial_peak(program, scratch) == peak
    assert serial_peak(program) == serial_peak(program, [0] * len(calls)) <= peak
