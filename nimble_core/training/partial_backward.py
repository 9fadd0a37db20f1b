"""The backward where only some outputs got a gradient: without the calls that lead to the others alone, as in eager."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import torch

from nimble_core.ir.program import Call, Program
from nimble_core.tracing.recording import Issuer, Recording, issuing

__all__ = ["calls_only_for", "draws_attention_masks", "issued"]


def calls_only_for(program: Program, gradients: int, absent: Set[int]) -> frozenset[int]:
    """Return the calls, by index, that compute with gradients in ``absent`` and with no other ones. O(calls).

    Args:
        program: the backward, in eager's kernels.
        gradients: how many of its inputs, from the first, are gradients of outputs.
        absent: which of these there are not.
    """
    # Positions of the gradients that each storage was computed from.
    sources = {ref.storage: frozenset((at,)) for at, ref in enumerate(program.inputs[:gradients])}
    found: set[int] = set()
    for call in program.calls:
        read = frozenset[int]().union(*(sources.get(ref.storage, ()) for ref in call.reads))
        if read and read <= absent:
            found.add(call.index)
        for ref in call.writes if read else ():
            sources[ref.storage] = sources.get(ref.storage, frozenset()) | read
    return frozenset(found)


def issued(
    recording: Recording, inputs: Sequence[torch.Tensor], device_type: str, without: Collection[int] = ()
) -> list[torch.Tensor]:
    """Issue a recording call by call; return its outputs, with zeros for what the calls in ``without`` would make.

    Memory is freed after its last use, as in eager.
    """
    program, kept = recording.program, {recording.storage_of[slot] for slot in recording.outputs}
    last = {access.ref.storage: call.index for call in program.calls for access in call.accesses}
    issuer = Issuer(recording, inputs)
    with issuing(device_type):
        for call in program.calls:
            (issuer.skip if call.index in without else issuer.issue)(call.index)
            for home in {access.ref.storage for access in call.accesses} - kept:
                if last[home] == call.index:
                    issuer.release(home)
        return issuer.outputs()


def draws_attention_masks(call: Call) -> bool:
    """Whether the call is attention with dropout."""
    given = dict(call.arguments)
    return "attention" in call.operator and given.get("dropout_p", "0.0") not in ("0", "0.0")
