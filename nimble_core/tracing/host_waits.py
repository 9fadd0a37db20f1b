"""Calls that the host would wait for: why, and what to do instead."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from nimble_core.tracing import unread_values
from nimble_core.tracing.operator_traits import copies_to_host, shape_depends_on_data, traits_of
from nimble_core.tracing.provenance import issued_in, running_module
from nimble_core.tracing.recording import flat_tensors

__all__ = ["FIXED_SHAPE", "ON_DEVICE", "TO_HOST", "WAITS", "experts_fix", "reason_to_wait"]

WAITS = "the host would have to wait for the device, and a replay cannot"
ON_DEVICE = "compute it on the device, or pass it as an input"
FIXED_SHAPE = "use a form with a fixed shape (torch.where, a mask, a size argument)"
TO_HOST = "copies from the device to the host", "keep the tensor on the device, or copy it outside the model"

_CHOOSE = "compute both and choose: torch.where(condition, a, b)"
_WRITES_WHERE_TRUE = (
    "writes where a mask is true, and counts these places",
    "use torch.where(mask, values of x's shape, x), or one value, with the mask on the device",
)
_EXPERTS = (
    'model.set_experts_implementation("batched_mm") before preparing, or from_pretrained(..., '
    'experts_implementation="batched_mm"): the host need not know which experts are chosen'
)
_FIX_BY_FILE = {
    torch.nn.modules.batchnorm.__file__: "give momentum a number: with None torch reads how many batches there were",
    torch.distributions.distribution.__file__: "give distributions validate_args=False: else torch looks at all values",
    unread_values.__file__: "give F.one_hot its number of classes: F.one_hot(x, num_classes=n)",
}
"""Remedies where a file of torch, whose lines users cannot change, asks for a value."""


def reason_to_wait(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, frame: FrameType
) -> tuple[str, str] | None:
    """Say why the host waits for this call, and what to do instead; None if it does not.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        device: type of the device that is recorded.
        frame: that calls it.
    """
    traits, away = traits_of(func), device != "cpu"
    if traits.looks or (away and traits.name == "aten::_linalg_check_errors"):
        condition = isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bool
        fix = next((fix for file, fix in _FIX_BY_FILE.items() if issued_in(frame, file)), "")
        return "gives the host a value computed on the device", fix or (_CHOOSE if condition else ON_DEVICE)
    if shape_depends_on_data(func, args, kwargs):
        if not traits.puts:
            return "has an output whose shape depends on data", FIXED_SHAPE
        return _WRITES_WHERE_TRUE if away else None  # on the host, nobody waits: the result's shape is known
    if away and copies_to_host(func, flat_tensors([*args, *kwargs.values()]), args, kwargs):
        return TO_HOST
    return None


def experts_fix(frame: FrameType) -> str:
    """Return the remedy for a mixture of experts of Hugging Face whose host waits for what is chosen; else empty.

    ``"eager"`` loops over the chosen experts. ``"grouped_mm"`` does not, but where torch has no kernel for it (float32)
    it reads on the host how many were chosen.
    """
    module = running_module(frame)
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", "")
    return _EXPERTS if hasattr(module, "_apply_gate") and chosen != "batched_mm" else ""
