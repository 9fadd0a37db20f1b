"""Are a replay's outputs eager's outputs? Checked so that the answer cannot be void.

Kernels other than eager's round elsewhere, and in half precision as far from eager as a small mistake would be. So both
are held against the same computation in float64 (``float64_reference``): a replay is right if it is as close to
that as eager is, up to a small factor.

Random weights can make a check meaningless: outputs that hardly depend on the input pass whatever a replay does, and
NaN equals nothing. So the check also measures how far eager's own outputs move between two inputs, and does not pass
unless that is well above the bound, or well above what the replay is off.

Gradients need more. One that is zero in exact arithmetic (of a convolution's bias before BatchNorm, of the keys' bias
in attention) consists of rounding only, and a branch that rounding decides (ReLU, max pooling) moves a gradient by
orders of magnitude more than rounding itself. So what rounding may do is measured: eager runs once more with every
result moved by about its last place (``rounding_noise.perturbed``), and how far that moves a tensor is what an
honest replay may be off as well: Monte Carlo arithmetic (Parker 1997) at the level of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.distances import Gap, all_finite, comparable, finite, gaps, numbers

if TYPE_CHECKING:
    import torch

    from nimble_core.ir.program import Program

__all__ = [
    "DROWNED",
    "TOLERANCE",
    "check_equality",
    "doubt",
    "lowest_precision",
    "product_precision",
    "relative_error",
    "tolerance_for",
    "working_precision",
]

TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 1e-3,
    "float16": 5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 1e-1,
    "float8_e4m3fnuz": 1e-1,
    "float8_e5m2": 2e-1,
    "float8_e5m2fnuz": 2e-1,
    "float8_e8m0fnu": 8e-1,
}
"""Bound on ``‖replay - eager‖ / ‖eager‖``, where there is no float64 reference, by the lowest precision at work."""

DROWNED = "void: eager's outputs move by only"
"""How the reason of a check begins that says that inputs matter too little for its tolerance."""

_FLOOR = {
    "float64": 1e-12,
    "float32": 2e-5,
    "tf32": 2e-3,
    "float16": 4e-3,
    "bfloat16": 8e-3,
    "float8_e4m3fn": 1e-1,
    "float8_e4m3fnuz": 1e-1,
    "float8_e5m2": 2e-1,
    "float8_e5m2fnuz": 2e-1,
    "float8_e8m0fnu": 8e-1,
}
"""Errors against float64 that pass however exact eager is. float32: what Winograd convolution makes. TF32 and float16:
weights that were folded and rounded once more; that error is the same everywhere, so that no pooling averages it as it
does eager's (2.2e-3 and 6.9e-4 on NASNet-A mobile in float16). bfloat16: two roundings; more would hide mistakes.
float8: 1.6 times what one rounding may do at most, which is a half in e8m0fnu, of powers of two alone.
"""

_FACTOR = 3.0
_ROOM = 100.0
_VOID_BELOW = 10.0
_STEP_FLOOR = _FLOOR | {"float32": 1e-4}
"""``_FLOOR`` for training steps: one branch among thousands that rounding decides otherwise."""
_PEAK = 4.0
"""How much wider bounds on single elements are than those on norms: greatest elements of errors scatter more, above all
where rounding decides branches."""
_PRECISIONS = tuple(TOLERANCE)
_SCALES = "float8_e8m0fnu"
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
    apart, sizes = gaps(reference, out), gaps(reference)
    return [finite(gap.norm / (size.norm or 1.0)) for gap, size in zip(apart, sizes, strict=True)]


def tolerance_for(outputs: Sequence[torch.Tensor], lowest: str = "") -> float:
    """Bound for outputs of these dtypes: the loosest among them and ``lowest``; 0 if none holds floating numbers.

    Args:
        outputs: of eager.
        lowest: the least precise dtype of the calls before (``lowest_precision``); empty if unknown.
    """
    return TOLERANCE.get(working_precision(outputs, lowest), 0.0)


def lowest_precision(program: Program) -> str:
    """The least precise floating dtype that a call of ``program`` reads or writes; empty if there is none.

    Under autocast this is what the products are computed in, whatever type the outputs have. e8m0fnu does not count:
    it holds scales, and how they are rounded is undone where numbers are divided by them first. O(accesses).

    >>> from nimble_core.ir.program import Access, Call, Program, TensorRef
    >>> accesses = [Access(TensorRef(0, 0, (1,), (1,), dtype, 2), False) for dtype in ("float32", "float16", "int64")]
    >>> lowest_precision(Program((Call(0, "aten.mm.default", (), tuple(accesses)),), (), (), ()))
    'float16'
    """
    dtypes = (access.ref.dtype for call in program.calls for access in call.accesses)
    return _loosest(dtype for dtype in dtypes if dtype != _SCALES)


def _loosest(dtypes: Iterable[str]) -> str:
    names = {_REAL.get(name, name) for name in dtypes}
    return max((name for name in _PRECISIONS if name in names), key=_PRECISIONS.index, default="")


def working_precision(outputs: Sequence[torch.Tensor], lowest: str) -> str:
    """The lowest precision that counts for ``outputs``: theirs, ``lowest``, and that of float32 products."""
    floating = [tensor for tensor in outputs if tensor.is_floating_point() or tensor.is_complex()]
    if not floating:
        return ""
    found = _loosest([lowest, *(str(tensor.dtype).removeprefix("torch.") for tensor in floating)])
    return product_precision(floating[0].device.type) if found == "float32" else found


def product_precision(device: str) -> str:
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
        name: of the output; empty if it has none.
        peak: whether these are errors of single elements, relative to the greatest, and not of norms.
    """

    error: float
    bound: float
    effect: float
    own: float | None = None
    name: str = ""
    peak: bool = False

    @property
    def right(self) -> bool:
        return self.error <= self.bound

    @property
    def telling(self) -> bool:
        """Whether a replay that ignores its inputs could not have passed."""
        return self.effect > 0 and self.effect >= _VOID_BELOW * self.bound

    @property
    def followed(self) -> bool:
        """Whether a replay that ignores its inputs could not have come so near: as telling, by a tighter bound."""
        return self.effect > 0 and self.effect >= _VOID_BELOW * self.error

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
    perturbed: Sequence[Sequence[torch.Tensor]] | None = None,
    names: Sequence[str] = (),
) -> EqualityCheck:
    """Run ``replay`` on every case, twice round, and judge its outputs.

    With float64 references each output may be ``3 (1 + 4 / n)`` times as far from them as eager's own is (``n``
    elements: the rounding of few numbers may happen to be small), or two roundings of the lowest precision. An output
    in which eager has no digit right is compared with eager instead: being as far from the truth as eager proves
    nothing, and only fails to refute. Without references every output is compared with eager, by ``TOLERANCE``. Single
    elements are held to four times these bounds, relative to the greatest: a few stale ones among millions are nothing
    to a norm.

    With ``perturbed`` outputs (a training step's) what the perturbation did to a tensor counts like eager's own error,
    if it is more. All is measured against the greater of the truth's and eager's norm, so that tensors of pure rounding
    count as such.

    Of the outputs at least one has to move between inputs by ten times its bound, or ten times what the replay is off
    there. Of a training step only the first counts.

    Where eager is infinite, a replay has to be as infinite; what is compared is the rest. NaN makes the check void.

    Args:
        name: which replay.
        replay: from input tensors to output tensors.
        cases: ``(inputs, eager outputs)`` pairs, two at least, on different inputs.
        references: for each case the outputs in float64. Not used if one is None, not finite, or of another shape.
        lowest: the least precise dtype that the model computes in (``lowest_precision``); empty: that of its outputs.
        perturbed: for each case eager's outputs, each call's result having been moved by about its last place. Not used
            if not finite, or of another shape.
        names: what messages call the outputs (``"gradient of conv.weight"``); none by default.
    """
    eager = [outputs for _, outputs in cases]
    kept: list[tuple[int, Sequence[torch.Tensor]]] = []
    for case, (inputs, _) in [*enumerate(cases), *enumerate(cases)]:
        # Clones: a model that writes its inputs must not spoil the case for the next replay.
        kept.append((case, replay([tensor.clone() for tensor in inputs])))
    precision = working_precision(eager[0], lowest)
    # Compared after the last run: an output overwritten by a later run shows.
    alike = all(_alike(out, eager[case]) for case, out in kept)
    # Masked logits are infinite, and so is what pads the sums that attention saves: there replays have to be, too.
    eager_finite = _finite(eager)
    infinite = None if eager_finite or not alike else [_infinities(outputs) for outputs in eager]
    alike_there = decided = True
    if infinite is not None:
        alike_there = all(_alike_at(infinite[case], out, eager[case]) for case, out in kept)
        others = [*enumerate(references or ()), *enumerate(perturbed or ())]
        known = [(case, one) for case, one in others if one is not None and _alike(one, eager[case])]
        # Rounding may decide what overflows, in float16 and float8 most of all, or whether a logarithm is of zero.
        decided = not precision.startswith(("float16", "float8"))
        decided = decided and all(_alike_at(infinite[case], one, eager[case]) for case, one in known)
        kept = [(case, _without(infinite[case], out)) for case, out in kept]
        eager = [_without(where, outputs) for where, outputs in zip(infinite, eager, strict=True)]
        eager_finite = _finite(eager)
    errors: list[float] | None = None
    verdicts: list[_Verdict] = []
    if not eager_finite:
        reason = "void: eager's own outputs are not finite"
    elif not any(tensor.numel() for tensor in eager[0]):
        reason = "void: there are no outputs to compare"
    elif not alike:
        reason = "outputs differ from eager's in number or shape"
    elif not alike_there:
        reason = f"{'' if decided else 'void: '}outputs differ from eager's in which numbers are infinite"
    else:
        truth, moved = (_usable(runs, eager, infinite) for runs in (references, perturbed))
        if moved is None or truth is not None:
            errors = _worst([_errors(out, eager[case]) for case, out in kept])
        if moved is None:
            verdicts = _verdicts(kept, eager, errors or [], truth, precision)
        else:
            verdicts = _verdicts_by_perturbation(kept, eager, truth, moved, precision)
            if truth is None:
                errors = [max(verdicts, key=lambda one: one.margin).error]
            else:  # what is rounding only is as far from eager as it is large: no error to show
                pairs = zip(errors or [], verdicts, strict=True)
                errors = [error for error, one in pairs if one.telling or not one.right]
        if names:
            verdicts = [replace(one, name=name) for one, name in zip(verdicts, names, strict=True)]
        # Of a training step the loss, which hardly moves, would answer for gradients that rounding drowns.
        shown_by = [one.followed if moved is None else one.telling for one in verdicts]
        reason = _reason(verdicts, shown=any(shown_by))
    if errors is None:
        errors = _worst([_errors(out, eager[case]) for case, out in kept]) if alike else [math.inf]
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
    """One for each output, of its norm, or of its single elements where only they are wrong; ``errors`` are its worst
    against eager.
    """
    tolerance, floor = TOLERANCE.get(precision, 0.0), _FLOOR.get(precision, 0.0)
    effects = _errors(eager[1], eager[0])
    beside_eager = [_Verdict(error, tolerance, effect) for error, effect in zip(errors, effects, strict=True)]
    if truth is None:
        _, peaks = _relative(kept, eager)
        single = [
            _Verdict(peak, _PEAK * tolerance, effect, peak=True) for peak, effect in zip(peaks, effects, strict=True)
        ]
        return [
            by_peak if by_norm.right and not by_peak.right else by_norm
            for by_norm, by_peak in zip(beside_eager, single, strict=True)
        ]
    theirs, peaks = _relative(kept, truth)
    owns, own_peaks = _relative([*enumerate(eager)], truth)
    found = []
    for i, (error, own) in enumerate(zip(theirs, owns, strict=True)):
        bound = max(doubt(own, eager[0][i].numel()), floor)
        by_truth = _Verdict(error, bound, effects[i], own)
        noise = not by_truth.telling and beside_eager[i].telling
        most = _PEAK * max(doubt(own_peaks[i], eager[0][i].numel()), floor)
        by_peak = _Verdict(peaks[i], most, effects[i], own_peaks[i], peak=True)
        if noise and beside_eager[i].right:
            found.append(beside_eager[i])
        else:
            found.append(by_peak if by_truth.right and not by_peak.right else by_truth)
    return found


