"""Branches of a backward that lead only to outputs without a gradient: eager does not run them, so they add nothing.

A replay runs the whole backward, with zeros for the gradients that there are not. That adds nothing either, as long as
the backward is linear in them and the zeros meet finite numbers only: the derivative of a square root at 0 is infinite,
and 0·∞ is NaN. Where that may be, the calls of the branch are left out, and what others read of them is zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from nimble_core.ir.program import Call, Program
from nimble_core.tracing.recording import Issuer, Recording, Step, issuing, slots_in
from nimble_core.validation.distances import numbers

__all__ = ["Branch", "any_number", "branch_of", "issued_without", "vanishing"]

_LINEAR = re.compile(
    r"_to_copy|add(mm)?|(badd)?bmm|mm|cat|clone|constant_pad_nd|copy|cumsum|expand|flip|gather|mean|neg|roll|stack|sub|"
    r"sum|index(_add|_put|_select)?|masked_(fill|scatter)|scatter(_add)?|tril|triu|where|\w+_backward(_data)?"
)
"""Operators that make zeros of zeros where the forward was finite: sums, choices, products with weights and
activations; derivatives, but for ``_POLES``."""

_POLES = frozenset(("_cdist_backward", "_pdist_backward", "_weight_norm_interface_backward", "logit_backward"))
"""Not these derivatives: they may be infinite where the forward is finite."""

_OUTSIDE = frozenset(("input", "parameter", "buffer", "constant"))

_ZEROS = re.compile(r"zeros(_like)?|new_zeros|zero")
_FILLS = re.compile(r"(new_)?full(_like)?|fill|scalar_tensor")
_SUMS = re.compile(
    r"_to_copy|abs|add|r?sub|cat|clone|col2im|constant_pad_nd|copy|cumsum|diag_embed|_fft_(c2c|c2r|r2c)|flip|gather|"
    r"im2col|index(_add|_copy|_fill|_put|_select)?|_(unsafe_)?index_put(_impl)?|masked_(fill|scatter)|mean|neg|"
    r"pixel_(un)?shuffle|repeat|roll|scatter(_add)?|(as_strided|diagonal|select|slice)_scatter|sgn|stack|sum|trace|tril|"
    r"triu|_unsafe_index|where"
)
"""Operators that make zeros where all that they sum, choose from and fill with are zeros, unlike in ``_LINEAR``, which
is of one gradient among numbers that are not.
"""

_PRODUCTS = frozenset(("bmm", "dot", "ger", "linalg_cross", "mm", "mul", "mv", "outer", "_trilinear", "vdot"))
_SUMS_OF_PRODUCTS = frozenset(("addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "baddbmm"))
_LINEAR_IN = {"div": "self", "linalg_lu_solve": "B", "linalg_solve_triangular": "B", "xlogy": "self"}
"""What they are linear in, whatever else they read."""

_PLACES = frozenset(("condition", "index", "indices", "mask"))
"""Arguments that say where."""

_VALUES = ("other", "value", "fill_value", "src", "s")
"""Arguments that may be numbers, and what is added or filled in then."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The part of a backward that only some gradients lead to.

    Args:
        calls: by index.
        harmful: whether zeros in place of these gradients may make something else than zeros that others read; not said
            of functions of the user's own, which may add to a gradient what they like.
        writes: whether any call of the backward writes what exists outside of it.
    """

    calls: frozenset[int]
    harmful: bool
    writes: bool


def branch_of(program: Program, gradients: int, absent: Set[int]) -> Branch:
    """The branch that only the gradients in ``absent`` lead to. O(calls).

    Args:
        program: the backward, in eager's kernels.
        gradients: how many of its inputs, from the first, are gradients of outputs.
        absent: which of these there are not.
    """
    # What each storage holds comes from: positions of gradients.
    sources = {ref.storage: frozenset((at,)) for at, ref in enumerate(program.inputs[:gradients])}
    doubtful: set[int] = set()
    out: set[int] = set()
    harmful = writes = False
    for call in program.calls:
        read = {ref.storage for ref in call.reads}
        found = frozenset[int]().union(*(sources.get(home, ()) for home in read))
        written = {ref.storage for ref in call.writes}
        outside = any(program.storages[home].role in _OUTSIDE for home in written)
        writes = writes or outside
        if found and found <= absent:
            out.add(call.index)
            factors = {program.storages[home].role for home in read if home not in sources}
            harmful = harmful or outside
            if read & doubtful or not _finite(call, len(read), factors):
                doubtful |= written
        elif (read | written) & doubtful:
            harmful = True
        for home in written if found else ():
            sources[home] = sources.get(home, frozenset()) | found
    return Branch(frozenset(out), harmful, writes)


def _finite(call: Call, reads: int, factors: Set[str]) -> bool:
    """Whether it makes zeros of zeros; ``factors``: roles of what else it reads than gradients."""
    kind = call.label.rstrip("_") if call.operator.startswith("aten.") else ""
    if kind in ("mul", "div"):  # by numbers; and by parameters, which are finite, but may be 0
        return factors <= {"parameter"} if kind == "mul" else reads == 1
    return _LINEAR.fullmatch(kind) is not None and kind not in _POLES


def vanishing(recording: Recording, gradients: int, without: Collection[int] = ()) -> frozenset[int]:
    """Outputs of a backward, by position, that are zeros or NaN where all gradients are zeros, whatever it reads else.

    That is read off its calls; of some that do so it is not seen. Operators that are not torch's own are taken to make
    zeros of zeros: what these do only running them tells. O(calls).

    Args:
        recording: the backward, in eager's kernels.
        gradients: how many of its inputs, from the first, are gradients of outputs.
        without: calls that make zeros, as of ``issued_without``.
    """
    program, home_of = recording.program, recording.storage_of
    vanishes = {home_of[slot]: True for slot in recording.inputs[:gradients]}

    def zero(slot: int) -> bool:
        return vanishes.get(home_of[slot], False)

    for step in recording.steps:
        if step.call is None:
            zeros = "empty" in str(step.func) or _makes_zeros(step, zero)  # what is empty is written before it is read
            for slot in step.outputs:
                if slot >= 0 and program.storages[home_of[slot]].role not in _OUTSIDE:
                    vanishes.setdefault(home_of[slot], zeros)
            continue
        zeros = step.call in without or _makes_zeros(step, zero)
        for ref in program.calls[step.call].writes:
            if program.storages[ref.storage].role not in _OUTSIDE or ref.storage in vanishes:
                vanishes[ref.storage] = zeros and vanishes.get(ref.storage, True)
    return frozenset(at for at, slot in enumerate(recording.outputs) if zero(slot))


def _makes_zeros(step: Step, zero: Callable[[int], bool]) -> bool:
    """Whether a call makes zeros, or NaN, whatever it reads in slots that are not ``zero``."""
    schema = getattr(step.func, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return any(map(zero, step.reads))
    kind = schema.name.removeprefix("aten::").rstrip("_")
    given = dict(zip((one.name for one in schema.arguments), step.args, strict=False)) | dict(step.kwargs)

    def zeros(value: Any) -> bool:
        slots = list(slots_in([value]))
        return all(map(zero, slots)) if slots else value == 0

    results = {one.name for one in schema.arguments if one.is_out}
    tensors = {name: value for name, value in given.items() if name not in results and list(slots_in([value]))}
    if _ZEROS.fullmatch(kind):
        return True
    if "_backward" in kind:
        incoming = [value for name, value in tensors.items() if name.startswith("grad")]
        return bool(incoming) and all(map(zeros, incoming))
    if kind in _PRODUCTS:
        return any(map(zeros, tensors.values()))
    if kind in _LINEAR_IN:
        return zeros(tensors.get(_LINEAR_IN[kind], 1))
    if kind in _SUMS_OF_PRODUCTS:
        own, *factors = tensors.values()
        return zeros(own) and any(map(zeros, factors[: 1 if kind == "addcdiv" else 2]))
    filled = [given[name] for name in _VALUES if name in given]
    if not all(map(zeros, filled)):
        return False
    if _FILLS.fullmatch(kind):
        return bool(filled)
    summed = [value for name, value in given.items() if (name in tensors or name == "self") and name not in _PLACES]
    return _SUMS.fullmatch(kind) is not None and bool(summed) and all(map(zeros, summed))


def issued_without(
    recording: Recording, inputs: Sequence[torch.Tensor], calls: Collection[int], device_type: str
) -> list[torch.Tensor]:
    """Outputs of a recording, issued call by call, with zeros for what these ``calls`` would make or write."""
    program, kept = recording.program, {recording.storage_of[slot] for slot in recording.outputs}
    last = {access.ref.storage: call.index for call in program.calls for access in call.accesses}
    issuer = Issuer(recording, inputs)
    with issuing(device_type):
        for call in program.calls:
            (issuer.skip if call.index in calls else issuer.issue)(call.index)
            for home in {access.ref.storage for access in call.accesses} - kept:
                if last[home] == call.index:
                    issuer.release(home)
        return issuer.outputs()


def any_number(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether an element is a finite number other than zero; waits for the device."""
    return any(numbers([one.nan_to_num(0.0, 0.0, 0.0).count_nonzero() for one in tensors if one.numel()]))
