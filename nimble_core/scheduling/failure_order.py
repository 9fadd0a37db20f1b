"""Order calls so that a replay which fails midway leaves parameters and buffers as eager does.

Eager stops at the call that fails: what precedes it in program order has been done, what follows it has not. With
several streams, other streams go on for a while after a call has failed.
"""

from __future__ import annotations

from itertools import pairwise

from nimble_core.algorithms.reachability import unconnected
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import Call, Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import happens_before
from nimble_core.scheduling.memory_planner import MemoryPlan, check_memory, plan_memory
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
    """Whether a call may raise for some values, at the shapes it was recorded with.

    Decided by the operator's name: those that take indices, classes, lengths or probabilities from tensors, factor
    matrices, divide integers or check something. An unknown operator may always fail, a compiled kernel if one of the
    eager calls that it replaces may. Operators of the backward do not: their forward checked the values. Running out of
    memory is not considered.

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
    """Whether the name of one of torch's operators says that it raises on some values.

    >>> checks_values("aten.embedding.default"), checks_values("aten.view.default")
    (True, False)
    """
    base = (*operator.split("."), "")[1].strip("_")
    return base not in _UNCHECKED and "backward" not in base and base.startswith(_CHECKED)


def changes_what_stays(call: Call, program: Program) -> bool:
    """Whether a call writes what outlives a run: parameters, buffers, inputs, a generator's state."""
    for access in call.accesses:
        role = program.storages[access.ref.storage].role
        if role == "generator" or (access.write and role != "intermediate" and access.ref.numel):
            return True
    return False


def failing_as_eager(program: Program, schedule: Schedule, memory: MemoryPlan) -> tuple[Schedule, MemoryPlan]:
    """Add the order with which a run that fails leaves lasting tensors as eager leaves them.

    A call that writes a buffer, a parameter or another lasting tensor runs after all earlier calls that may fail, and
    before all later ones, in program order. Streams stay as they are. Where order is missing, calls are issued in
    program order; memory is planned anew if they were not before.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of it.
        memory: a checked plan for both.

    Returns:
        A checked schedule and memory that fits it: the same ones where they have this order already.

    Raises:
        ScheduleError: what is returned would race.

    Complexity:
        Linear in accesses where no order is missing; else that of
        :func:`~nimble_core.scheduling.policies.base.plan_streams` for an order of at most calls * streams pairs.
    """
    in_turn = tuple(range(len(schedule.order)))
    alone = schedule.streams < 2 and schedule.order == in_turn
    groups = [] if alone else _groups(program)
    if len(groups) < 2:
        return schedule, memory
    wanted = [
        (u, v)
        for before, after in pairwise(groups)
        for u in {schedule.stream[call]: call for call in before}.values()  # the last call on each stream
        for v in after
    ]
    same_order = schedule.order == in_turn
    if same_order and not unconnected(happens_before(schedule), wanted):
        return schedule, memory
    graph = build_graph(program)
    extra = [*wanted, *schedule.syncs] if same_order else wanted  # the memory given may rely on waits of its own
    guarded = plan_streams(graph, schedule.stream, policy=schedule.policy, order=in_turn, extra=extra)
    check_schedule(graph, guarded, program)
    if not same_order:
        place = [storage for storage, offset in enumerate(memory.offsets) if offset >= 0]
        memory = plan_memory(program, guarded, needs=memory.needs, place=place, alignment=memory.alignment)
    return guarded, check_memory(program, guarded, memory)


def _groups(program: Program) -> list[list[int]]:
    """Group the calls that may fail and those that change what stays, in turn and in program order.

    Each call of a group runs after all calls of the group before. A call that does both is a group of its own.
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