def _relative(
    kept: Sequence[tuple[int, Sequence[torch.Tensor]]], target: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[float], list[float]]:
    """How far each output is off, worst of all runs: by its norm, and at an element, relative to the greatest."""
    sizes = [gaps(outputs) for outputs in target]
    runs = [list(zip(gaps(target[case], out), sizes[case], strict=True)) for case, out in kept]
    norms = [[finite(apart.norm / (size.norm or 1.0)) for apart, size in one] for one in runs]
    return _worst(norms), _worst([[apart.peak / (size.peak or 1.0) for apart, size in one] for one in runs])


def _verdicts_by_perturbation(
    kept: Sequence[tuple[int, Sequence[torch.Tensor]]],
    eager: Sequence[Sequence[torch.Tensor]],
    truth: Sequence[Sequence[torch.Tensor]] | None,
    moved: Sequence[Sequence[torch.Tensor]],
    precision: str,
) -> list[_Verdict]:
    """One for each output: of its norm, or of its single elements where only they are wrong."""
    floor = (TOLERANCE if truth is None else _STEP_FLOOR).get(precision, 0.0)
    target = eager if truth is None else truth
    sizes = [gaps(outputs) for outputs in (eager if truth is None else (*truth, *eager))]
    owns = [] if truth is None else [gaps(out, truth[case]) for case, out in enumerate(eager)]
    noises = [gaps(out, eager[case]) for case, out in enumerate(moved)]
    errors = [gaps(out, target[case]) for case, out in kept]
    effects = gaps(eager[1], eager[0])
    found = []
    for i, tensor in enumerate(eager[0]):
        both = []
        for peak in (False, True):

            def most(runs: Sequence[Sequence[Gap]], peak: bool = peak, output: int = i) -> float:
                return max((run[output].peak if peak else run[output].norm for run in runs), default=0.0)

            # One scale for all cases: the norm of what is rounding only says little in any one of them.
            largest = most(sizes)
            scale = largest or 1.0
            own, noise = most(owns) / scale, most(noises) / scale
            bound = max(doubt(max(own, noise), tensor.numel(), 1.0, precision), floor if largest else 0.0)
            own_or_none = None if truth is None else own
            effect = most([effects]) / scale
            bound *= _PEAK if peak else 1.0
            both.append(_Verdict(most(errors) / scale, bound, effect, own_or_none, peak=peak))
        by_norm, by_peak = both
        found.append(by_peak if by_norm.right and not by_peak.right else by_norm)
    return found


