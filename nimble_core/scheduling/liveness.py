"""Lifetimes of storages under a schedule, valid for any relative speed of the streams.

One storage may take the place of another where each call that uses the one *happens before* each that uses the other,
by the order within streams and by waits. That one is used earlier in program order says nothing across streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nimble_core.algorithms.reachability import ancestors, inherited, predecessor_lists
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule, positions, stream_neighbours

__all__ = [
    "Lifetime",
    "conflict_sets",
    "dead_before",
    "happens_before",
    "lifetimes",
    "made",
    "members",
    "release_plan",
    "serial_peak",
]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Between which calls a storage is in use; calls are named by their positions in the issue order.

    On one stream earlier calls end before later ones start: one first and one last use on each stream say all.

    Args:
        storage: index into ``Program.storages``.
        first: position of the first use on each stream that uses the storage, ascending; empty if it is there from the
            start.
        last: position of the last use on each of those streams, ascending; empty if it lives to the end.
    """

    storage: int
    first: tuple[int, ...]
    last: tuple[int, ...]


def lifetimes(program: Program, schedule: Schedule, storages: Iterable[int]) -> list[Lifetime]:
    """Return the lifetimes of those of ``storages`` that any call touches, in the order they are made.

    Outputs live to the end. What the calls do not make exists from the start.

    Complexity:
        Linear in accesses.
    """
    first: dict[int, dict[int, int]] = {storage: {} for storage in storages}
    last: dict[int, dict[int, int]] = {storage: {} for storage in first}
    for position, call in enumerate(schedule.order):
        lane = schedule.stream[call]
        for access in program.calls[call].accesses:
            storage = access.ref.storage
            if storage in first:
                first[storage].setdefault(lane, position)
                last[storage][lane] = position
    for ref in program.outputs:
        last[ref.storage] = {}
    found = [
        Lifetime(
            storage,
            tuple(sorted(uses.values())) if program.storages[storage].role == "intermediate" else (),
            tuple(sorted(last[storage].values())),
        )
        for storage, uses in first.items()
        if uses
    ]
    return sorted(found, key=made)


def made(life: Lifetime) -> tuple[tuple[int, ...], int]:
    """Sort key: lifetimes by when they begin."""
    return life.first[:1], life.storage


def happens_before(schedule: Schedule) -> list[list[int]]:
    """List the direct predecessors of each call, by stream order and waits: positions in the issue order."""
    position = positions(schedule.order)
    pairs = (*stream_neighbours(schedule.stream, schedule.order), *schedule.syncs)
    return predecessor_lists(len(position), ((position[u], position[v]) for u, v in pairs))


