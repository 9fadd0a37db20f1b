"""Branches of a backward that lead only to outputs without a gradient: eager does not run them, so they add nothing.

A replay runs the whole backward, with zeros for the gradients that there are not. That adds nothing either, as long as
the backward is linear in them and the zeros meet finite numbers only: the derivative of a square root at 0 is infinite,
and 0·∞ is NaN. Where that may be, the calls of the branch are left out, and what others read of them is zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

import torch

from nimble_core.distances import numbers
from nimble_core.program import Call, Program
from nimble_core.recording import Issuer, Recording, issuing

__all__ = ["Branch", "any_number", "branch_of", "issued_without"]

_LINEAR = re.compile(
    r"_to_copy|add(mm)?|(badd)?bmm|mm|cat|clone|constant_pad_nd|copy|cumsum|expand|flip|gather|mean|neg|roll|stack|sub|"
    r"sum|index(_add|_put|_select)?|masked_(fill|scatter)|scatter(_add)?|tril|triu|where|\w+_backward(_data)?"
)
"""Operators that make zeros of zeros where the forward was finite: sums, choices, products with weights and
activations; derivatives, but for ``_POLES``."""

_POLES = frozenset(("_cdist_backward", "_pdist_backward", "_weight_norm_interface_backward", "logit_backward"))
"""Not these derivatives: they may be infinite where the forward is finite."""

_OUTSIDE = frozenset(("input", "parameter", "buffer", "constant"))


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
