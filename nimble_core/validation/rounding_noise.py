"""Is a training step right? What rounding alone does to it, and whether what it wrote is what eager writes.

A step's loss, outputs and gradients are compared by ``equality``; parameters, running statistics and
optimizer moments here, by their updates: a step that updates nothing leaves parameters that are nearly right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.torch_compat.dispatch import TorchDispatchMode, pytree
from nimble_core.tracing.recording import flat_tensors
from nimble_core.validation.distances import finite, numbers
from nimble_core.validation.equality import TOLERANCE, doubt, product_precision, working_precision

__all__ = ["Update", "check_updates", "perturbed"]

_MOVE = {
    torch.float64: 2.0**-46,
    torch.float32: 2.0**-17,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""How far results are moved at most, relative to each element. Half precision: by one rounding. float32 and float64: by
128, since these also sum in their own type, in an order that is the library's, and decide so few branches by rounding
that most honest runs show none, while the next one's gradients are off by 1e-3."""

_TF32 = 2.0**-11
_PRODUCTS = ("convolution", "mm", "attention")
_COPIES = ("aten::clone", "aten::_to_copy", "aten::lift_fresh_copy")
_SHIFTED = ("batch_norm", "group_norm", "instance_norm")

_FLIPS = 4
_VOID_BELOW = 10.0


@contextmanager
def perturbed(seed: int = 0) -> Iterator[None]:
    """Inside, each floating result of a call is moved at random by about its last place, forward and backward.

    What comes out differs from a plain run by what rounding may do (and by what the device leaves to chance): the scale
    on which gradients and updates can be compared, also of those that are zero in exact arithmetic. In that, it is the
    random rounding of Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point
    arithmetic", 1997), for whole operators.

    What subtracts a channel's mean (BatchNorm) is also shifted, alike in all that share the mean: by the mean's own
    rounding, which is what a sum over the channel then consists of. Other zeros stay zeros, and what is at most 1
    stays so (a saturated sigmoid is a probability still). Views, copies and what is written in place are not moved;
    where TF32 products are allowed, results of products are moved by its last place.
    The model's own random numbers are those of a plain run.

    Args:
        seed: of the moves.
    """
    with _Perturbed(seed):
        yield


class _Perturbed(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _rounds(func, args, kwargs):
            return result
        product, shifted = (any(word in func._schema.name for word in words) for words in (_PRODUCTS, _SHIFTED))
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, product, shifted), result)

    def _moved(self, tensor: torch.Tensor, product: bool, shifted: bool) -> torch.Tensor:
        if tensor.dtype not in _MOVE or tensor.layout is not torch.strided or tensor.is_meta:
            return tensor  # on meta, which holds no numbers, transforms ask for shapes
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        size = _MOVE[tensor.dtype]
        if product and tensor.dtype is torch.float32 and product_precision(device.type) == "tf32":
            size = _TF32
        wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
        moves = torch.empty_like(tensor, dtype=wide).uniform_(-size, size, generator=self._generators[device])
        plain = tensor.to(wide)
        moved = torch.addcmul(plain, plain, moves)
        if shifted and tensor.dim() > 1:
            alike = moved.new_empty(tensor.shape[:2] + (1,) * (tensor.dim() - 2))[:1]
            alike.uniform_(-_MOVE[wide], _MOVE[wide], generator=self._generators[device])
            moved += alike * moved.square().mean().sqrt()
        return torch.where(plain.abs() <= 1, moved.clamp(-1, 1), moved).to(tensor.dtype)


