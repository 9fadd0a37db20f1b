"""Are a replay's outputs eager's outputs? Checked so that the answer cannot be void.

Kernels other than eager's round elsewhere, and in half precision as far from eager as a small mistake would be. So both
are held against the same computation in float64 (``nimble_core.reference``): a replay is right if it is as close to
that as eager is, up to a small factor.

Random weights can make a check meaningless: outputs that hardly depend on the input pass whatever a replay does, and
NaN equals nothing. So the check also measures how far eager's own outputs move between two inputs, and does not pass
unless that is well above the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nimble_core.candidates import EqualityCheck

if TYPE_CHECKING:
    import torch

    from nimble_core.program import Program

__all__ = ["TOLERANCE", "check_equality", "lowest_precision", "relative_error", "tolerance_for"]

TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 1e-3,
    "float16": 5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
}
"""Bound on ``‖replay - eager‖ / ‖eager‖``, where there is no float64 reference, by the lowest precision at work."""

_FLOOR = {
    "float64": 1e-12,
    "float32": 2e-5,
    "tf32": 2e-3,
    "float16": 4e-3,
    "bfloat16": 8e-3,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
}
"""Errors against float64 that pass however exact eager is. float32: what Winograd convolution makes. TF32 and float16:
weights that were folded and rounded once more; that error is the same everywhere, so that no pooling averages it as it
does eager's (2.2e-3 and 6.9e-4 on NASNet-A mobile in float16). bfloat16: two roundings; more would hide mistakes.
"""

_FACTOR = 3.0
_VOID_BELOW = 10.0
_PRECISIONS = tuple(TOLERANCE)
_REAL = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def relative_error(out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Worst over the tensors of ``‖out - reference‖ / ‖reference‖`` in float64; inf if one is not finite.

    Integer and boolean tensors count the share of elements that differ. Another number or shape of tensors is inf.
    """
    return max(_errors(out, reference), default=0.0) if _alike(out, reference) else math.inf