def dead_before(predecessors: Sequence[Sequence[int]], last: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield for each call in turn the bitset of the storages whose every use happens before it.

    Args:
        predecessors: what each call directly comes after, all of lower index.
        last: the last uses of each storage, one on each stream that uses it; empty: it lives to the end.

    Yields:
        One ``int`` per call; bit ``i`` stands for the ``i``-th of ``last``.

    Complexity:
        O(edges * storages * d / word size), d the mean number of streams that use a storage.

    >>> list(dead_before([[], [0], [0], [1, 2]], [[0], [1, 2], []]))
    [0, 1, 1, 3]
    """
    # Row k has a bit for the k-th last use of each storage that has so many, up to the last such storage. A storage is
    # dead where its bits are set in every row.
    ends: list[int] = [0] * len(predecessors)
    starts: list[int] = []
    absent: list[int] = []
    start = 0
    for row in range(max(map(len, last), default=0)):
        users = [index for index, uses in enumerate(last) if len(uses) > row]
        there = 0
        for index in users:
            ends[last[index][row]] |= 1 << start + index
            there |= 1 << index
        starts.append(start)
        absent.append(~there if row else 0)
        start += users[-1] + 1
    # Storages without an end have no bit in any row: what is read there belongs to the next row.
    mortal = sum(1 << index for index, uses in enumerate(last) if uses)

    for known in inherited(predecessors, ends.__getitem__):
        dead = known & mortal
        for start, missing in zip(starts, absent, strict=True):
            dead &= known >> start | missing
        yield dead


def conflict_sets(before: Sequence[Sequence[int]], lives: Sequence[Lifetime]) -> list[int]:
    """Return for each lifetime the bitset of the others that it may overlap.

    Args:
        before: what each call directly comes after (:func:`happens_before`).
        lives: the lifetimes; bit ``i`` of a set stands for the ``i``-th.

    Complexity:
        Twice that of :func:`dead_before`.
    """
    end = len(before) - 1
    after: list[list[int]] = [[] for _ in before]
    for position, sources in enumerate(before):
        for source in sources:
            after[end - source].append(end - position)
    dead = list(dead_before(before, [life.last for life in lives]))
    # Seen from the end, what is not made yet is what is over.
    unmade = list(dead_before(after, [[end - position for position in life.first] for life in lives]))
    everything = (1 << len(lives)) - 1
    sets = []
    for index, life in enumerate(lives):
        over, later = everything if life.first else 0, everything if life.last else 0
        for position in life.first:
            over &= dead[position]
        for position in life.last:
            later &= unmade[end - position]
        sets.append(everything & ~(over | later | 1 << index))
    return sets


def members(bits: int) -> list[int]:
    """List the members of a bitset, ascending.

    >>> members(0b1011)
    [0, 1, 3]
    """
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def release_plan(program: Program, schedule: Schedule) -> list[tuple[int, ...]]:
    """Find the earliest safe release of each intermediate storage on the stream that made it.

    A block that is freed on one stream may be handed out again there at once, while other streams still read it. So a
    storage is released before the first call on the stream of its first use that *happens after* every use, whatever
    the streams' relative speed. Inputs, parameters, buffers, constants, generators and outputs are never released.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of the same program.

    Returns:
        Storages to release just before issuing ``schedule.order[position]``, by position; ascending.

    Complexity:
        Linear in accesses, plus one bitset pass over the last uses of storages that are used on several streams.
    """
    stream, order = schedule.stream, schedule.order
    position = positions(order)
    touches = _uses_in_turn(program, order)
    home = [stream[calls[0]] if calls else -1 for calls in touches]
    outputs = {ref.storage for ref in program.outputs}
    releasable = [storage for storage, calls in enumerate(touches) if calls and storage not in outputs]

    # Within a stream, the last use happens after the earlier ones: one use per stream has to be known.
    pending = [0] * len(program.storages)
    local: dict[int, list[int]] = {}
    foreign: dict[int, dict[int, list[int]]] = {}
    for storage in releasable:
        last_on = {stream[call]: call for call in touches[storage]}
        pending[storage] = len(last_on)
        for lane, call in last_on.items():
            if lane == home[storage]:
                local.setdefault(call, []).append(storage)
            else:
                foreign.setdefault(home[storage], {}).setdefault(position[call], []).append(storage)

    marked = sorted({at for uses in foreign.values() for at in uses})
    rank = {at: bit for bit, at in enumerate(marked)}
    awaited = {lane: sum(1 << rank[at] for at in uses) for lane, uses in foreign.items()}
    previous = {v: u for u, v in stream_neighbours(stream, order)}

    before: list[tuple[int, ...]] = []
    for call, known in zip(order, ancestors(happens_before(schedule), marked), strict=True):
        lane = stream[call]
        done = list(local.get(previous.get(call, -1), ()))
        news = known & awaited.get(lane, 0)
        if news:
            awaited[lane] ^= news
        for bit in members(news):
            done += foreign[lane][marked[bit]]
        free = []
        for storage in done:
            pending[storage] -= 1
            if not pending[storage]:
                free.append(storage)
        before.append(tuple(sorted(free)))
    return before


def serial_peak(program: Program, scratch: Sequence[int] = ()) -> int:
    """Return the peak bytes of intermediate storages when calls run one after the other, as in eager.

    Each storage is there from its first use to its last, outputs to the end.

    Args:
        program: the calls and what they touch.
        scratch: bytes that each call needs while it runs, by call; empty: none.

    Complexity:
        Linear in accesses.
    """
    sizes = [storage.nbytes for storage in program.storages]
    outputs = {ref.storage for ref in program.outputs}
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for storage, calls in enumerate(_uses_in_turn(program, range(len(program.calls)))):
        if calls:
            made[calls[0]] = made.get(calls[0], 0) + sizes[storage]
            if storage not in outputs:
                freed[calls[-1]] = freed.get(calls[-1], 0) + sizes[storage]
    alive = peak = 0
    for call in range(len(program.calls)):
        alive += made.get(call, 0)
        peak = max(peak, alive + (scratch[call] if scratch else 0))
        alive -= freed.get(call, 0)
    return peak


def _uses_in_turn(program: Program, order: Sequence[int]) -> list[list[int]]:
    """List the calls that touch each intermediate storage, in issue order; no calls for other storages."""
    touches: list[list[int]] = [[] for _ in program.storages]
    for call in order:
        for storage in {access.ref.storage for access in program.calls[call].accesses}:
            if program.storages[storage].role == "intermediate":
                touches[storage].append(call)
    return touches
