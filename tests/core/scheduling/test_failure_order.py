"""A run in which a call fails leaves what stays as eager leaves it, whatever the streams' speed."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import Access, Call, Origin, Program, TensorRef
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.scheduling.failure_order import changes_what_stays, failing_as_eager, may_fail
from nimble_core.scheduling.memory_planner import plan_memory
from nimble_core.scheduling.policies import nimble, plan_streams, single
from tests.support.memory_models import happens_before, run_on_tagged_bytes, tensor_programs
from tests.support.strategies import costs_for, programs

SAFE, FAILING = "aten.mul.Tensor", "aten.index_select.default"


@st.composite
def failing_programs(draw: st.DrawFn) -> Program:
    program = draw(st.one_of(tensor_programs(), programs(max_calls=12, max_storages=6)))
    operators = st.sampled_from([SAFE, SAFE, FAILING])
    calls = tuple(replace(call, operator=draw(operators)) for call in program.calls)
    roles = st.sampled_from(["intermediate", "intermediate", "intermediate", "buffer"])
    storages = tuple(replace(one, role=draw(roles)) if one.role == "intermediate" else one for one in program.storages)
    return replace(program, calls=calls, storages=storages)


def drawn_schedule(program: Program, data: st.DataObject) -> Schedule:
    graph = build_graph(program)
    if data.draw(st.booleans()):
        # Whose costs were measured: issued in another order than the program's.
        costs = replace(data.draw(costs_for(graph)), source="measured")
        return nimble(graph, costs, max_streams=data.draw(st.sampled_from([1, 2, 3, None])))
    draws = [data.draw(st.integers(0, 2)) for _ in range(graph.size)]
    names = {lane: index for index, lane in enumerate(dict.fromkeys(draws))}
    ranks = data.draw(st.permutations(range(graph.size)))
    order = list(networkx.lexicographical_topological_sort(graph.to_networkx(), key=ranks.__getitem__))
    return plan_streams(graph, [names[lane] for lane in draws], policy="drawn", order=order)


def left_open(program: Program, schedule: Schedule) -> set[tuple[int, int]]:
    """Calls that may fail and those that change what stays, of which a run may do the later one first."""
    before = happens_before(schedule)
    fails = {call.index for call in program.calls if may_fail(call)}
    changes = {call.index for call in program.calls if changes_what_stays(call, program)}
    pairs = {(min(u, v), max(u, v)) for u in fails for v in changes if u != v}
    return {(u, v) for u, v in pairs if not before.has_edge(u, v)}


@given(failing_programs(), st.data())
def test_calls_that_may_fail_and_changes_keep_program_order(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    memory = plan_memory(program, schedule, alignment=1)
    issued, kept = failing_as_eager(program, schedule, memory)
    assert left_open(program, issued) == set()
    assert issued.stream == schedule.stream
    assert issued.policy == schedule.policy
    eager = data.draw(st.permutations(range(len(issued.order))))
    run = list(networkx.lexicographical_topological_sort(happens_before(issued), key=eager.index))
    assert run_on_tagged_bytes(program, kept, run) == []
    if schedule.order == tuple(range(len(program.calls))):
        assert kept is memory
        assert issued is schedule or left_open(program, schedule)
    again = failing_as_eager(program, issued, kept)
    assert again[0] is issued
    assert again[1] is kept


@given(failing_programs(), st.data())
def test_only_waits_that_are_needed_are_added(program: Program, data: st.DataObject) -> None:
    schedule = drawn_schedule(program, data)
    issued, _ = failing_as_eager(program, schedule, plan_memory(program, schedule, alignment=1))
    if issued is schedule:
        return
    lanes = stream_neighbours(issued.stream, issued.order)
    for sync in issued.syncs:
        rest = networkx.DiGraph([*lanes, *(other for other in issued.syncs if other != sync)])
        rest.add_nodes_from(issued.order)
        assert not networkx.has_path(rest, *sync)


@given(failing_programs(), st.data(), st.booleans())
def test_programs_in_which_nothing_fails_or_stays_and_one_stream_cost_nothing(
    program: Program, data: st.DataObject, fails: bool
) -> None:
    if fails:
        storages = tuple(replace(one, role="intermediate") for one in program.storages)
        program = replace(program, storages=storages)
    else:
        program = replace(program, calls=tuple(replace(call, operator=SAFE) for call in program.calls))
    schedule = drawn_schedule(program, data)
    memory = plan_memory(program, schedule)
    assert failing_as_eager(program, schedule, memory)[0] is schedule
    graph = build_graph(program)
    alone = single(graph, uniform_costs(graph.size))
    assert failing_as_eager(program, alone, memory)[0] is alone


def a_call(operator: str, *dtypes: str, eager: tuple[str, ...] = (), **arguments: object) -> Call:
    accesses = tuple(Access(TensorRef(0, 0, (2,), (1,), dtype, 8), False) for dtype in dtypes)
    texts = tuple((name, repr(value)) for name, value in arguments.items())
    return Call(0, operator, texts, accesses, origins=tuple(Origin(one) for one in eager))


@pytest.mark.parametrize(
    ("call", "fails"),
    [
        (a_call("aten.embedding.default"), True),
        (a_call("aten._index_put_impl_.default"), True),
        (a_call("aten.linalg_cholesky_ex.default", check_errors=True), True),
        (a_call("aten.linalg_cholesky_ex.default", check_errors=False), False),
        (a_call("aten.remainder.Tensor", "int64", "int64"), True),
        (a_call("aten.remainder.Tensor", "float32", "float32"), False),
        (a_call("aten.remainder.Scalar_Tensor", "int64"), True),
        (a_call("aten.div.Scalar_mode", "int64"), False),
        (a_call("aten.masked_fill.Tensor"), True),
        (a_call("aten.masked_fill.Scalar"), False),
        (a_call("aten.bernoulli.default"), True),
        (a_call("aten.bernoulli_.float"), False),
        (a_call("mine.anything.default", eager=("mine.anything.default",)), True),
        (a_call("cpp_fused_0", eager=("aten.relu.default", "aten.index.Tensor")), True),
        (a_call("cpp_fused_0", eager=("aten.relu.default", "aten.native_layer_norm.default")), False),
        (a_call("cpp_fused_1"), True),
        (a_call("aten.addmm.default"), False),
        (a_call("aten.embedding_dense_backward.default"), False),
        (a_call("aten.slice_scatter.default"), False),
        (a_call("aten.linalg_vector_norm.default"), False),
        (a_call("mkldnn._linear_pointwise.default"), False),
    ],
    ids=lambda value: value.operator if isinstance(value, Call) else str(value),
)
def test_what_may_fail(call: Call, fails: bool) -> None:
    assert may_fail(call) == fails
