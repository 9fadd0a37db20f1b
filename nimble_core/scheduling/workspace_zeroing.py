"""Workspaces that begin with counters, staggered so that their counters can be zero from the beginning.

A library may count in the first bytes of its workspace, and set them to zero before its kernel: cuBLAS does, for many
of its products. That is a node of its own, and the kernel waits for it. Such workspaces are large, so calls share them,
and each call leaves anything there. Here a call's workspace begins below those of all calls that run before it in the
same memory: what a call writes lies above the counters of all that follow. Nothing else is there, so that one node at
the beginning of a replay sets all of them to zero (``graph_nodes.zeroed_at_once``), for some bytes more in each call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import happens_before

__all__ = ["COUNTERS_NBYTES", "Place", "staggered"]

COUNTERS_NBYTES = 4096
"""More than that at the beginning of a workspace are no counters."""

_WORTH, _WORTH_NBYTES = 8, 2 << 20
"""A fill takes some microseconds, and the memory is of no other use in a replay: a chain has so many at least, and
takes no more than so many bytes for each."""
_ROOM_NBYTES = 40 << 20
"""What all of it may take: cuBLAS's largest workspace, and some of cuBLASLt's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of a workspace among those of other calls.

    Args:
        offset: where it begins.
        untouched: bytes there that nothing touches between the beginning of a replay and the call.
    """

    offset: int
    untouched: int


def staggered(
    schedule: Schedule, workspaces: Mapping[int, tuple[int, int]], alignment: int
) -> tuple[dict[int, Place], ...]:
    """Place workspaces with counters: those of the longest chains of calls for which there is room.

    Args:
        schedule: which calls happen before which.
        workspaces: bytes of each, and up to which byte it counts, by call.
        alignment: of each workspace.

    Returns:
        Chains, each by call in the order in which they run.

    Complexity:
        O(chains * sizes * edges).

    >>> (chain,) = staggered(Schedule("single", (0,) * 8, tuple(range(8)), ()), dict.fromkeys(range(8), (4096, 8)), 512)
    >>> [place.offset for place in chain.values()]
    [3584, 3072, 2560, 2048, 1536, 1024, 512, 0]
    """
    if len(workspaces) < _WORTH:
        return ()
    before = happens_before(schedule)
    alike: dict[int, set[int]] = {}
    for call, (nbytes, _) in workspaces.items():
        alike.setdefault(nbytes.bit_length(), set()).add(call)
    chains: list[dict[int, Place]] = []
    end = 0
    while alike:
        longest = {size: _longest(schedule.order, before, calls) for size, calls in alike.items()}
        size = max(longest, key=lambda one: len(longest[one]))
        chain, top = _placed(longest[size], workspaces, end, alignment)
        if len(chain) < _WORTH or top - end > len(chain) * _WORTH_NBYTES or top > _ROOM_NBYTES:
            del alike[size]
            continue
        chains.append(chain)
        alike[size] -= chain.keys()
        end = top
    return tuple(chains)


def _placed(
    calls: Sequence[int], workspaces: Mapping[int, tuple[int, int]], start: int, alignment: int
) -> tuple[dict[int, Place], int]:
    """Place a chain from ``start`` on; return the places and the end."""
    offset = end = start
    places = []
    for call in reversed(calls):
        nbytes, counters = workspaces[call]
        untouched = -(-counters // alignment) * alignment
        places.append(Place(offset, untouched))
        end = max(end, offset + -(-nbytes // alignment) * alignment)
        offset += untouched
    return dict(zip(calls, reversed(places), strict=True)), end


def _longest(order: Sequence[int], before: Sequence[Sequence[int]], among: Collection[int]) -> list[int]:
    """Find the longest sequence of these calls that happen one after the other.

    >>> _longest([2, 0, 1], [[], [], [0, 1]], {0, 1, 2})
    [2, 1]
    """
    count: list[int] = []
    back: list[int] = []
    for position, call in enumerate(order):
        last = max(before[position], key=lambda earlier: count[earlier], default=-1)
        back.append(last)
        count.append((count[last] if last >= 0 else 0) + (call in among))
    chain: list[int] = []
    position = max(range(len(order)), key=lambda one: count[one], default=-1)
    while position >= 0:
        if order[position] in among:
            chain.append(order[position])
        position = back[position]
    return chain[::-1]
