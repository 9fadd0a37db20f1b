"""Calls that do the same in every replay: they run once, when a recording is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nimble_core.ir.program import Program
from nimble_core.tracing.recording import Recording

__all__ = ["Constants", "find_constants", "output_storages"]


@dataclass(frozen=True, slots=True)
class Constants:
    """What every replay finds the same.

    Args:
        calls: that read constants alone.
        storages: that hold constants.
        nbytes: memory of those that the recording itself made.
    """

    calls: frozenset[int]
    storages: frozenset[int]
    nbytes: int


def output_storages(recording: Recording) -> set[int]:
    """Return the storages of the outputs: these belong to the caller."""
    return {recording.storage_of[slot] for slot in recording.outputs}


def find_constants(recording: Recording) -> Constants:
    """Find the calls that can run once, and the storages that only they write.

    Constants are what the forward makes itself (``torch.tensor``, ``arange``): a tensor that it finds outside, in a
    closure or a plain attribute, may be changed by its owner. A call can run once if it reads constants only, draws no
    random numbers, no other call writes what it writes, and no earlier call has read that: it would find the last
    value there.
    """
    program = recording.program
    given = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)}
    written = {ref.storage for call in program.calls for ref in call.writes}
    lifted = {
        recording.storage_of[slot]
        for step in recording.steps
        if step.func is torch.ops.aten.lift_fresh.default
        for slot in step.reads
    }
    roots = lifted - written
    made = {storage for storage in written if program.storages[storage].role == "intermediate"}
    made -= given | output_storages(recording)
    while True:
        calls, constant, also_varying = _run_once(program, roots, made)
        if not also_varying & constant:
            own = sum(program.storages[one].nbytes for one in constant if program.storages[one].role == "intermediate")
            return Constants(frozenset(calls), frozenset(constant), own)
        made -= also_varying


def _run_once(program: Program, roots: set[int], made: set[int]) -> tuple[set[int], set[int], set[int]]:
    """Find calls that read constants only, what they write, and what calls of every replay write as well.

    Args:
        program: the calls.
        roots: storages known to be constant.
        made: storages that may become constants.
    """
    calls: set[int] = set()
    constant, varying, read_in_each = set(roots), set[Any](), set[Any]()
    begun: set[int] = set()
    for call in program.calls:
        writes = {ref.storage for ref in call.writes}
        # Its own results are among what it may read: they were allocated, not computed, before it.
        reads = {ref.storage for ref in call.reads} - (writes - begun)
        begun |= writes
        if reads <= constant and writes <= made - read_in_each:
            constant |= writes
            calls.add(call.index)
        else:
            varying |= writes & made
            read_in_each |= reads
    return calls, constant, varying
