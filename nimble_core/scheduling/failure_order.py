"""Which calls may fail on values, and the order that leaves what stays as eager leaves it when one does.

Where calls of several streams run by themselves, those of one stream go on for a while after a call of another failed.
Eager stops at the call that fails: what precedes it in program order has been done, what follows it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from nimble_core.algorithms.reachability import unconnected
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import Call, Program
from nimble_core.ir.schedule import Schedule, positions, stream_neighbours
from nimble_core.scheduling.live_bytes import uses_in_turn
from nimble_core.scheduling.liveness import happens_before
from nimble_core.scheduling.memory_planner import MemoryPlan, check_memory, plan_memory, reuse_hazards
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.scheduling.verify_schedule import check_schedule

__all__ = ["changes_what_stays", "checks_values", "failing_as_eager", "may_fail"]

_LIBRARIES = frozenset(("aten", "prims", "mkl", "mkldnn", "onednn"))
"""Whose operators are told by name; any other's may fail."""

# Without underscores at their ends.
_CHECKED = (
    # places out of range, or more or fewer than there are
    "embedding",
    "gather",
    "index",
    "masked_scatter",
    "max_unpool",
    "put",
    "repeat_interleave",
    "scatter",
    "searchsorted",
    "take",
    "unsafe_index",
    "unsafe_masked_index",
    # classes out of range, probabilities that are none
    "binary_cross_entropy",
    "binomial",
    "cross_entropy_loss",
    "ctc_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multinomial",
    "nll_loss",
    "one_hot",
    "poisson",
    # lengths and ranges
    "bincount",
    "hist",
    "jagged_to_padded",
    "nested",
    "pack_padded_sequence",
    "padded_dense_to_jagged",
    "segment_reduce",
    "sparse",
    # zero points and scales
    "fake_quantize",
    "make_per",
    "quantize",
    # matrices that have no such factors
    "cholesky",
    "inverse",
    "linalg",
    "lstsq",
    "lu_unpack",
    "svd",
    # what is there to fail
    "assert",
    "functional_assert",
)
_UNCHECKED = frozenset(
    (
        "binary_cross_entropy_with_logits",
        "linalg__powsum",
        "linalg_cross",
        "linalg_diagonal",
        "linalg_householder_product",
        "linalg_matmul",
        "linalg_matrix_exp",
        "linalg_multi_dot",
        "linalg_qr",
        "linalg_solve_triangular",
        "linalg_vecdot",
        "linalg_vector_norm",
    )
)
_DIVISIONS = frozenset(("div", "divide", "floor_divide", "fmod", "remainder"))
_CONVERTING = frozenset(("fill", "linspace", "logspace", "masked_fill"))
"""Given a number in a tensor, which the result's type may not hold."""
_DRAWS_BY_TENSOR = frozenset(
    (
        "aten.bernoulli.Tensor",
        "aten.bernoulli.default",
        "aten.bernoulli_.Tensor",
        "aten.normal.Tensor_Tensor",
        "aten.normal.float_Tensor",
    )
)


def may_fail(call: Call) -> bool:
    """Whether there may be values on which a call raises, shapes being what they were when it was recorded.

    Told by name: operators that take places, classes, lengths or probabilities from tensors, that factor matrices, that
    divide integers, and checks. An operator of nobody known may do anything; a compiled kernel what the eager calls
    may that it stands for. Not those of the backward: they take what their forward checked. Anything may run out of
    memory.

    >>> [may_fail(Call(0, name, (), ())) for name in ("aten.gather.default", "aten.mm.default", "mine.op.default")]
    [True, False, True]
    """
    known = call.operator.partition(".")[0] in _LIBRARIES
    names = [call.operator] if known or not call.origins else [origin.operator for origin in call.origins]
    return any(_may_fail(name, call) for name in names)


def _may_fail(operator: str, call: Call) -> bool:
    library, name, overload = (*operator.split("."), "", "")[:3]
    base = name.strip("_")
    if library in _LIBRARIES and base.endswith("_ex"):  # says in a result what others raise
        return ("check_errors", "True") in call.arguments
    if library not in _LIBRARIES or checks_values(operator):
        return True
    if base in _DIVISIONS:
        by_number = overload == "Scalar" or overload.startswith("Scalar_mode")
        return not by_number and any("int" in ref.dtype for ref in call.reads)
    if base in _CONVERTING:
        return "Tensor" in overload
    return operator in _DRAWS_BY_TENSOR


