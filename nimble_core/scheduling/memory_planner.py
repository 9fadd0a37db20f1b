"""One arena for all streams: where each storage lies, the order this needs, and the proof that it holds.

The device's allocator can reuse a block only on the stream that freed it. Here offsets are planned ahead: a storage may
take the bytes of any other that is dead before it is made, on whatever stream. Large workspaces, which a call needs
only while it runs, lie among the storages; small ones, whose addresses have to be the highest, lie in a second arena.
Memory that an earlier program has left behind (``Lent``) is used as well, after its last read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nimble_core.algorithms.offset_packing import pack
from nimble_core.algorithms.reachability import unconnected
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import Lifetime, conflict_sets, happens_before, lifetimes, made, members
from nimble_core.utils.errors import InputError, ScheduleError

__all__ = [
    "ALIGNMENT",
    "NOTHING_LENT",
    "NO_NEEDS",
    "Lent",
    "MemoryPlan",
    "Needs",
    "check_memory",
    "packed",
    "placeable",
    "plan_memory",
    "reuse_hazards",
    "settled",
    "tenant_nbytes",
    "tenants",
]


ALIGNMENT = 512
"""Of offsets, bytes: what CUDA's allocations have."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory that an earlier program leaves to this one, until that one runs again.

    Args:
        nbytes: of it; 0: there is none.
        homes: ``(storage, offset)`` of what this program reads there: free once that was read last. Aligned.
        kept: ``(offset, bytes)`` of what has to stay as it is.
        least_nbytes: only storages of so many bytes go there.
    """

    nbytes: int = 0
    homes: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    least_nbytes: int = 0

    def end(self, alignment: int) -> int:
        """Offset of the arena itself: nothing lies across what separates the two."""
        return self.nbytes // alignment * alignment + alignment if self.nbytes else 0


NOTHING_LENT = Lent()


@dataclass(frozen=True, slots=True)
class Needs:
    """What has to be placed beside results, and where there is room.

    Args:
        scratch: small workspaces, bytes that each call needs while it runs, by call; empty: none.
        workspaces: large ones.
        lent: memory that is there already.
        inputs: storages of inputs to be placed as well: filled before the first call, free once they were read last.
    """

    scratch: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()
    lent: Lent = NOTHING_LENT
    inputs: tuple[int, ...] = ()


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything lies. All figures are bytes.

    Args:
        offsets: of each storage, by storage index; -1: not placed. All are multiples of ``alignment``. Those below
            ``start`` are in lent memory, the others in the arena, that much further on.
        nbytes: size of the arena.
        needs: what else was to be placed.
        workspace_offsets: of each call's large workspaces, by call, as those of storages; -1: none.
        scratch_offsets: of each call's small ones in the scratch arena, by call; -1: none.
        scratch_nbytes: size of the scratch arena.
        alignment: of offsets; sizes are rounded up to it.
    """

    offsets: tuple[int, ...]
    nbytes: int
    needs: Needs = NO_NEEDS
    workspace_offsets: tuple[int, ...] = ()
    scratch_offsets: tuple[int, ...] = ()
    scratch_nbytes: int = 0
    alignment: int = ALIGNMENT

    @property
    def start(self) -> int:
        """Offset of the arena's first byte."""
        return self.needs.lent.end(self.alignment)

    @property
    def held_nbytes(self) -> int:
        """Of both arenas."""
        return self.nbytes + self.scratch_nbytes

    @property
    def workspace_nbytes(self) -> int:
        """Most that one call needs while it runs."""
        both = zip_longest(self.needs.scratch, self.needs.workspaces, fillvalue=0)
        return max((small + large for small, large in both), default=0)


