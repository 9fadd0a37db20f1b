"""Are a replay's outputs eager's outputs? Checked so that the answer cannot be void.

Random weights can make a check meaningless: outputs that hardly depend on the input pass whatever a replay does, and
NaN equals nothing. So the check also measures how far eager's own outputs move between two inputs, and does not pass
unless that is well above the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nimble_core.candidates import EqualityCheck

if TYPE_CHECKING:
    import torch

__all__ = ["TOLERANCE", "check_equality", "relative_error", "tolerance_for"]

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Bound on ``‖replay - eager‖ / ‖eager‖`` by the outputs' dtype; float32 under TF32 takes ``TF32_TOLERANCE``."""

TF32_TOLERANCE = 1e-3
VOID_BELOW = 10.0


def relative_error(out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Worst over the tensors of ``‖out - reference‖ / ‖reference‖`` in float64; inf if one is not finite.

    Integer and boolean tensors count the share of elements that differ. Another number or shape of tensors is inf.
    """
    if [a.shape for a in out] != [b.shape for b in reference]:
        return math.inf
    worst = 0.0
    for a, b in zip(out, reference, strict=True):
        if not (b.is_floating_point() or b.is_complex()):
            error = float((a != b).double().mean()) if b.numel() else 0.0
        else:
            wide = "complex128" if b.is_complex() else "float64"
            a, b = a.detach().to(getattr(_torch(), wide)), b.detach().to(getattr(_torch(), wide))
            norm = float(b.norm())
            error = float((a - b).norm()) / norm if norm else float((a - b).norm())
        if not math.isfinite(error):
            return math.inf
        worst = max(worst, error)
    return worst


def tolerance_for(outputs: Sequence[torch.Tensor]) -> float:
    """Bound for outputs of these dtypes: the loosest among them."""
    torch = _torch()
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    bounds = []
    for tensor in outputs:
        name = str(tensor.dtype).removeprefix("torch.")
        on_gpu = tensor.device.type == "cuda"
        bounds.append(TF32_TOLERANCE if name == "float32" and tf32 and on_gpu else TOLERANCE.get(name, 0.0))
    return max(bounds, default=0.0)


def check_equality(
    name: str,
    replay: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    cases: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
) -> EqualityCheck:
    """Run ``replay`` on every case, twice round, and compare with eager's outputs.

    Args:
        name: which replay.
        replay: from input tensors to output tensors.
        cases: ``(inputs, eager outputs)`` pairs, two at least, on different inputs.
    """
    references = [outputs for _, outputs in cases]
    tolerance = tolerance_for(references[0])
    effect = relative_error(references[1], references[0])
    error = 0.0
    kept: list[tuple[Any, Any]] = []
    for inputs, reference in [*cases, *cases]:
        # Clones: a model that writes its inputs must not spoil the case for the next replay.
        kept.append((replay([tensor.clone() for tensor in inputs]), reference))
    for out, reference in kept:  # compared at the end: an output overwritten by a later run shows
        error = max(error, relative_error(out, reference))
    finite = all(bool(_torch().isfinite(tensor).all()) for outputs in references for tensor in outputs)
    if not finite:
        reason = "void: eager's own outputs are not finite"
    elif not any(tensor.numel() for tensor in references[0]):
        reason = "void: there are no outputs to compare"
    elif effect < VOID_BELOW * tolerance or not effect:
        moved = f"eager's outputs move by only {effect:.1e} between inputs"
        reason = f"void: {moved}, too little for tolerance {tolerance:.0e}"
    elif error > tolerance:
        reason = f"outputs differ from eager's by {error:.1e}, tolerance {tolerance:.0e}"
    else:
        reason = ""
    bounded = error if math.isfinite(error) else 1e300
    return EqualityCheck(name, bounded, tolerance, effect if math.isfinite(effect) else 0.0, not reason, reason)


def _torch() -> Any:
    import torch

    return torch
