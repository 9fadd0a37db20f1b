"""Which storages of a recording are buffers of the replay, in one arena at planned offsets.

Buffers are results of operators with a known ``out=`` variant, and what is allocated between calls. An operator and its
variant here share one kernel, so the bits are the same. Any other operator allocates its own result: many of torch's
variants leave a result unwritten, resize it, or write beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.recording import Recording, Slot, Step

__all__ = ["OUT_VARIANTS", "can_fill", "direct", "filling_step", "lay_out_buffers", "made_by_step"]

_UNARY = ("cos", "erf", "exp", "gelu", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh")

OUT_VARIANTS = {
    **{f"aten::{name}": "out" for name in _UNARY},
    "aten::_log_softmax": "out",
    "aten::_softmax": "out",
    "aten::add.Tensor": "out",
    "aten::addmm": "out",
    "aten::baddbmm": "out",
    "aten::bmm": "out",
    "aten::cat": "out",
    "aten::div.Tensor": "out",
    "aten::maximum": "out",
    "aten::mean.dim": "out",
    "aten::minimum": "out",
    "aten::mm": "out",
    "aten::mul.Tensor": "out",
    "aten::pow.Tensor_Scalar": "Tensor_Scalar_out",
    "aten::sub.Tensor": "out",
    "aten::sum.dim_IntList": "IntList_out",
}
"""Overload that fills a given tensor, by the operator's qualified name."""


def lay_out_buffers(recording: Recording) -> Layout:
    """Return the storages that calls can fill, and those allocated between calls, as a layout.

    Calls are given their results and allocate none of these: there are no blocks. Outputs belong to the caller.

    Complexity:
        Linear in steps.
    """
    program, storages = recording.program, recording.program.storages
    calls = len(program.calls)
    outputs = {recording.storage_of[slot] for slot in recording.outputs}
    found: set[int] = set()
    for step, fresh in zip(recording.steps, made_by_step(recording), strict=True):
        if step.call is None or (fresh.isdisjoint(outputs) and can_fill(step)):
            found |= fresh - outputs
    buffers = sorted(one for one in found if storages[one].nbytes and storages[one].role == "intermediate")
    return Layout(
        blocks=((),) * calls,
        arena={storage: storages[storage].nbytes for storage in buffers},
        scratch=(0,) * calls,
        beside_nbytes=sum(program.inputs[position].nbytes for position in recording.written_inputs),
    )


def made_by_step(recording: Recording) -> list[set[int]]:
    """Return the storages that each step makes."""
    storage_of = recording.storage_of
    known = {storage_of[slot] for slot in (*recording.given, *recording.inputs)}
    made = []
    for step in recording.steps:
        fresh = {storage_of[slot] for slot in step.outputs if slot >= 0} - known
        known |= fresh
        made.append(fresh)
    return made


def can_fill(step: Step) -> bool:
    """Return whether ``step`` is a call whose one result can be written to a given tensor."""
    return step.call is not None and len(step.outputs) == 1 and step.outputs[0] >= 0 and _variant(step.func) is not None


def filling_step(step: Step) -> Step:
    """Rewrite ``step``, for which ``can_fill`` holds, to fill the tensor of its output slot."""
    slot, fill = step.outputs[0], direct(_variant(step.func))
    return Step(fill, step.args, (*step.kwargs, ("out", Slot(slot))), (), (*step.reads, slot), step.call)


def direct(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls an operator without torch's Python around it."""
    return func._op if isinstance(func, OpOverload) else func


@cache
def _variant(func: Callable[..., Any]) -> Any:
    """Return the operator that fills a given tensor as ``func`` computes it; None if none is known to."""
    if not isinstance(func, OpOverload) or func.name() not in OUT_VARIANTS:
        return None
    return getattr(func.overloadpacket, OUT_VARIANTS[func.name()])
