"""Plans under a limit: they fit, they are safe in any allowed run, and order is added only where it is needed."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nimble_viz
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Program
from nimble_core.scheduling.memory_limit import limit_memory
from nimble_core.scheduling.memory_planner import Needs, check_memory, plan_memory
from nimble_core.scheduling.policies import nimble, single
from nimble_core.scheduling.simulator import simulate
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import ScheduleError
from tests.support.memory_models import happens_before, program_of, run_on_tagged_bytes, tensor_programs
from tests.support.strategies import costs_for

RECORDINGS = sorted((Path(__file__).parents[3] / "examples" / "recordings").glob("*.nimble"))


def scratches(calls: int) -> st.SearchStrategy[list[int]]:
    """Workspaces, of few calls."""
    return st.lists(st.sampled_from([0, 0, 0, 1, 7, 8]), min_size=calls, max_size=calls)


@given(tensor_programs(), st.data())
def test_fits_and_every_reader_finds_its_own_bytes(program: Program, data: st.DataObject) -> None:
    graph = build_graph(program)
    costs = data.draw(costs_for(graph))
    schedule = nimble(graph, costs, max_streams=data.draw(st.sampled_from([2, 3, None])))
    scratch = data.draw(scratches(graph.size))
    needs = Needs(workspaces=tuple(scratch))
    # At the worst all calls take turns.
    limit = plan_memory(program, single(graph, costs), needs=needs, alignment=1).nbytes + data.draw(st.integers(0, 10))
    limited, plan = limit_memory(graph, program, schedule, limit, costs=costs, needs=needs, alignment=1)
    assert plan.held_nbytes <= limit
    assert check_schedule(graph, limited) is limited
    assert check_memory(program, limited, plan) is plan
    assert limited.stream in (schedule.stream, (0,) * graph.size)
    eager = data.draw(st.permutations(range(graph.size)))
    run = list(networkx.lexicographical_topological_sort(happens_before(limited), key=eager.index))
    assert run_on_tagged_bytes(program, plan, run) == []


@given(tensor_programs(), st.data())
def test_the_smallest_limit_in_the_error_works(program: Program, data: st.DataObject) -> None:
    graph = build_graph(program)
    costs = data.draw(costs_for(graph))
    schedule = nimble(graph, costs)
    limit, scratch = data.draw(st.integers(0, 40)), data.draw(scratches(graph.size))
    try:
        _, plan = limit_memory(
            graph, program, schedule, limit, costs=costs, needs=Needs(workspaces=tuple(scratch)), alignment=1
        )
    except ScheduleError as error:
        smallest = int(error.fix.split()[-2])
        assert smallest > limit
        _, plan = limit_memory(
            graph, program, schedule, smallest, costs=costs, needs=Needs(workspaces=tuple(scratch)), alignment=1
        )
        limit = smallest
    assert plan.held_nbytes <= limit


FORK = program_of([([0], [1]), ([1], [2]), ([0], [3]), ([3], [4]), ([2, 4], [5])], [8] * 6, outputs=[5])


def test_a_branch_waits_for_the_bytes_of_the_other() -> None:
    graph = build_graph(FORK)
    costs = uniform_costs(5)
    schedule = nimble(graph, costs)
    assert plan_memory(FORK, schedule, alignment=1).nbytes == 32
    limited, plan = limit_memory(graph, FORK, schedule, 24, costs=costs, alignment=1)
    assert plan.nbytes == 24
    assert limited.added_order
    assert not limited.maximum_concurrency
    assert simulate(graph, schedule, costs).length_ns <= simulate(graph, limited, costs).length_ns < 5
    with pytest.raises(ScheduleError, match="no memory of 23 bytes was found: the smallest has 24"):
        limit_memory(graph, FORK, schedule, 23, costs=costs, alignment=1)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_real_recordings_fit_a_quarter_more_than_one_stream(path: Path) -> None:
    report = nimble_viz.load(path)
    one = plan_memory(report.program, single(report.graph, report.costs)).nbytes
    for schedule in report.schedules:
        limited, plan = limit_memory(report.graph, report.program, schedule, one * 5 // 4, costs=report.costs)
        check_schedule(report.graph, limited)
        assert check_memory(report.program, limited, plan).nbytes <= one * 5 // 4