def _rounds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` computes new floating numbers from others."""
    schema = func._schema
    if (
        schema.name in _COPIES
        or schema.name.endswith("_like")
        or any(one.alias_info is not None for one in schema.returns)
    ):
        return False
    return any(tensor.is_floating_point() for tensor in flat_tensors([*args, *kwargs.values()]))


@dataclass(frozen=True, slots=True)
class Update:
    """One tensor of the state, before and after one step from the same state on the same inputs.

    Args:
        name: what messages call it (``"conv.weight"``, ``"exp_avg of conv.weight"``).
        before: before the step.
        after: after the step that is judged.
        eager: after eager's.
        perturbed: after eager's, run under ``perturbed``; counts for nothing if it is not finite.
        jumps: whether an element's update can jump when a gradient's rounding changes: a parameter whose optimizer
            divides gradients by their size (Adam and its like).
    """

    name: str
    before: torch.Tensor
    after: torch.Tensor
    eager: torch.Tensor
    perturbed: torch.Tensor
    jumps: bool = False


def check_updates(name: str, updates: Sequence[Update], *, lowest: str = "") -> EqualityCheck:
    """Whether a step's updates are eager's, tensor by tensor.

    With ``d = after - before`` of the judged step, ``e`` of eager's and ``p`` of the perturbed one, ``n`` elements::

        ‖d - e‖ <= tolerance ‖e‖ + ulp ‖after‖ + doubt(‖p - e‖) + 2 max|e| √flips

    - ``tolerance``: of the lowest precision at work (``nimble_core.validation.equality.TOLERANCE``).
    - ``ulp``: what is stored is rounded to the tensor's own type, which may be coarse beside the update.
    - ``doubt``: of what rounding may change (``nimble_core.validation.equality.doubt``). Adam's first update is
      ``lr g / (|g| + eps)``, ± lr whatever the size of ``g``: where ``g`` is rounding only it has either sign, in the
      perturbed step too. So a convolution's bias before BatchNorm may move by ``lr`` anywhere; but no further: where
      updates jump, ``2 max|e| √n`` bounds all terms but ``ulp``.
    - ``flips`` (only where ``jumps``): ``min(4, n // 16)`` elements may have the other sign. About ``n u`` of ``n``
      gradients are as small as rounding ``u``, a few of a large model's in all: too few for one perturbed step to show
      where. Less than a quarter of the elements can hide in it, so it never hides a tensor that was not updated.

    A tensor that did not change at all is wrong if the angle between ``e`` and ``p`` is less than 60 degrees: then the
    update is no matter of rounding, however large the bound (in half precision ``‖p - e‖`` alone can be half of
    ``‖e‖``). Integers (counters) must be equal.

    Args:
        name: which replay.
        updates: the state; at least one.
        lowest: the least precise dtype that the model computes in.

    Returns:
        ``relative_error`` and ``tolerance`` are of the tensor that uses up most of its bound, relative to ``‖e‖``;
        ``input_effect`` is the largest update by its bound. Void if no update is ten times its bound, or not finite.
    """
    measures = [_measures(one) for one in updates]
    read = iter(numbers(list(chain(*measures))))
    judged = [
        _judged(one, list(islice(read, len(own))), working_precision([one.eager], lowest))
        for one, own in zip(updates, measures, strict=True)
    ]
    worst = max(judged, key=lambda one: one.margin, default=_Judged("", 0.0, 0.0, 0.0))
    wrong = [one for one in judged if one.margin > 1 or one.missing]
    scale = worst.size or 1.0
    reason = ""
    if not all(math.isfinite(one.size) for one in judged):
        reason = "void: eager's own updates are not finite"
    elif any(one.missing for one in wrong):
        reason = f"{_listed([one.name for one in wrong if one.missing])} not updated"
    elif wrong:
        parts = f"{worst.error / scale:.1e}, at most {worst.bound / scale:.1e} would pass"
        reason = f"the update of {worst.name} differs from eager's by {parts}"
        reason += f" ({len(wrong)} of {len(judged)} tensors differ)" if len(wrong) > 1 else ""
    elif not any(one.size > 0 and one.size >= _VOID_BELOW * one.bound for one in judged):
        reason = "void: no update is well above what rounding may change"
    return EqualityCheck(
        name,
        _written(worst.error / scale),
        _written(worst.bound / scale),
        _written(max((one.size / (one.bound or one.size or 1.0) for one in judged), default=0.0)),
        not reason,
        reason,
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    name: str
    error: float
    bound: float
    size: float
    missing: bool = False

    @property
    def margin(self) -> float:
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


def _measures(update: Update) -> list[torch.Tensor]:
    """Scalars from which an update is judged, on its device; none where there is nothing to compare."""
    states = (update.before, update.after, update.eager, update.perturbed)
    before, after, eager, moved = (one.detach() for one in states)
    if after.shape != eager.shape or after.dtype != eager.dtype or not eager.numel():
        return []
    if not (eager.is_floating_point() or eager.is_complex()):
        return [(after != eager).double().mean(), (before != eager).double().mean(), (after != before).any()]
    wide = torch.complex128 if eager.is_complex() else torch.float64
    mine, theirs, others = ((one.to(wide) - before.to(wide)) for one in (after, eager, moved))
    along = torch.vdot(theirs.flatten(), others.flatten()).real
    return [
        *(theirs.norm(), theirs.abs().max(), theirs.count_nonzero()),
        *((others - theirs).norm(), others.norm(), along),
        *((mine - theirs).norm(), mine.any(), eager.to(wide).norm()),
    ]


def _judged(update: Update, read: Sequence[float], precision: str) -> _Judged:
    """An update by what ``_measures`` read of it."""
    after, eager = update.after, update.eager
    if after.shape != eager.shape or after.dtype != eager.dtype:
        return _Judged(update.name, math.inf, 0.0, 0.0)
    if not read:
        return _Judged(update.name, 0.0, 0.0, 0.0)
    if not (eager.is_floating_point() or eager.is_complex()):
        error, size, changed = read
        return _Judged(update.name, error, 0.0, size, bool(error) and not changed)
    norm, greatest, nonzero, moved_by, other, along, apart, changed, whole = read
    count = eager.numel()
    size, peak = finite(norm), finite(greatest)
    rounding = doubt(moved_by, count, size, precision) if math.isfinite(moved_by) else 0.0
    stored = torch.finfo(eager.dtype).eps * finite(whole)
    bound = TOLERANCE.get(precision, 0.0) * size + stored + rounding
    if update.jumps:
        bound = min(bound + 2 * peak * math.sqrt(min(_FLIPS, count // 16)), stored + 2 * peak * math.sqrt(count))
    # Within 60 degrees of each other, and not by the chance of a few elements.
    agree = nonzero >= min(4, count) and along > 0.5 * norm * other > 0
    return _Judged(update.name, finite(apart), bound, size, not changed and agree)


def _written(value: float) -> float:
    """A number that every file format can hold."""
    return value if math.isfinite(value) else 1e300


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'was' if len(names) == 1 else 'were'}"
