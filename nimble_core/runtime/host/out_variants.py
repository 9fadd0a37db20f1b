"""Operators whose result can be written to planned memory: those with a known ``out=`` variant.

An operator and its variant here share one kernel, so the bits are the same. Any other operator allocates its own
result: many of torch's variants leave a result unwritten, resize it, or write beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from nimble_core.runtime.host.entry_points import cheapest_entry
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.recording import Slot, Step

__all__ = ["OUT_VARIANTS", "can_fill", "filling_step"]

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


def can_fill(step: Step) -> bool:
    """Return whether ``step`` is a call whose one result can be written to a given tensor."""
    return step.call is not None and len(step.outputs) == 1 and step.outputs[0] >= 0 and _variant(step.func) is not None


def filling_step(step: Step, args: list[Any], kwargs: dict[str, Any], result: Any) -> Step:
    """Rewrite ``step``, for which ``can_fill`` holds, to fill the tensor of its output slot.

    Args:
        step: a call.
        args: its arguments in one run.
        kwargs: likewise.
        result: what it returned then.
    """
    slot = step.outputs[0]
    entry = cheapest_entry(_variant(step.func), args, kwargs | {"out": result}, result)
    return Step(entry, step.args, (*step.kwargs, ("out", Slot(slot))), (), (*step.reads, slot), step.call)


@cache
def _variant(func: Callable[..., Any]) -> Any:
    """Return the operator that fills a given tensor as ``func`` computes it; None if none is known to."""
    if not isinstance(func, OpOverload) or func.name() not in OUT_VARIANTS:
        return None
    return getattr(func.overloadpacket, OUT_VARIANTS[func.name()])