def doubt(error: float, count: int, size: float = math.inf, precision: str = "") -> float:
    """How far off an honest tensor may be, where a known honest one is off by ``error``.

    Three times as far, more for few elements: their rounding may happen to be small. Where it is half as large as the
    tensor, rounding is most of what there is, and what sums leave of zero is each library's own: a hundred times as far
    then, since ten times another's noise is nothing unusual and some state holds its square. Not in half precision,
    where rounding as large as a gradient says less.

    Args:
        error: of the known one, a norm.
        count: elements.
        size: norm of the tensor itself.
        precision: that it was computed in.

    >>> doubt(1e-6, 1_000_000) < 3.1e-6 < doubt(1e-6, 1) < 1.6e-5
    True
    >>> doubt(2.0, 1_000_000, size=1.0, precision="float32") > 600
    True
    """
    room = _ROOM if 2 * error >= size and precision in ("float64", "float32", "tf32") else 1.0
    return room * _FACTOR * (1 + 4 / max(count, 1)) * error


def _worst(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [max(one) for one in zip(*rounds, strict=True)]


def _usable(
    references: Sequence[Sequence[torch.Tensor] | None] | None,
    eager: Sequence[Sequence[torch.Tensor]],
    infinite: Sequence[Sequence[torch.Tensor]] | None,
) -> list[Sequence[torch.Tensor]] | None:
    found = [one for one in references or () if one is not None]
    if len(found) != len(eager) or not all(map(_alike, found, eager)):
        return None
    if infinite is not None:
        found = [_without(where, outputs) for where, outputs in zip(infinite, found, strict=True)]
    return found if _finite(found) else None


def _infinities(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where each is infinite; complex numbers that are stay, which makes checks void."""
    nowhere = _torch().zeros_like
    return [nowhere(one, dtype=_torch().bool) if one.is_complex() else comparable(one).isinf() for one in outputs]


def _alike_at(where: Sequence[torch.Tensor], out: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> bool:
    pairs = zip(where, map(comparable, out), map(comparable, reference), strict=True)
    return all(numbers([((a == b) | ~at).all() for at, a, b in pairs]))


def _without(where: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``outputs`` with zeros ``where`` eager is infinite."""
    return [comparable(one).masked_fill(at, 0) for at, one in zip(where, outputs, strict=True)]


def _finite(runs: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all_finite(tensor for outputs in runs for tensor in outputs)


def _reason(verdicts: Sequence[_Verdict], *, shown: bool) -> str:
    worst = max(verdicts, key=lambda one: one.margin)
    subject = f"{worst.name} differs" if worst.name else "outputs differ"
    where = " at one element" if worst.peak else ""
    if not worst.right and worst.own is None:
        return f"{subject} from eager's{where} by {worst.error:.1e}, tolerance {worst.bound:.0e}"
    if not worst.right:
        own = f"eager's by {worst.own:.1e}"
        return f"{subject} from float64's{where} by {worst.error:.1e}, {own}: at most {worst.bound:.1e} would pass"
    if shown:
        return ""
    most = max(verdicts, key=lambda one: one.effect)
    return f"{DROWNED} {most.effect:.1e} between inputs, too little for tolerance {most.bound:.0e}"


def _written(error: float) -> float:
    """A number that every file format can hold."""
    return min(error, 1e300)


def _torch() -> Any:
    import torch

    return torch
