"""What each call allocates, in the order in which it asks, and where each piece may live.

Results that later calls use go to the arena, where they share bytes with what is dead by then, and so do large
workspaces, which a call needs only while it runs. Small ones go to scratch, and tiny ones have cells of their own: what
a library sets to zero in them before its kernel runs can be set earlier, for all calls at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from nimble_core.ir.allocations import Ask
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.memory_planner import ALIGNMENT, NOTHING_LENT, Lent, Needs
from nimble_core.scheduling.workspace_zeroing import COUNTERS_NBYTES, Place, staggered

__all__ = ["CELL_NBYTES", "SMALL_NBYTES", "Block", "Layout", "lay_out", "next_claim"]

SMALL_NBYTES = 1 << 20
"""Allocations up to this size are handed out by address (see ``runtime.cuda.memory``)."""

CELL_NBYTES = 512
"""Workspaces up to this size share their bytes with nothing."""

_LARGE_CLAIM = 20 << 20
_CLAIM_STEP = 2 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Memory for allocations of a call, one after the other.

    Args:
        nbytes: the most that any of them asks for.
        storage: the storage it holds when the call is over, None for what the call frees again.
        home: ``"arena"`` (shared with storages that are dead by then), ``"front"`` and ``"kept"`` (its own for good,
            below and above the arena), ``"cell"`` (the same above kept, tiny, and nothing that lasts), ``"staggered"``
            (above them, see ``workspace_zeroing``), ``"workspace"`` (the call's own while it runs, in the arena) or
            ``"scratch"`` (the same, above all).
        offset: within front, kept, the cells or what is staggered.
        untouched: bytes at its beginning that nothing touches between the beginning of a replay and the call.
    """

    nbytes: int
    storage: int | None
    home: str
    offset: int = 0
    untouched: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What each call allocates, in the order in which it asks; and what of it is to be planned.

    Args:
        blocks: by call; empty for calls that allocate nothing, or that are not placed.
        arena: storages for the arena, with the bytes that each needs there: more than its own where its call has used
            the same block for something else before.
        scratch: bytes each call needs while it runs, in small blocks.
        workspaces: the same in large ones.
        asked: how many allocations each call makes, and of how many bytes together.
        front_nbytes: what lies below the arena.
        kept_nbytes: what lies above it.
        cells_nbytes: what lies above that.
        staggered_nbytes: what lies above that, and below scratch.
        chains: calls that have a workspace there, in the order in which they use the same memory.
        beside_nbytes: what an engine holds beside all that: buffers for its inputs, constants.
        lent: memory that is there already.
        lent_address: where.
        inputs: storages whose buffers lie in the arena, or there.
    """

    blocks: tuple[tuple[Block, ...], ...]
    arena: Mapping[int, int]
    scratch: tuple[int, ...]
    workspaces: tuple[int, ...] = ()
    asked: tuple[tuple[int, int], ...] = ()
    front_nbytes: int = 0
    kept_nbytes: int = 0
    cells_nbytes: int = 0
    staggered_nbytes: int = 0
    chains: tuple[tuple[int, ...], ...] = ()
    beside_nbytes: int = 0
    lent: Lent = NOTHING_LENT
    lent_address: int = 0
    inputs: tuple[int, ...] = ()

    @property
    def needs(self) -> Needs:
        """What memory is planned for beside results."""
        return Needs(self.scratch, self.workspaces, self.lent, self.inputs)

    def sized(self, program: Program) -> Program:
        """Return the program with storages as large as their places in the arena: memory is planned for it."""
        if all(program.storages[storage].nbytes == nbytes for storage, nbytes in self.arena.items()):
            return program
        storages = list(program.storages)
        for storage, nbytes in self.arena.items():
            storages[storage] = replace(storages[storage], nbytes=nbytes)
        return replace(program, storages=tuple(storages))


def lay_out(
    program: Program,
    schedule: Schedule,
    asks: Sequence[Sequence[Ask]] = (),
    *,
    skip: frozenset[str] = frozenset(),
    stagger: bool = True,
    alignment: int = ALIGNMENT,
) -> Layout:
    """Decide where each allocation of each call may live.

    Small blocks are handed out by address: of a call's small results only the first that is used later can go to the
    arena. Earlier ones lie below the arena, later ones above it, then cells, staggered workspaces, and scratch.

    Args:
        program: the calls and what they touch.
        schedule: gives the issue order: a storage is made by the first call that touches it.
        asks: what each call asks for; empty: for its results alone.
        skip: operators whose calls are not placed.
        stagger: whether workspaces with counters have memory of their own.
    """
    made, touched = _made_by(program, schedule)
    outputs = {ref.storage for ref in program.outputs}
    all_asks = [_asked(program, made[call.index], asks[call.index] if asks else ()) for call in program.calls]
    asked = [(len(of_call), sum(ask.nbytes for ask in of_call)) for of_call in all_asks]
    all_slots = [
        [] if call.operator in skip else _served(of_call) for call, of_call in zip(program.calls, all_asks, strict=True)
    ]
    lasting = {storage for storage, count in enumerate(touched) if count > 1} | outputs
    counting = {call: slot for call, slots in enumerate(all_slots) if (slot := _counting(slots, lasting))}
    counters = {call: (slot.nbytes, slot.zeroed) for call, slot in counting.items()}
    chains = staggered(schedule, counters, alignment) if stagger else ()
    apart = {call: place for chain in chains for call, place in chain.items()}
    ends = [place.offset + _aligned(counting[call].nbytes, alignment) for call, place in apart.items()]
    shelves = _Shelves(alignment)
    blocks = [
        _blocks(slots, lasting, shelves, counting.get(call), apart.get(call)) for call, slots in enumerate(all_slots)
    ]
    arena = {
        block.storage: block.nbytes
        for own in blocks
        for block in own
        if block.home == "arena" and block.storage is not None
    }

    def running(home: str) -> tuple[int, ...]:
        return tuple(sum(_aligned(one.nbytes, alignment) for one in own if one.home == home) for own in blocks)

    return Layout(
        blocks=tuple(blocks),
        arena=arena,
        scratch=running("scratch"),
        workspaces=running("workspace"),
        asked=tuple(asked),
        front_nbytes=shelves.front.nbytes,
        kept_nbytes=shelves.kept.nbytes,
        cells_nbytes=shelves.cells.nbytes,
        staggered_nbytes=max(ends, default=0),
        chains=tuple(map(tuple, chains)),
    )


def _blocks(
    slots: Sequence[_Slot], lasting: Collection[int], shelves: _Shelves, counting: _Slot | None, apart: Place | None
) -> tuple[Block, ...]:
    """Choose a home for each block of one call."""
    first, last = _small_ones(slots, lasting)
    own: list[Block] = []
    for place, slot in enumerate(slots):
        home, offset, untouched = "scratch" if slot.small else "workspace", 0, 0
        above = any(block.home in ("staggered", "scratch") and block.nbytes <= SMALL_NBYTES for block in own)
        if slot.storage is not None and slot.storage in lasting and (not slot.small or place == first):
            home = "arena"
        elif slot.small and place < first:
            home, offset = "front", shelves.front.put(slot.nbytes)
        elif slot.small and place <= last:
            home, offset = "kept", shelves.kept.put(slot.nbytes)
        elif apart is not None and slot is counting:
            home, offset, untouched = "staggered", apart.offset, apart.untouched
        elif slot.small and slot.nbytes <= CELL_NBYTES and not above:
            home, offset, untouched = "cell", shelves.cells.put(slot.nbytes), slot.nbytes
        own.append(Block(slot.nbytes, slot.storage, home, offset, untouched))
    return tuple(own)


def _small_ones(slots: Sequence[_Slot], lasting: Collection[int]) -> tuple[int, int]:
    """Find the first and the last small block whose content lasts; -1 if none does."""
    wanted = [place for place, slot in enumerate(slots) if slot.small and slot.storage in lasting]
    return (wanted[0], wanted[-1]) if wanted else (-1, -1)


def _counting(slots: Sequence[_Slot], lasting: Collection[int]) -> _Slot | None:
    """Find the workspace with counters that is too large for a cell and may lie above the cells; None if there is none.

    Small blocks are handed out by address: it has to come after those that last, and before those that are scratch.
    """
    _, last = _small_ones(slots, lasting)
    for place, slot in enumerate(slots):
        counts = 0 < slot.zeroed <= COUNTERS_NBYTES and slot.nbytes > CELL_NBYTES
        beside = (one for one in slots[last + 1 : place] if one.small and one.nbytes > CELL_NBYTES)
        if counts and (not slot.small or (place > last and not any(beside))):
            return slot
    return None


class _Shelf:
    """Blocks side by side."""

    def __init__(self, alignment: int) -> None:
        self.nbytes = 0
        self._alignment = alignment

    def put(self, nbytes: int) -> int:
        """Return the offset of the next block."""
        offset = self.nbytes
        self.nbytes += _aligned(nbytes, self._alignment)
        return offset


class _Shelves:
    """Where small blocks go that share their bytes with nothing: below the arena, above it, and cells."""

    def __init__(self, alignment: int) -> None:
        self.front, self.kept, self.cells = (_Shelf(alignment) for _ in range(3))


def _made_by(program: Program, schedule: Schedule) -> tuple[list[list[int]], list[int]]:
    """List the intermediate storages that each call touches first; count the calls that touch each."""
    made: list[list[int]] = [[] for _ in program.calls]
    touched = [0] * len(program.storages)
    for call in schedule.order:
        for storage in sorted({access.ref.storage for access in program.calls[call].accesses}):
            if program.storages[storage].role == "intermediate" and program.storages[storage].nbytes:
                if not touched[storage]:
                    made[call].append(storage)
                touched[storage] += 1
    return made, touched


def _asked(program: Program, made: Sequence[int], asks: Sequence[Ask]) -> list[Ask]:
    """List all allocations of a call: what exists before it runs, such as the result of ``empty``, comes first."""
    known = {ask.storage for ask in asks}
    before = [Ask(program.storages[storage].nbytes, storage) for storage in made if storage not in known]
    return before + [
        ask if ask.freed_before is None else replace(ask, freed_before=ask.freed_before + len(before)) for ask in asks
    ]


@dataclass(slots=True)
class _Slot:
    """A block in the making."""

    small: bool
    claim: int
    nbytes: int
    storage: int | None = None
    free: bool = False
    zeroed: int = 0


def _served(asks: Sequence[Ask]) -> list[_Slot]:
    """Simulate torch's allocator: the blocks that serve these allocations, in order of first use.

    What was freed is handed out again before anything new: a result may get the block of a larger workspace.
    """
    slots: list[_Slot] = []
    holder: list[_Slot] = []
    for number, ask in enumerate(asks):
        for earlier in range(number):
            if asks[earlier].freed_before == number:
                holder[earlier].free = True
        small = ask.nbytes <= SMALL_NBYTES
        fits = [slot for slot in slots if slot.free and slot.small is small and (small or slot.claim >= ask.nbytes)]
        if fits:
            slot = fits[0]  # the lowest address, the smallest claim
        else:
            slot = _Slot(small, 0 if small else next_claim(ask.nbytes, _last_claim(slots)), 0)
            slots.append(slot)
        # Counters are looked for in workspaces that hold nothing else, before or after.
        slot.zeroed = ask.zeroed if ask.storage is None and not fits else 0
        slot.nbytes, slot.storage, slot.free = max(slot.nbytes, ask.nbytes), ask.storage, False
        holder.append(slot)
    return slots


def _last_claim(slots: Sequence[_Slot]) -> int:
    return max((slot.claim for slot in slots), default=0)


def next_claim(nbytes: int, last: int) -> int:
    """Choose the size a large block claims in torch's allocator, to be handed out after one of ``last`` bytes.

    >>> next_claim(11 << 20, 0) >> 20, next_claim(11 << 20, 20 << 20) >> 20, next_claim(31 << 20, 20 << 20) >> 20
    (20, 22, 32)
    """
    return max(_aligned(nbytes, _CLAIM_STEP), last + _CLAIM_STEP if last else _LARGE_CLAIM)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
