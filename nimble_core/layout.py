"""What each call allocates, in the order in which it asks, and where each piece may live.

Results that later calls use go to the arena, where they share bytes with what is dead by then. What a call needs only
while it runs goes to scratch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from nimble_core.program import Call, Program
from nimble_core.schedule import Schedule

__all__ = ["SMALL_NBYTES", "Block", "CallKey", "Layout", "call_key", "lay_out"]

SMALL_NBYTES = 1 << 20
"""Allocations up to this size are handed out by address (see ``devices.placement``)."""

CallKey = tuple[str, tuple[tuple[str, str], ...], tuple[tuple[object, ...], ...]]
"""What decides how a call allocates: operator, arguments, and shapes and types of its tensors."""

_STORAGE = re.compile(r"%\d+")

Temporaries = tuple[int, int]
"""``(allocations, bytes)`` that a call makes and frees again while it runs."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation of a call.

    Args:
        nbytes: size.
        storage: the storage it holds, None for what the call frees again while it runs.
        home: ``"arena"`` (shared with storages that are dead by then), ``"front"`` and ``"kept"`` (its own for good,
            below and above the arena) or ``"scratch"`` (the call's own while it runs).
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
        kept: offset of each storage that keeps its memory above the arena, by storage.
        kept_nbytes: what these take.
        scratch: bytes each call needs while it runs.
        front: offset of each storage that keeps its memory below the arena, by storage.
        front_nbytes: what these take.
        beside_nbytes: what an engine holds beside all that: buffers for its inputs, constants.
    """

    blocks: tuple[tuple[Block, ...], ...]
    arena: frozenset[int]
    kept: dict[int, int]
    kept_nbytes: int
    scratch: tuple[int, ...]
    front: dict[int, int] = field(default_factory=dict)
    front_nbytes: int = 0
    beside_nbytes: int = 0


def lay_out(
    program: Program,
    schedule: Schedule,
    temporaries: Sequence[Temporaries],
    *,
    workspace: int = 0,
    orders: Mapping[CallKey, tuple[int, ...]] = MappingProxyType({}),
    skip: frozenset[str] = frozenset(),
    alignment: int = 512,
) -> Layout:
    """Decide where each allocation of each call may live.

    Equal blocks are handed out by address: of a call's small results only the first that is used later can go to the
    arena. What is asked for before it lies below the arena, what comes after it above, and scratch above all.

    Args:
        program: the calls and what they touch.
        schedule: gives the issue order: a storage is made by the first call that touches it.
        temporaries: of each call, as recorded.
        workspace: bytes of a matrix library's workspace, to tell it from other temporaries.
        orders: for calls that do not ask for their results one after the other: which they ask for first, as places
            among the results.
        skip: operators whose calls are not placed.
        alignment: of every block.
    """
    made, touched = _made_by(program, schedule)
    outputs = {ref.storage for ref in program.outputs}
    blocks: list[tuple[Block, ...]] = []
    arena: set[int] = set()
    front, kept = _Shelf(alignment), _Shelf(alignment)
    scratch: list[int] = []
    for call in program.calls:
        if call.operator in skip:
            blocks.append(())
            scratch.append(0)
            continue
        storages = made[call.index]
        order = orders.get(call_key(call)) if orders else None
        if order is not None:
            storages = [storages[place] for place in order]
        sizes = [program.storages[storage].nbytes for storage in storages]
        alive = [touched[storage] > 1 or storage in outputs for storage in storages]
        wanted = [place for place, size in enumerate(sizes) if size <= SMALL_NBYTES and alive[place]]
        first, last = (wanted[0], wanted[-1]) if wanted else (-1, -1)
        own: list[Block] = []
        for place, (storage, nbytes) in enumerate(zip(storages, sizes, strict=True)):
            small = nbytes <= SMALL_NBYTES
            if alive[place] and (not small or place == first):
                home = "arena"
                arena.add(storage)
            elif small and place < first:
                home = "front"
                front.put(storage, nbytes)
            elif small and place <= last:
                home = "kept"
                kept.put(storage, nbytes)
            else:
                home = "scratch"
            own.append(Block(nbytes, storage, home))
        own += [Block(nbytes, None, "scratch") for nbytes in _temporary_sizes(*temporaries[call.index], workspace)]
        blocks.append(tuple(own))
        scratch.append(sum(_aligned(block.nbytes, alignment) for block in own if block.home == "scratch"))
    return Layout(
        blocks=tuple(blocks),
        arena=frozenset(arena),
        kept=kept.offsets,
        kept_nbytes=kept.nbytes,
        scratch=tuple(scratch),
        front=front.offsets,
        front_nbytes=front.nbytes,
    )


class _Shelf:
    """Blocks side by side."""

    def __init__(self, alignment: int) -> None:
        self.offsets: dict[int, int] = {}
        self.nbytes = 0
        self._alignment = alignment

    def put(self, storage: int, nbytes: int) -> None:
        self.offsets[storage] = self.nbytes
        self.nbytes += _aligned(nbytes, self._alignment)


def call_key(call: Call) -> CallKey:
    """Operator, arguments and tensors of ``call``, whatever memory they are."""
    arguments = tuple((name, _STORAGE.sub("%", text) if "%" in text else text) for name, text in call.arguments)
    tensors = tuple((one.ref.sizes, one.ref.strides, one.ref.dtype, one.write) for one in call.accesses)
    return call.operator, arguments, tensors


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
        return [workspace, *_temporary_sizes(count - 1, nbytes - workspace, 0)]
    # Large blocks do not serve small requests: beside a large one there may be small ones.
    small = [SMALL_NBYTES] * (count - 1) if nbytes > SMALL_NBYTES else []
    return [nbytes] * count + small


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