def _alike(out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> bool:
    return [a.shape for a in out] == [b.shape for b in reference]


def _errors(out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> list[float]:
    """``relative_error`` of each tensor."""
    return [_error(a, b) for a, b in zip(out, reference, strict=True)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if not (b.is_floating_point() or b.is_complex()):
        return float((a != b).double().mean()) if b.numel() else 0.0
    wide = getattr(_torch(), "complex128" if b.is_complex() else "float64")
    a, b = a.detach().to(wide), b.detach().to(wide)
    norm = float(b.norm())
    error = float((a - b).norm()) / (norm or 1.0)
    return error if math.isfinite(error) else math.inf


def tolerance_for(outputs: Sequence[torch.Tensor], lowest: str = "") -> float:
    """Bound for outputs of these dtypes: the loosest among them and ``lowest``; 0 if none holds floating numbers.

    Args:
        outputs: of eager.
        lowest: the least precise dtype of the calls before (``lowest_precision``); empty if unknown.
    """
    return TOLERANCE.get(_precision(outputs, lowest), 0.0)


def lowest_precision(program: Program) -> str:
    """The least precise floating dtype that a call of ``program`` reads or writes; empty if there is none.

    Under autocast this is what the products are computed in, whatever type the outputs have. O(accesses).

    >>> from nimble_core.program import Access, Call, Program, TensorRef
    >>> accesses = [Access(TensorRef(0, 0, (1,), (1,), dtype, 2), False) for dtype in ("float32", "float16", "int64")]
    >>> lowest_precision(Program((Call(0, "aten.mm.default", (), tuple(accesses)),), (), (), ()))
    'float16'
    """
    return _loosest(access.ref.dtype for call in program.calls for access in call.accesses)


def _loosest(dtypes: Iterable[str]) -> str:
    names = {_REAL.get(name, name) for name in dtypes}
    return max((name for name in _PRECISIONS if name in names), key=_PRECISIONS.index, default="")


def _precision(outputs: Sequence[torch.Tensor], lowest: str) -> str:
    """The lowest precision that counts for ``outputs``: theirs, ``lowest``, and that of float32 products."""
    floating = [tensor for tensor in outputs if tensor.is_floating_point() or tensor.is_complex()]
    if not floating:
        return ""
    found = _loosest([lowest, *(str(tensor.dtype).removeprefix("torch.") for tensor in floating)])
    return _products(floating[0].device.type) if found == "float32" else found


def _products(device: str) -> str:
    """What libraries may compute float32 products in, as the user allowed: ``"float32"``, ``"tf32"``, ``"bfloat16"``.

    The old switches (``allow_tf32``) show here too; reading those raises once the new ones were used.
    """
    backends = _torch().backends
    if device == "cuda":
        kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    else:
        kinds = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    short = {"tf32": "tf32", "bf16": "bfloat16"}
    return _loosest(["float32", *(short.get(kind.fp32_precision, "") for kind in kinds)])


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How one output fares.

    Args:
        error: of the replay, against what decides.
        bound: on ``error``.
        effect: how far eager moves between inputs.
        own: error of eager against float64; None if eager decides.
    """

    error: float
    bound: float
    effect: float
    own: float | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.bound

    @property
    def telling(self) -> bool:
        """Whether a replay that ignores its inputs could not have passed."""
        return self.effect > 0 and self.effect >= _VOID_BELOW * self.bound

    @property
    def margin(self) -> float:
        """Share of the bound that is used up."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


def check_equality(
    name: str,
    replay: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    cases: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    *,
    references: Sequence[Sequence[torch.Tensor] | None] | None = None,
    lowest: str = "",
) -> EqualityCheck:
    """Run ``replay`` on every case, twice round, and judge its outputs.

    With float64 references each output may be ``3 (1 + 4 / n)`` times as far from them as eager's own is (``n``
    elements: the rounding of few numbers may happen to be small), or two roundings of the lowest precision. An output
    in which eager has no digit right is compared with eager instead: being as far from the truth as eager proves
    nothing, and only fails to refute. Without references every output is compared with eager, by ``TOLERANCE``.

    Args:
        name: which replay.
        replay: from input tensors to output tensors.
        cases: ``(inputs, eager outputs)`` pairs, two at least, on different inputs.
        references: for each case the outputs in float64. Not used if one is None, not finite, or of another shape.
        lowest: the least precise dtype that the model computes in (``lowest_precision``); empty: that of its outputs.
    """
    eager = [outputs for _, outputs in cases]
    kept: list[tuple[int, Sequence[torch.Tensor]]] = []
    for case, (inputs, _) in [*enumerate(cases), *enumerate(cases)]:
        # Clones: a model that writes its inputs must not spoil the case for the next replay.
        kept.append((case, replay([tensor.clone() for tensor in inputs])))
    precision = _precision(eager[0], lowest)
    # Compared after the last run: an output overwritten by a later run shows.
    alike = all(_alike(out, eager[case]) for case, out in kept)
    errors = _worst([_errors(out, eager[case]) for case, out in kept]) if alike else [math.inf]
    verdicts: list[_Verdict] = []
    if not _finite(eager):
        reason = "void: eager's own outputs are not finite"
    elif not any(tensor.numel() for tensor in eager[0]):
        reason = "void: there are no outputs to compare"
    elif not alike:
        reason = "outputs differ from eager's in number or shape"
    else:
        verdicts = _verdicts(kept, eager, errors, _usable(references, eager), precision)
        reason = _reason(verdicts)
    by_truth = [one for one in verdicts if one.own is not None]
    nothing = _Verdict(0.0, TOLERANCE.get(precision, 0.0), 0.0)
    shown = max(by_truth or verdicts, key=lambda one: one.margin, default=nothing)
    return EqualityCheck(
        name,
        _written(max(errors, default=0.0)),
        _written(shown.bound),
        _written(max((one.effect for one in verdicts), default=0.0)),
        not reason,
        reason,
        eager_error=_written(shown.own or 0.0),
        reference_error=_written(shown.error) if by_truth else 0.0,
        reference="float64" if by_truth else "eager",
    )


def _verdicts(
    kept: Sequence[tuple[int, Sequence[torch.Tensor]]],
    eager: Sequence[Sequence[torch.Tensor]],
    errors: Sequence[float],
    truth: Sequence[Sequence[torch.Tensor]] | None,
    precision: str,
) -> list[_Verdict]:
    """One for each output; ``errors`` are its worst against eager."""
    tolerance, floor = TOLERANCE.get(precision, 0.0), _FLOOR.get(precision, 0.0)
    effects = _errors(eager[1], eager[0])
    beside_eager = [_Verdict(error, tolerance, effect) for error, effect in zip(errors, effects, strict=True)]
    if truth is None:
        return beside_eager
    theirs = _worst([_errors(out, truth[case]) for case, out in kept])
    owns = _worst([_errors(out, truth[case]) for case, out in enumerate(eager)])
    found = []
    for i, (error, own) in enumerate(zip(theirs, owns, strict=True)):
        bound = max(_FACTOR * (1 + 4 / max(eager[0][i].numel(), 1)) * own, floor)
        by_truth = _Verdict(error, bound, effects[i], own)
        noise = not by_truth.telling and beside_eager[i].telling
        found.append(beside_eager[i] if noise and beside_eager[i].right else by_truth)
    return found


def _worst(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [max(one) for one in zip(*rounds, strict=True)]


def _usable(
    references: Sequence[Sequence[torch.Tensor] | None] | None, eager: Sequence[Sequence[torch.Tensor]]
) -> list[Sequence[torch.Tensor]] | None:
    found = [one for one in references or () if one is not None]
    fits = len(found) == len(eager) and all(map(_alike, found, eager)) and _finite(found)
    return found if fits else None


def _finite(runs: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all(bool(_torch().isfinite(tensor).all()) for outputs in runs for tensor in outputs)


def _reason(verdicts: Sequence[_Verdict]) -> str:
    worst = max(verdicts, key=lambda one: one.margin)
    if not worst.right and worst.own is None:
        return f"outputs differ from eager's by {worst.error:.1e}, tolerance {worst.bound:.0e}"
    if not worst.right:
        own = f"eager's by {worst.own:.1e}"
        return f"outputs differ from float64's by {worst.error:.1e}, {own}: at most {worst.bound:.1e} would pass"
    if any(one.telling for one in verdicts):
        return ""
    most = max(verdicts, key=lambda one: one.effect)
    moved = f"eager's outputs move by only {most.effect:.1e} between inputs"
    return f"void: {moved}, too little for tolerance {most.bound:.0e}"


def _written(error: float) -> float:
    """A number that every file format can hold."""
    return min(error, 1e300)


def _torch() -> Any:
    import torch

    return torch
