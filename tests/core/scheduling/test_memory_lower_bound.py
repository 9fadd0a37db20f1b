"""The lower bound is the heaviest antichain, by brute force."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph, graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import conflict_sets, happens_before, lifetimes
from nimble_core.scheduling.memory_lower_bound import memory_lower_bound
from nimble_core.scheduling.policies import nimble, plan_streams, single
from tests.support.memory_models import program_of, tensor_programs


def heaviest(program: Program, schedule: Schedule, alignment: int) -> int:
    made = [index for index, storage in enumerate(program.storages) if storage.role == "intermediate"]
    lives = [life for life in lifetimes(program, schedule, made) if program.storages[life.storage].nbytes]
    rows = conflict_sets(happens_before(schedule), lives)
    weights = [-(-program.storages[life.storage].nbytes // alignment) * alignment for life in lives]
    best = 0
    for count in range(len(lives) + 1):
        for chosen in combinations(range(len(lives)), count):
            mask = sum(1 << index for index in chosen)
            if all(mask & ~rows[index] == 1 << index for index in chosen):
                best = max(best, sum(weights[index] for index in chosen))
    return best


@given(tensor_programs(max_calls=7), st.sampled_from([1, 2, 3, None]), st.sampled_from([1, 4]))
def test_is_the_heaviest_set_that_no_order_forces_apart(program: Program, cap: int | None, alignment: int) -> None:
    schedule = nimble(build_graph(program), uniform_costs(len(program.calls)), max_streams=cap)
    assert memory_lower_bound(program, schedule, alignment=alignment) == heaviest(program, schedule, alignment)


def test_a_storage_made_on_two_streams_inherits_from_what_is_dead_before_both() -> None:
    # Storage 5 is written by calls 4 and 5, side by side; 1 is dead before both, 6 before call 4 only.
    program = program_of(
        [([0], [1]), ([1], [2]), ([2], [3, 6]), ([2], [4]), ([3], [5]), ([4], [5])], [8] * 7, outputs=[5]
    )
    graph = graph_from_edges(6, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 5)])
    schedule = plan_streams(graph, [0, 0, 0, 1, 0, 1], policy="given")
    assert memory_lower_bound(program, schedule, alignment=1) == heaviest(program, schedule, 1) == 40


def test_branches_count_together_and_a_chain_does_not() -> None:
    program = program_of([([0], [1]), ([1], [2]), ([0], [3]), ([2, 3], [4])], [8, 8, 8, 8, 8], outputs=[4])
    graph = build_graph(program)
    costs = uniform_costs(4)
    assert memory_lower_bound(program, single(graph, costs), place=[1, 2], alignment=1) == 16
    assert memory_lower_bound(program, nimble(graph, costs), place=[1, 3], alignment=1) == 16
    assert memory_lower_bound(program, single(graph, costs), place=[1, 3], alignment=1) == 8