def plan_memory(
    program: Program,
    schedule: Schedule,
    *,
    needs: Needs = NO_NEEDS,
    place: Collection[int] | None = None,
    alignment: int = ALIGNMENT,
) -> MemoryPlan:
    """Plan offsets in one arena, shared where the schedule's own order allows it: no wait is added.

    Two storages may share bytes exactly if every call that touches the one happens before every call that touches the
    other, by the order within streams and by waits. Outputs share with what is dead before they are made, and live to
    the end, never in lent memory. Two calls' workspaces may share bytes if one happens before the other.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of the same program.
        needs: workspaces, and memory that is there already.
        place: intermediate storages to be placed; None: all. Those that no call touches are not placed.
        alignment: of all offsets, bytes.

    Raises:
        InputError: workspaces of another number of calls, a storage that the schedule does not make, or an alignment
            below 1.

    Complexity:
        O(storages * boundaries) operations on bitsets of all storages, see
        :func:`~nimble_core.algorithms.offset_packing.first_fit`.
    """
    size = len(program.calls)
    for what, nbytes in (("scratch", needs.scratch), ("workspaces", needs.workspaces)):
        if nbytes and len(nbytes) != size:
            raise InputError(f"{what} of {len(nbytes)} calls for a program of {size}", fix="bytes for each call, or ()")
    if alignment < 1:
        raise InputError(f"an alignment of {alignment} bytes", fix="at least 1; 512 suits CUDA")
    before = happens_before(schedule)
    lives = tenants(program, schedule, needs, place)
    found, total = packed(program, lives, conflict_sets(before, lives), needs, alignment)
    users = _running(schedule, needs.scratch)
    units = [-(-needs.scratch[life.storage] // alignment) for life in users]
    in_scratch, scratch_total = pack(units, conflict_sets(before, users))
    scratch_offsets = [-1] * len(needs.scratch)
    for life, offset in zip(users, in_scratch, strict=True):
        scratch_offsets[life.storage] = offset * alignment
    plan = MemoryPlan(
        offsets=(),
        nbytes=total,
        needs=needs,
        scratch_offsets=tuple(scratch_offsets),
        scratch_nbytes=scratch_total * alignment,
        alignment=alignment,
    )
    return settled(program, plan, lives, found, total)


def tenants(program: Program, schedule: Schedule, needs: Needs, place: Collection[int] | None) -> list[Lifetime]:
    """List what shares the arena, in the order it is made: storages, then calls' large workspaces."""
    homes = [storage for storage, _ in needs.lent.homes]
    return _lives(program, schedule, needs, [*placeable(program, place), *homes, *needs.inputs])


def _lives(program: Program, schedule: Schedule, needs: Needs, storages: Iterable[int]) -> list[Lifetime]:
    """List lifetimes of these storages and of calls' large workspaces, in the order they are made."""
    size = len(program.storages)
    running = [replace(life, storage=size + life.storage) for life in _running(schedule, needs.workspaces)]
    return sorted([*lifetimes(program, schedule, storages), *running], key=made)


def packed(
    program: Program, lives: Sequence[Lifetime], conflicts: Sequence[int], needs: Needs, alignment: int
) -> tuple[list[int], int]:
    """Pack the tenants; return their offsets and the size of the arena, bytes."""
    units = [-(-tenant_nbytes(program, needs, life.storage) // alignment) for life in lives]
    rows, fixed, lent = list(conflicts), {}, needs.lent
    end = lent.end(alignment) // alignment
    if end:
        count, homes = len(lives), dict(lent.homes)
        everything, barred = (1 << count) - 1, 0
        for index, life in enumerate(lives):
            if life.storage in homes:
                fixed[index] = homes[life.storage] // alignment
            elif not life.last or tenant_nbytes(program, needs, life.storage) < lent.least_nbytes:
                barred |= 1 << index
        taken = [(end - 1, 1, everything), (0, end - 1, barred)]
        for offset, nbytes in lent.kept:
            first = offset // alignment
            taken.append((first, -(-(offset + nbytes) // alignment) - first, everything))
        for start, size, against in taken:
            fixed[len(units)] = start
            for index in members(against):
                rows[index] |= 1 << len(units)
            units.append(size)
            rows.append(against)
    offsets, total = pack(units, rows, fixed)
    return [offset * alignment for offset in offsets[: len(lives)]], (total - end) * alignment


def settled(
    program: Program, plan: MemoryPlan, lives: Sequence[Lifetime], offsets: Sequence[int], nbytes: int
) -> MemoryPlan:
    """Return the plan with its tenants at these offsets."""
    where = [-1] * (len(program.storages) + len(plan.needs.workspaces))
    for life, offset in zip(lives, offsets, strict=True):
        where[life.storage] = offset
    size = len(program.storages)
    return replace(plan, offsets=tuple(where[:size]), workspace_offsets=tuple(where[size:]), nbytes=nbytes)


def reuse_hazards(program: Program, schedule: Schedule, plan: MemoryPlan) -> tuple[tuple[int, int], ...]:
    """Return the order that reused bytes need: pairs ``(last use by the old owner, first use by the new)``.

    A storage has one such call for each stream that uses it. Only owners that follow each other directly, in issue
    order, are looked at: where they are ordered, all owners of a byte are.

    Returns:
        Pairs of call indices, sorted, no duplicates; scratch included.

    Complexity:
        O(n log n) for n storages with few neighbours each.
    """
    order = schedule.order
    pairs = {
        (order[u], order[v])
        for _, lives, successions in _successions(program, schedule, plan)
        for old, new in successions
        for u in lives[old].last
        for v in lives[new].first
    }
    return tuple(sorted(pairs))


def check_memory(program: Program, schedule: Schedule, plan: MemoryPlan) -> MemoryPlan:
    """Return ``plan`` if no byte ever has two owners at once, whatever the streams' relative speed.

    Owners of the same bytes are found anew from the offsets, and their order from streams and waits: nothing that the
    planner believed is used.

    Raises:
        ScheduleError: names the first two storages (or calls, for scratch) that share bytes without being ordered, or
            what lies outside its arena.

    Complexity:
        That of :func:`reuse_hazards`, and one bitset pass over the calls that use bytes last.
    """
    outputs = {ref.storage for ref in program.outputs if program.storages[ref.storage].role == "intermediate"}
    for tenant, offset in enumerate((*plan.offsets, *plan.workspace_offsets)):
        end, below = offset + tenant_nbytes(program, plan.needs, tenant), offset < plan.start
        if offset < 0:
            continue
        if end > (plan.needs.lent.nbytes if below else plan.start + plan.nbytes):
            where = "lent memory" if below else f"the arena of {plan.nbytes} bytes"
            raise ScheduleError(
                f"{_name(program, plan.needs, tenant)} at byte {offset} ends outside {where}",
                fix="plan the memory again",
            )
        if below and tenant in outputs and end > offset:
            raise ScheduleError(
                f"{_name(program, plan.needs, tenant)} is an output in lent memory", fix="plan the memory again"
            )
    order = schedule.order
    pairs: dict[tuple[int, int], tuple[str, int, int]] = {}
    for kind, lives, successions in _successions(program, schedule, plan):
        for old, new in successions:
            if not lives[old].last:
                taken, stays = lives[new].first, _name(program, plan.needs, lives[old].storage)
                raise ScheduleError(
                    f"{stays} {'is an output' if lives[old].storage >= 0 else 'is kept'}, and "
                    f"{_name(program, plan.needs, lives[new].storage)} takes its bytes"
                    + (f" at {program.calls[order[taken[0]]]}" if taken else ""),
                    fix="plan the memory again",
                )
            if not lives[new].first:
                both = " and ".join(_name(program, plan.needs, lives[one].storage) for one in (old, new))
                raise ScheduleError(f"{both} share bytes from the start", fix="lend neither of them")
            for u in lives[old].last:
                for v in lives[new].first:
                    pairs.setdefault((u, v), (kind, lives[old].storage, lives[new].storage))
    for u, v in unconnected(happens_before(schedule), pairs):
        kind, old, new = pairs[u, v]
        first, second = program.calls[order[u]], program.calls[order[v]]
        if kind == "scratch":
            what = f"{first} and {second} share scratch memory"
        else:
            names = _name(program, plan.needs, old), _name(program, plan.needs, new)
            what = f"{names[0]}, used by {first}, and {names[1]}, used by {second}, share bytes"
        raise ScheduleError(f"{what} and nothing orders them", fix="plan the memory for this very schedule")
    return plan


def placeable(program: Program, place: Collection[int] | None) -> list[int]:
    """List the storages to be placed, ascending: ``place``, or all that the calls themselves make.

    Raises:
        InputError: a storage that is not there or that the calls do not make.
    """
    if place is None:
        return [index for index, storage in enumerate(program.storages) if storage.role == "intermediate"]
    for index in place:
        if not 0 <= index < len(program.storages) or program.storages[index].role != "intermediate":
            raise InputError(f"storage {index} is not made by the calls", fix="place intermediate storages only")
    return sorted(place)


def tenant_nbytes(program: Program, needs: Needs, tenant: int) -> int:
    """Return the bytes of a storage or, numbered after all storages, of a call's large workspaces."""
    size = len(program.storages)
    return program.storages[tenant].nbytes if tenant < size else needs.workspaces[tenant - size]


def _name(program: Program, needs: Needs, tenant: int) -> str:
    if tenant < 0:
        return "a part of lent memory"
    size = len(program.storages)
    what = f"storage {tenant}" if tenant < size else f"workspace of call {tenant - size}"
    return f"{what} ({tenant_nbytes(program, needs, tenant)} bytes)"


def _running(schedule: Schedule, nbytes: Sequence[int]) -> list[Lifetime]:
    """List lifetimes of what calls need only while they run; ``storage`` is the call."""
    if not nbytes:
        return []
    return [Lifetime(call, (at,), (at,)) for at, call in enumerate(schedule.order) if nbytes[call]]


def _successions(
    program: Program, schedule: Schedule, plan: MemoryPlan
) -> Iterator[tuple[str, list[Lifetime], list[tuple[int, int]]]]:
    """Yield for both arenas its name, the lifetimes in it, and who directly takes over bytes from whom."""
    needs, where = plan.needs, (*plan.offsets, *plan.workspace_offsets)
    lives = _lives(program, schedule, needs, [storage for storage, offset in enumerate(plan.offsets) if offset >= 0])
    stay = [Lifetime(-1, (), ()) for _ in needs.lent.kept]
    blocks = [(where[life.storage], tenant_nbytes(program, needs, life.storage)) for life in lives]
    yield "storage", [*stay, *lives], _takeovers([*needs.lent.kept, *blocks])
    users = _running(schedule, needs.scratch)
    yield (
        "scratch",
        users,
        _takeovers((plan.scratch_offsets[life.storage], needs.scratch[life.storage]) for life in users),
    )


def _takeovers(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Find pairs ``(old, new)`` of blocks ``(offset, nbytes)`` that own a byte one right after the other."""
    # owner[i] has the bytes from start[i] to start[i + 1].
    start, owner = [0], [-1]
    found: list[tuple[int, int]] = []
    for block, (offset, nbytes) in enumerate(blocks):
        if not nbytes:
            continue
        end = offset + nbytes
        low = bisect_right(start, offset) - 1
        high = bisect_left(start, end)
        found += [(old, block) for old in sorted(set(owner[low:high])) if old >= 0]
        tail = [] if high < len(start) and start[high] == end else [(end, owner[high - 1])]
        head = [(start[low], owner[low])] if start[low] < offset else []
        pieces = [*head, (offset, block), *tail]
        start[low:high] = [at for at, _ in pieces]
        owner[low:high] = [who for _, who in pieces]
    return found
