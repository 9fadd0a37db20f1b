"""Release points: when a schedule's own order allows memory to be given back.

A block that is freed on one stream may be handed out again on that stream at once, while other streams still read it.
So a storage is released on the stream that made it, before the first call there that *happens after* every use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nimble_core.algorithms.reachability import ancestors
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule, positions, stream_neighbours
from nimble_core.scheduling.liveness import happens_before, members

__all__ = ["ReleasePlan", "release_plan", "serial_peak", "uses_in_turn"]


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """Which storages may be released when.

    Args:
        before: storages to release just before issuing ``Schedule.order[position]``, by position; ascending. Memory
            released there may be reused by that call and by later calls *on its stream*.
        stream: the stream that makes each storage, by storage index: that of the first call in issue order that
            touches it; -1 for storages that are not the schedule's to allocate or are never touched.
        kept: intermediate storages that are never released: outputs, and those with no later call on their stream
            that happens after every use; ascending.
    """

    before: tuple[tuple[int, ...], ...]
    stream: tuple[int, ...]
    kept: tuple[int, ...]


def release_plan(program: Program, schedule: Schedule) -> ReleasePlan:
    """Find the earliest safe release of each intermediate storage on the stream that made it.

    Safe before call c means: every call that touches the storage happens before c by stream order and waits, whatever
    the streams' relative speed. Inputs, parameters, buffers, constants, generators and outputs are never released.

    Args:
        program: the calls and what they touch.
        schedule: a checked schedule of the same program.

    Complexity:
        Linear in accesses, plus one bitset pass over the last uses of storages that are used on several streams.
    """
    stream, order = schedule.stream, schedule.order
    position = positions(order)
    touches = uses_in_turn(program, order)
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
    released = {storage for storages in before for storage in storages}
    kept = tuple(storage for storage, calls in enumerate(touches) if calls and storage not in released)
    return ReleasePlan(before=tuple(before), stream=tuple(home), kept=kept)


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
    for storage, calls in enumerate(uses_in_turn(program, range(len(program.calls)))):
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


def uses_in_turn(program: Program, order: Sequence[int]) -> list[list[int]]:
    """List the calls that touch each intermediate storage, in issue order; no calls for other storages."""
    touches: list[list[int]] = [[] for _ in program.storages]
    for call in order:
        for storage in {access.ref.storage for access in program.calls[call].accesses}:
            if program.storages[storage].role == "intermediate":
                touches[storage].append(call)
    return touches
