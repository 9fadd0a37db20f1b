"""The one table of bounds: how far a result may be off, by precision and by what it is compared with.

Kernels other than eager's round elsewhere, and in half precision they are as far from eager as a small mistake would
be. So what decides is how far a known honest result is off: eager against the same computation in float64
(``allowed_error``), or eager against itself with its results perturbed (``allowed_noise``). ``BOUNDS`` holds what may
pass in any case. To judge one result: make a ``Verdict`` of its error, its bound and how far inputs move it, and look
at ``right`` and at ``telling``. Results that hardly depend on the inputs pass whatever a replay does, and show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nimble_core.ir.program import Program

__all__ = [
    "BOUNDS",
    "PEAK",
    "Bounds",
    "Verdict",
    "allowed_error",
    "allowed_noise",
    "lowest_precision",
    "product_precision",
    "product_settings",
    "tolerance_for",
    "working_precision",
]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far results in one precision may be off, relative to their norm.

    Args:
        tolerance: against eager, where nothing tells how exact eager is.
        floor: against float64, however exact eager is.
        perturbation: by how much ``rounding_noise`` moves results, relative to each element; 0 if it does not.
    """

    tolerance: float
    floor: float
    perturbation: float = 0.0


BOUNDS = {
    "": Bounds(0.0, 0.0),
    "float64": Bounds(1e-9, 1e-12, 2.0**-46),
    "float32": Bounds(1e-4, 2e-5, 2.0**-17),
    "tf32": Bounds(1e-3, 2e-3, 2.0**-11),
    "float16": Bounds(5e-3, 4e-3, 2.0**-11),
    "bfloat16": Bounds(2e-2, 8e-3, 2.0**-8),
    "float8_e4m3": Bounds(1e-1, 1e-1),
    "float8_e5m2": Bounds(2e-1, 2e-1),
}
"""Bounds by precision, the most precise first; integers, which have none, must be equal.

Floors. float32: what Winograd convolution makes. TF32 and float16: weights that were folded and rounded once more; that
error is the same everywhere, so no pooling averages it as it does eager's (2.2e-3 and 6.9e-4 on NASNet-A mobile in
float16). bfloat16: two roundings; more would hide mistakes. float8: 1.6 times what one rounding may do at most.

Perturbations. Half precision: one rounding. float32 and float64: 128, since these also sum in their own type, in an
order that is the library's, and rounding decides so few branches there that most honest runs show none, while the next
one's gradients are off by 1e-3.
"""

PEAK = 4.0
"""How much wider bounds on single elements are than those on norms: the greatest errors scatter more, above all where
rounding decides branches."""

_FACTOR = 3.0
_DROWNED_FACTOR = 100.0
_VOID_BELOW = 10.0
_PRECISIONS = tuple(BOUNDS)
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def allowed_error(known: float, count: int) -> float:
    """Return how far off a result of ``count`` elements may be where an honest one is off by ``known``.

    Three times as far, and more for few elements: their rounding may happen to be small.

    >>> allowed_error(1e-6, 1_000_000) < 3.1e-6 < allowed_error(1e-6, 1) < 1.6e-5
    True
    """
    return _FACTOR * (1 + 4 / max(count, 1)) * known


def allowed_noise(noise: float, count: int, size: float, precision: str) -> float:
    """Return how far off a result may be that a perturbed run of eager moves by ``noise``.

    As ``allowed_error`` says; a hundred times as far where the noise is half as large as the result. Rounding is most
    of such a result, and what sums leave of zero is each library's own: ten times another library's noise is nothing
    unusual, and some optimizer state holds its square. In half precision rounding as large as a gradient says less, and
    the factor stays.

    Args:
        noise: a norm.
        count: elements of the result.
        size: norm of the result.
        precision: a key of ``BOUNDS``.

    >>> allowed_noise(2.0, 1_000_000, size=1.0, precision="float32") > 600
    True
    """
    drowned = 2 * noise >= size and precision in ("float64", "float32", "tf32")
    return (_DROWNED_FACTOR if drowned else 1.0) * allowed_error(noise, count)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far one result is off, and how far it may be.

    Args:
        error: of the replay.
        bound: on ``error``.
        effect: how far eager's own result moves: between two inputs, or by an update.
        own_error: of eager against float64; None if eager decides.
        name: of the result; empty if it has none.
        peak: whether these are errors of single elements, relative to the greatest, and not of norms.
    """

    error: float
    bound: float
    effect: float
    own_error: float | None = None
    name: str = ""
    peak: bool = False

    @property
    def right(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound

    @property
    def margin(self) -> float:
        """Share of the bound that is used up."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0

    @property
    def telling(self) -> bool:
        """Whether a replay that ignores its inputs could not have passed."""
        return self.effect > 0 and self.effect >= _VOID_BELOW * self.bound

    @property
    def followed(self) -> bool:
        """Whether a replay that ignores its inputs could not have come so near."""
        return self.effect > 0 and self.effect >= _VOID_BELOW * self.error


def tolerance_for(outputs: Sequence[torch.Tensor], lowest: str = "") -> float:
    """Return the tolerance against eager for its ``outputs``; 0 if none holds floating-point numbers."""
    return BOUNDS[working_precision(outputs, lowest)].tolerance


def lowest_precision(program: Program) -> str:
    """Return the lowest precision that a call of ``program`` reads or writes; empty if there is none. O(accesses).

    Under autocast this is what products are computed in, whatever type the outputs have.

    >>> from nimble_core.ir.program import Access, Call, Program, TensorRef
    >>> accesses = [Access(TensorRef(0, 0, (1,), (1,), dtype, 2), False) for dtype in ("float32", "float16", "int64")]
    >>> lowest_precision(Program((Call(0, "aten.mm.default", (), tuple(accesses)),), (), (), ()))
    'float16'
    """
    return _lowest(access.ref.dtype for call in program.calls for access in call.accesses)


def _lowest(dtypes: Iterable[str]) -> str:
    """Return the lowest precision among these types; float8_e8m0fnu, which holds scales, does not count."""
    names = {_PARTS.get(name, name.removesuffix("uz").removesuffix("fn")) for name in dtypes}
    return max(("", *(names & BOUNDS.keys())), key=_PRECISIONS.index)


def working_precision(outputs: Sequence[torch.Tensor], lowest: str = "") -> str:
    """Return the lowest precision that counts for ``outputs``, a key of ``BOUNDS``; empty for integers alone.

    Args:
        outputs: of eager.
        lowest: the lowest precision of the calls before (``lowest_precision``); empty if unknown.
    """
    floating = [tensor for tensor in outputs if tensor.is_floating_point() or tensor.is_complex()]
    if not floating:
        return ""
    found = _lowest([lowest, *(str(tensor.dtype).removeprefix("torch.") for tensor in floating)])
    return product_precision(floating[0].device.type) if found == "float32" else found


def product_precision(device_type: str) -> str:
    """Return what libraries may compute float32 products in: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.

    The old switches (``allow_tf32``) show here too; reading those raises once the new ones were used.
    """
    short = {"tf32": "tf32", "bf16": "bfloat16"}
    return _lowest(["float32", *(short.get(kind.fp32_precision, "") for kind in product_settings(device_type))])


def product_settings(device_type: str) -> tuple[Any, ...]:
    """Return torch's settings of the precision of float32 products, one for each group of operators."""
    import torch

    backends: Any = torch.backends
    if device_type == "cuda":
        return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    return backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn
