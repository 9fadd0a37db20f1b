"""What each call allocates, in the order in which it asks, and where each piece may live.

Results that later calls use go to the arena, where they share bytes with what is dead by then. What a call needs only
while it runs goes to scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nimble_core.program import Call, Program
from nimble_core.schedule import Schedule

__all__ = ["SMALL_NBYTES", "Block", "CallKey", "Layout", "call_key", "lay_out"]

SMALL_NBYTES = 1 << 20
"""Allocations up to this size are handed out by address (see ``devices.placement``)."""

CallKey = tuple[str, tuple[tuple[str, str], ...]]
"""A call as it is known again in another recording of the same model: operator and arguments."""

Temporaries = tuple[int, int]
"""``(allocations, bytes)`` that a call makes and frees again while it runs."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation of a call.

    Args:
        nbytes: size.
        storage: the storage it holds, None for what the call frees again while it runs.
        home: ``"arena"`` (shared with storages that are dead by then), ``"kept"`` (its own for good) or ``"scratch"``
            (the call's own while it runs).
    """

    nbytes: int
    storage: int | None
    home: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What each call allocates, in the order in which it asks; and what of it is to be planned.

    Args:
        blocks: by call; empty for calls that allocate nothing, or that are not placed.
        arena: storages for the arena.
        kept: offset of each storage that keeps its memory for good, by storage.
        kept_nbytes: what these take.
        scratch: bytes each call needs while it runs.
    """

    blocks: tuple[tuple[Block, ...], ...]
    arena: frozenset[int]
    kept: dict[int, int]
    kept_nbytes: int
    scratch: tuple[int, ...]


def lay_out(
    program: Program,
    schedule: Schedule,
    temporaries: Sequence[Temporaries],
    *,
    workspace: int = 0,
    skip: frozenset[CallKey] = frozenset(),
    alignment: int = 512,
) -> Layout:
    """Decide where each allocation of each call may live.

    Equal blocks are handed out by address, and scratch lies above what is kept, which lies above the arena: so of a
    call's small results only the first can go to the arena.

    Args:
        program: the calls and what they touch.
        schedule: gives the issue order: a storage is made by the first call that touches it.
        temporaries: of each call, as recorded.
        workspace: bytes of a matrix library's workspace, to tell it from other temporaries.
        skip: calls that are not placed.
        alignment: of every block.
    """
    made, touched = _made_by(program, schedule)
    outputs = {ref.storage for ref in program.outputs}
    blocks: list[tuple[Block, ...]] = []
    arena: set[int] = set()
    kept: dict[int, int] = {}
    kept_nbytes = 0
    scratch: list[int] = []
    for call in program.calls:
        if skip and call_key(call) in skip:
            blocks.append(())
            scratch.append(0)
            continue
        sizes = [program.storages[storage].nbytes for storage in made[call.index]]
        alive = [touched[storage] > 1 or storage in outputs for storage in made[call.index]]
        own: list[Block] = []
        first_small = True
        for position, (storage, nbytes) in enumerate(zip(made[call.index], sizes, strict=True)):
            small = nbytes <= SMALL_NBYTES
            small_alive_follow = any(
                live and size <= SMALL_NBYTES for live, size in zip(alive[position:], sizes[position:], strict=True)
            )
            if alive[position] and (not small or first_small):
                home = "arena"
                arena.add(storage)
            elif alive[position] or (small and small_alive_follow):
                home = "kept"
                kept[storage] = kept_nbytes
                kept_nbytes += _aligned(nbytes, alignment)
            else:
                home = "scratch"
            first_small &= not small
            own.append(Block(nbytes, storage, home))
        own += [Block(nbytes, None, "scratch") for nbytes in _temporary_sizes(*temporaries[call.index], workspace)]
        blocks.append(tuple(own))
        scratch.append(sum(_aligned(block.nbytes, alignment) for block in own if block.home == "scratch"))
    return Layout(tuple(blocks), frozenset(arena), kept, kept_nbytes, tuple(scratch))


def call_key(call: Call) -> CallKey:
    """Operator and arguments of ``call``."""
    return call.operator, call.arguments


def _made_by(program: Program, schedule: Schedule) -> tuple[list[list[int]], list[int]]:
    """Intermediate storages that each call is the first to touch, ascending; by how many calls each is touched."""
    made: list[list[int]] = [[] for _ in program.calls]
    touched = [0] * len(program.storages)
    for call in schedule.order:
        for storage in sorted({access.ref.storage for access in program.calls[call].accesses}):
            if program.storages[storage].role == "intermediate" and program.storages[storage].nbytes:
                if not touched[storage]:
                    made[call].append(storage)
                touched[storage] += 1
    return made, touched


def _temporary_sizes(count: int, nbytes: int, workspace: int) -> list[int]:
    """Blocks in which ``count`` temporaries of ``nbytes`` together fit, whatever each of them takes."""
    if count <= 0 or nbytes <= 0:
        return []
    if count > 1 and nbytes > workspace > 0:
        rest = nbytes - workspace
        return [workspace, *[rest] * (count - 1)]
    return [nbytes] * count


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
