"""One arena for all streams: where each storage lies, the order that this asks for, and the proof that it is kept.

The device's allocator can reuse a block on the stream that freed it only. Here offsets are planned ahead: whoever is
dead before another is made, on whatever stream, may give it its bytes. Workspaces that a call needs only while it runs
lie in a second arena, so that they are counted apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nimble_core.algorithms.packing import pack
from nimble_core.algorithms.reachability import unconnected
from nimble_core.errors import InputError, ScheduleError
from nimble_core.lifetimes import Lifetime, conflict_sets, happens_before, lifetimes
from nimble_core.program import Program
from nimble_core.schedule import Schedule

__all__ = ["MemoryPlan", "check_memory", "placeable", "plan_memory", "reuse_hazards"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything lies. All figures are bytes.

    Args:
        offsets: of each storage in the arena, by storage index; -1: not placed. All are multiples of ``alignment``.
        nbytes: size of the arena.
        scratch: what each call needs only while it runs, by call; empty: none.
        scratch_offsets: of each call's scratch in the scratch arena, by call; -1: none.
        scratch_nbytes: size of the scratch arena.
        alignment: of offsets; sizes are rounded up to it.
    """

    offsets: tuple[int, ...]
    nbytes: int
    scratch: tuple[int, ...] = ()
    scratch_offsets: tuple[int, ...] = ()
    scratch_nbytes: int = 0
    alignment: int = 512


def plan_memory(
    program: Program,
    schedule: Schedule,
    *,
    scratch: Sequence[int] = (),
    place: Collection[int] | None = None,
    alignment: int = 512,
) -> MemoryPlan:
    """Offsets in one arena, shared where the schedule's own order allows it: nothing new has to wait.

    Two storages may share bytes exactly if every call that touches the one happens before every call that touches the
    other, by the order within streams and by waits. Outputs share with what is dead before they are made, and live to
    the end. Two calls' scratch may share bytes if one happens before the other.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of the same program.
        scratch: bytes that each call needs while it runs, by call; empty: none.
        place: intermediate storages to be placed; None: all. Those that no call touches are not placed.
        alignment: of all offsets, bytes.

    Raises:
        InputError: ``scratch`` of another number of calls, a storage that the schedule does not make, or an alignment
            below 1.

    Complexity:
        O(storages * boundaries) operations on bitsets of all storages, see
        :func:`~nimble_core.algorithms.packing.first_fit`.
    """
    size = len(program.calls)
    if scratch and len(scratch) != size:
        raise InputError(f"scratch of {len(scratch)} calls for a program of {size}", fix="bytes for each call, or ()")
    if alignment < 1:
        raise InputError(f"an alignment of {alignment} bytes", fix="at least 1; 512 suits CUDA")
    before = happens_before(schedule)
    lives = lifetimes(program, schedule, placeable(program, place))
    units = [-(-program.storages[life.storage].nbytes // alignment) for life in lives]
    found, total = pack(units, conflict_sets(before, lives))
    offsets = [-1] * len(program.storages)
    for life, offset in zip(lives, found, strict=True):
        offsets[life.storage] = offset * alignment

    users = _scratch_lives(schedule, scratch)
    units = [-(-scratch[life.storage] // alignment) for life in users]
    found, scratch_total = pack(units, conflict_sets(before, users))
    scratch_offsets = [-1] * len(scratch)
    for life, offset in zip(users, found, strict=True):
        scratch_offsets[life.storage] = offset * alignment
    return MemoryPlan(
        offsets=tuple(offsets),
        nbytes=total * alignment,
        scratch=tuple(scratch),
        scratch_offsets=tuple(scratch_offsets),
        scratch_nbytes=scratch_total * alignment,
        alignment=alignment,
    )


def reuse_hazards(program: Program, schedule: Schedule, plan: MemoryPlan) -> tuple[tuple[int, int], ...]:
    """The order that reused bytes ask for: ``(call that last uses them, call that first uses them for another)``.

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
    """Return ``plan`` if no byte of it is ever two things at a time, whatever the streams' relative speed.

    Owners of the same bytes are found anew from the offsets, and their order from streams and waits: nothing that the
    planner believed is used.

    Raises:
        ScheduleError: names the first two storages (or calls, for scratch) that share bytes without being ordered, or
            what lies outside its arena.

    Complexity:
        That of :func:`reuse_hazards`, and one bitset pass over the calls that use bytes last.
    """
    for storage, offset in enumerate(plan.offsets):
        if offset >= 0 and offset + program.storages[storage].nbytes > plan.nbytes:
            raise ScheduleError(
                f"{_name(program, storage)} at byte {offset} ends outside the arena of {plan.nbytes} bytes",
                fix="plan the memory again",
            )
    order = schedule.order
    pairs: dict[tuple[int, int], tuple[str, int, int]] = {}
    for kind, lives, successions in _successions(program, schedule, plan):
        for old, new in successions:
            if not lives[old].last:
                raise ScheduleError(
                    f"{_name(program, lives[old].storage)} is an output, and {_name(program, lives[new].storage)} "
                    f"takes its bytes at {program.calls[order[lives[new].first[0]]]}",
                    fix="plan the memory again",
                )
            for u in lives[old].last:
                for v in lives[new].first:
                    pairs.setdefault((u, v), (kind, lives[old].storage, lives[new].storage))
    for u, v in unconnected(happens_before(schedule), pairs):
        kind, old, new = pairs[u, v]
        first, second = program.calls[order[u]], program.calls[order[v]]
        if kind == "scratch":
            what = f"{first} and {second} share scratch memory"
        else:
            what = f"{_name(program, old)}, used by {first}, and {_name(program, new)}, used by {second}, share bytes"
        raise ScheduleError(f"{what} and nothing orders them", fix="plan the memory for this very schedule")
    return plan


def placeable(program: Program, place: Collection[int] | None) -> list[int]:
    """Storages to be placed, ascending: ``place``, or all that the calls themselves make.

    Raises:
        InputError: a storage that is not there or that the calls do not make.
    """
    if place is None:
        return [index for index, storage in enumerate(program.storages) if storage.role == "intermediate"]
    for index in place:
        if not 0 <= index < len(program.storages) or program.storages[index].role != "intermediate":
            raise InputError(f"storage {index} is not made by the calls", fix="place intermediate storages only")
    return sorted(place)


def _name(program: Program, storage: int) -> str:
    return f"storage {storage} ({program.storages[storage].nbytes} bytes)"


def _scratch_lives(schedule: Schedule, scratch: Sequence[int]) -> list[Lifetime]:
    """Lifetimes of the calls' scratch; ``storage`` is the call."""
    if not scratch:
        return []
    return [Lifetime(call, (at,), (at,)) for at, call in enumerate(schedule.order) if scratch[call]]


def _successions(
    program: Program, schedule: Schedule, plan: MemoryPlan
) -> Iterator[tuple[str, list[Lifetime], list[tuple[int, int]]]]:
    """For both arenas: its name, the lifetimes in it, and who directly takes over bytes from whom."""
    lives = lifetimes(program, schedule, [storage for storage, offset in enumerate(plan.offsets) if offset >= 0])
    blocks = ((plan.offsets[life.storage], program.storages[life.storage].nbytes) for life in lives)
    yield "storage", lives, _takeovers(blocks)
    users = _scratch_lives(schedule, plan.scratch)
    yield (
        "scratch",
        users,
        _takeovers((plan.scratch_offsets[life.storage], plan.scratch[life.storage]) for life in users),
    )


def _takeovers(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs ``(old, new)`` of blocks ``(offset, nbytes)`` that own the same byte one right after the other."""
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
