"""Who is dead before whom, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Program
from nimble_core.scheduling.liveness import conflict_sets, dead_before, happens_before, lifetimes, members
from nimble_core.scheduling.policies import nimble
from tests.support.memory_models import happens_before as closure
from tests.support.memory_models import tensor_programs


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
