"""Plans under a memory limit: order is added where bytes have to be reused sooner than streams and waits allow."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import Lifetime, conflict_sets, dead_before, happens_before, members
from nimble_core.scheduling.memory_planner import (
    ALIGNMENT,
    NO_NEEDS,
    MemoryPlan,
    Needs,
    packed,
    plan_memory,
    reuse_hazards,
    settled,
    tenant_nbytes,
    tenants,
)
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.scheduling.simulator import EXACT, DeviceModel, simulate
from nimble_core.utils.errors import ScheduleError

__all__ = ["limit_memory"]

_ATTEMPTS = 8


def limit_memory(
    graph: CallGraph,
    program: Program,
    schedule: Schedule,
    limit_nbytes: int,
    *,
    costs: Costs,
    device: DeviceModel = EXACT,
    needs: Needs = NO_NEEDS,
    place: Collection[int] | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[Schedule, MemoryPlan]:
    """Fit a schedule to a memory limit by adding order where bytes have to be reused sooner.

    A schedule that fits stays. Else the fastest plan found that does is on the same streams, or on one.

    Calls are walked in an issue order, on a clock, and book their memory in that order, workspaces included: a call
    that finds none free books when the next storage is dead, and starts no sooner. A storage may take the bytes of
    those that are dead when it is booked, and of those that the schedule itself orders before it. Offsets are packed
    for that, and each reuse becomes order. Booking in one order cannot deadlock: whenever everything booked has run,
    memory is as full as on one stream. The schedule's own order and program order are tried, with less and less to book
    until the packing fits.

    Args:
        graph: the hazards.
        program: the calls and what they touch.
        schedule: a checked schedule of ``graph``; gives the streams.
        limit_nbytes: most bytes of both arenas together.
        costs: duration of each call.
        device: what the plans are compared on.
        needs: workspaces, and memory that is there already and does not count.
        place: intermediate storages to be placed; None: all.
        alignment: of all offsets, bytes.

    Raises:
        ScheduleError: the limit is too small; names the smallest for which a plan was found.

    Complexity:
        Some ten packings of ``plan_memory``.

    Source:
        Booking in a fixed order: Eyraud-Dubois, Marchal, Sinnen, Vivien, "Parallel Scheduling of Task Trees with
        Limited Memory", ACM TOPC 2 (2015), §5; here for storages of any DAG.
    """
    plan = plan_memory(program, schedule, needs=needs, place=place, alignment=alignment)
    smallest = plan.held_nbytes
    if smallest <= limit_nbytes:
        return schedule, plan
    found: list[tuple[Schedule, MemoryPlan]] = []
    for order in dict.fromkeys((schedule.order, tuple(range(graph.size)))):
        base = plan_streams(graph, schedule.stream, policy=schedule.policy, order=order)
        whole = plan_memory(program, base, needs=needs, place=place, alignment=alignment)
        for plan in _arenas(program, base, whole, costs, place, limit_nbytes):
            smallest = min(smallest, plan.held_nbytes)
            if plan.held_nbytes <= limit_nbytes:
                extra = reuse_hazards(program, base, plan)
                limited = plan_streams(graph, base.stream, policy=base.policy, order=order, extra=extra)
                found.append((replace(limited, priority=schedule.priority), plan))
                break
    alone = plan_streams(graph, [0] * graph.size, policy=schedule.policy)
    plan = plan_memory(program, alone, needs=needs, place=place, alignment=alignment)
    smallest = min(smallest, plan.held_nbytes)
    if plan.held_nbytes <= limit_nbytes:
        found.append((alone, plan))
    if not found:
        raise ScheduleError(
            f"no memory of {limit_nbytes} bytes was found: the smallest has {smallest}",
            fix=f"a memory limit of at least {smallest} bytes",
        )
    return min(found, key=lambda pair: simulate(graph, pair[0], costs, device).length_ns)


def _arenas(
    program: Program,
    schedule: Schedule,
    whole: MemoryPlan,
    costs: Costs,
    place: Collection[int] | None,
    limit_nbytes: int,
) -> Iterator[MemoryPlan]:
    """Yield plans from fast to small: ``whole``, then those with less memory; the last is that of one stream."""
    yield whole
    needs, unit = whole.needs, whole.alignment
    lives = tenants(program, schedule, needs, place)
    room = limit_nbytes - whole.scratch_nbytes
    before = happens_before(schedule)
    dead = list(dead_before(before, [life.last for life in lives]))
    ns = [costs.ns[call] for call in schedule.order]
    units = [-(-tenant_nbytes(program, needs, life.storage) // unit) for life in lives]
    conflicts = conflict_sets(before, lives)
    budget = room // unit
    lent = needs.lent.nbytes // unit
    for _ in range(_ATTEMPTS):
        heirs = _book(lives, units, before, dead, ns, budget + lent)
        if heirs is None:
            break
        offsets, total = packed(program, lives, _without_heirs(conflicts, heirs), needs, unit)
        yield settled(program, whole, lives, offsets, total)
        # Packing loses some bytes between blocks: book as much less as it missed the limit by.
        budget -= max((total - room) // unit, budget // 50 + 1)
    births = [life.first[0] if life.first else -1 for life in lives]
    serial = [bisect_right(births, life.last[-1]) if life.last else len(lives) for life in lives]
    offsets, total = packed(program, lives, _without_heirs(conflicts, serial), needs, unit)
    yield settled(program, whole, lives, offsets, total)


def _book(
    lives: Sequence[Lifetime],
    units: Sequence[int],
    before: Sequence[Sequence[int]],
    dead: Sequence[int],
    ns: Sequence[float],
    budget: int,
) -> list[int] | None:
    """Walk the calls on a clock with ``budget`` units of memory, in which lies what is there from the start.

    Returns:
        For each storage the first of those, in the order they are made, that are booked after its end, or their number;
        None if the budget is too small for one call after another.
    """
    size = len(lives)
    heirs = [size] * size
    held = list(units)
    ending: list[list[int]] = [[] for _ in before]
    for index, life in enumerate(lives):
        if life.last:
            ending[life.last[-1]].append(index)
    ends_ns = [0.0] * len(before)
    now_ns = 0.0
    used_up: list[tuple[float, int]] = []  # storages without further users: (when they are dead, index)
    waiting = 0  # the same as a bitset
    made = sum(not life.first for life in lives)
    free = budget - sum(units[:made])
    for call, sources in enumerate(before):
        start_ns = max((ends_ns[source] for source in sources), default=0.0)
        first = made
        need = 0
        while made < size and lives[made].first[0] == call:
            wanted = units[made]
            usable = waiting
            for position in lives[made].first:
                usable &= dead[position]
            # What this call has to wait for anyway hands its bytes down without being waited for.
            for index in members(usable):
                share = min(wanted, held[index])
                held[index] -= share
                wanted -= share
            need += wanted
            made += 1
        if made > first:
            while used_up and (free < need or used_up[0][0] <= now_ns):
                dead_ns, index = heapq.heappop(used_up)
                now_ns = max(now_ns, dead_ns)
                free += held[index]
                heirs[index] = first
                waiting ^= 1 << index
            if free < need:
                return None
            free -= need
            start_ns = max(start_ns, now_ns)
        ends_ns[call] = start_ns + ns[call]
        for index in ending[call]:
            heapq.heappush(used_up, (max(ends_ns[use] for use in lives[index].last), index))
            waiting |= 1 << index
    return heirs


def _without_heirs(conflicts: Sequence[int], heirs: Sequence[int]) -> list[int]:
    """Remove the conflicts between a storage and those from its heir on."""
    leaving: list[int] = [0] * (len(heirs) + 1)
    for index, heir in enumerate(heirs):
        leaving[heir] |= 1 << index
    gone = 0
    fewer = []
    for index, (row, heir) in enumerate(zip(conflicts, heirs, strict=True)):
        gone |= leaving[index]
        fewer.append(row & ~gone & ((1 << heir) - 1))
    return fewer
