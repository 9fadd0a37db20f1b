"""Release points: safe under any relative speed of the streams, as early as allowed, and what they save."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph, graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Access, Call, Program, Role, Storage, TensorRef
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.scheduling.live_bytes import ReleasePlan, release_plan, serial_peak
from nimble_core.scheduling.policies import nimble, plan_streams, single
from tests.support.strategies import programs


def happens_before(schedule: Schedule) -> networkx.DiGraph:
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(schedule.order)
    digraph.add_edges_from([*schedule.syncs, *stream_neighbours(schedule.stream, schedule.order)])
    return networkx.transitive_closure_dag(digraph)


def users_of(program: Program, storage: int) -> list[int]:
    return [c.index for c in program.calls if any(access.ref.storage == storage for access in c.accesses)]


@given(programs(), st.data())
def test_released_memory_is_never_in_use(program: Program, data: st.DataObject) -> None:
    graph = build_graph(program)
    schedule = nimble(graph, uniform_costs(graph.size), max_streams=data.draw(st.sampled_from([1, 2, 3, None])))
    plan = release_plan(program, schedule)
    # Any interleaving that respects streams and waits may happen: draw one by drawing how eager each call is.
    eager = data.draw(st.permutations(range(graph.size)))
    run = list(networkx.lexicographical_topological_sort(happens_before(schedule), key=eager.index))
    for at, storages in enumerate(plan.before):
        reuse = schedule.order[at]
        for storage in storages:
            assert plan.stream[storage] == schedule.stream[reuse]
            assert all(run.index(user) < run.index(reuse) for user in users_of(program, storage))


@given(programs(), st.data())
def test_releases_at_the_first_safe_call_and_only_what_it_may(program: Program, data: st.DataObject) -> None:
    graph = build_graph(program)
    schedule = nimble(graph, uniform_costs(graph.size), max_streams=data.draw(st.sampled_from([1, 2, 3, None])))
    plan = release_plan(program, schedule)
    before = happens_before(schedule)
    outputs = {ref.storage for ref in program.outputs}
    found = {storage: at for at, storages in enumerate(plan.before) for storage in storages}
    assert len(found) == sum(map(len, plan.before))
    for storage, made in enumerate(program.storages):
        users = users_of(program, storage)
        if made.role != "intermediate" or not users:
            assert storage not in found
            assert plan.stream[storage] == -1
            continue
        home = schedule.stream[min(users, key=schedule.order.index)]
        assert plan.stream[storage] == home
        safe = [
            at
            for at, call in enumerate(schedule.order)
            if schedule.stream[call] == home and all(before.has_edge(user, call) for user in users)
        ]
        expected = safe[0] if safe and storage not in outputs else None
        assert found.get(storage) == expected
        assert (storage in plan.kept) == (expected is None)


def chain(*steps: tuple[list[int], list[int]], roles: tuple[Role, ...], nbytes: tuple[int, ...]) -> Program:
    """One call per step: storages read, storages written."""

    def whole(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (nbytes[storage],), (1,), "uint8", 1)

    calls = tuple(
        Call(
            index,
            "aten.op.default",
            (),
            (*(Access(whole(s), False) for s in reads), *(Access(whole(s), True) for s in writes)),
        )
        for index, (reads, writes) in enumerate(steps)
    )
    storages = tuple(Storage(size, role) for size, role in zip(nbytes, roles, strict=True))
    return Program(calls, storages, (whole(0),), (whole(len(nbytes) - 1),))


def test_a_chain_needs_two_buffers_at_a_time() -> None:
    program = chain(
        ([0], [1]), ([1], [2]), ([2], [3]), ([3], [4]),
        roles=("input", *["intermediate"] * 4),
        nbytes=(1000, 10, 20, 30, 40),
    )  # fmt: skip
    schedule = single(build_graph(program), uniform_costs(4))
    plan = release_plan(program, schedule)
    assert plan.before == ((), (), (1,), (2,))
    assert plan.kept == (3, 4)
    assert serial_peak(program) == 70


def test_a_reader_on_another_stream_delays_the_release_until_it_is_waited_for() -> None:
    # 0 makes storage 1; 1 (same stream) and 2 (other stream) read it; 3 (first stream) waits for 2 only at 4.
    program = chain(
        ([0], [1]), ([1], [2]), ([1], [3]), ([2], [4]), ([3, 4], [5]),
        roles=("input", *["intermediate"] * 5),
        nbytes=(8,) * 6,
    )  # fmt: skip
    schedule = plan_streams(build_graph(program), [0, 0, 1, 0, 0], policy="given")
    assert schedule.syncs == ((0, 2), (2, 4))
    plan = release_plan(program, schedule)
    assert plan.before == ((), (), (), (), (1, 2))
    assert plan.stream == (-1, 0, 0, 1, 0, 0)
    assert serial_peak(program) == 24


def test_an_empty_program_needs_nothing() -> None:
    program = Program((), (), (), ())
    schedule = single(graph_from_edges(0, []), uniform_costs(0))
    assert release_plan(program, schedule) == ReleasePlan((), (), ())
    assert serial_peak(program) == 0


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