def checks_values(operator: str) -> bool:
    """Whether an operator of torch's raises on some values, told by its name alone.

    >>> checks_values("aten.embedding.default"), checks_values("aten.view.default")
    (True, False)
    """
    base = (*operator.split("."), "")[1].strip("_")
    return base not in _UNCHECKED and "backward" not in base and base.startswith(_CHECKED)


def changes_what_stays(call: Call, program: Program) -> bool:
    """Whether a call writes what is not made anew by each run: the model's own, inputs, a generator's state."""
    for access in call.accesses:
        role = program.storages[access.ref.storage].role
        if role == "generator" or (access.write and role != "intermediate" and access.ref.numel):
            return True
    return False


def failing_as_eager(program: Program, schedule: Schedule, memory: MemoryPlan) -> tuple[Schedule, MemoryPlan]:
    """``schedule`` with the order that makes a run in which a call fails leave what stays as eager leaves it.

    What changes something that stays comes after the calls before it, in program order, that may fail, and before those
    behind it. Streams stay as they are; within them the issue order changes only where it contradicts this.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of it.
        memory: a checked plan for both.

    Returns:
        A checked schedule, the same one where it has this order already, and memory that fits it: another plan only
        where reuse of bytes contradicts this order.

    Raises:
        ScheduleError: what is returned would race.

    Complexity:
        Linear in accesses where no order is missing; else that of
        :func:`~nimble_core.scheduling.policies.base.plan_streams` for an order of at most calls * streams pairs.
    """
    order, size = schedule.order, len(schedule.order)
    alone = schedule.streams < 2 and order == tuple(range(size))
    groups = [] if alone else _groups(program)
    if len(groups) < 2:
        return schedule, memory
    rank = positions(order)
    wanted = _pairs(groups, schedule.stream, rank)
    if not unconnected(happens_before(schedule), [(rank[u], rank[v]) for u, v in wanted]):
        return schedule, memory
    graph = build_graph(program)
    # Reuse names the last use on each stream, which has to stay the last.
    in_turn = (pair for calls in uses_in_turn(program, order) for pair in stream_neighbours(schedule.stream, calls))
    reuse = (*reuse_hazards(program, schedule, memory), *in_turn)
    barriers = [
        pair
        for barrier, (before, after) in enumerate(pairwise(groups), size)
        for pair in (*((u, barrier) for u in before), *((barrier, v) for v in after))
    ]
    # As much as does not contradict the order: the policy's own waits, then the memory plan.
    for kept in ((*schedule.syncs, *reuse), reuse, ()):
        found = _first_come((*rank, *[-1] * (len(groups) - 1)), (*graph.meg, *kept, *barriers))
        if found is not None:
            issued = [call for call in found if call < size]
            break
    else:  # not reached: program order is one
        raise AssertionError("program order contradicts itself")
    extra = (*kept, *_pairs(groups, schedule.stream, positions(issued)))
    guarded = plan_streams(graph, schedule.stream, policy=schedule.policy, order=issued, extra=extra)
    if reuse and not kept:
        place = [storage for storage, offset in enumerate(memory.offsets) if offset >= 0]
        memory = plan_memory(program, guarded, needs=memory.needs, place=place, alignment=memory.alignment)
    check_schedule(graph, guarded, program)
    return guarded, check_memory(program, guarded, memory)


def _groups(program: Program) -> list[list[int]]:
    """Calls, in program order, of which each has to come after all of the group before: those that may fail, those that
    change what stays, in turn; a call that does both by itself.
    """
    groups: list[list[int]] = []
    latest = (False, False)
    for call in program.calls:
        kind = may_fail(call), changes_what_stays(call, program)
        if kind == latest and not all(kind):
            if any(kind):
                groups[-1].append(call.index)
        elif any(kind):
            groups.append([call.index])
            latest = kind
    return groups


def _pairs(groups: Sequence[Sequence[int]], stream: Sequence[int], place: Sequence[int]) -> list[tuple[int, int]]:
    """The order of groups as pairs of calls: of the group before only the last on each stream matters."""
    pairs = []
    for before, after in pairwise(groups):
        last: dict[int, int] = {}
        for call in before:
            other = last.setdefault(stream[call], call)
            if place[other] < place[call]:
                last[stream[call]] = call
        pairs += [(u, v) for v in after for u in last.values()]
    return pairs


def _first_come(rank: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[int] | None:
    """Nodes in an order that keeps ``edges``, of those that can be next the one of lowest rank; None if there is none.

    >>> _first_come([1, 0, 2], [(0, 1)]), _first_come([0, 1], [(0, 1), (1, 0)])
    ([0, 1, 2], None)
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(rank)))
    graph.add_edges_from(edges)
    try:
        return list(networkx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except networkx.NetworkXUnfeasible:
        return None
