"""How many calls are independent of one another: what no schedule can exceed in concurrency."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_core.algorithms.reachability import ancestors

__all__ = ["level_width", "widest_set", "width"]


def level_width(predecessors: Sequence[Sequence[int]]) -> int:
    """Return a lower bound of the width: the most calls on one level (equal longest distance from a source), O(edges).

    >>> level_width([[], [0], [0], [1, 2], [3]])
    2
    """
    level = [0] * len(predecessors)
    counts: dict[int, int] = {}
    for call, sources in enumerate(predecessors):
        level[call] = max((level[source] + 1 for source in sources), default=0)
        counts[level[call]] = counts.get(level[call], 0) + 1
    return max(counts.values(), default=0)


def width(predecessors: Sequence[Sequence[int]]) -> int:
    """Return the size of the largest set of calls of which none must wait for another: see :func:`widest_set`.

    >>> width([[], [0], [0], [1, 2], [3]])
    2
    """
    return len(widest_set(predecessors))


def widest_set(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Find a largest set of calls of which none must wait for another: a maximum antichain.

    The fewest chains of the order that cover all calls are a maximum matching of each call with one that comes before
    it. It starts as a greedy cover (each call follows the latest chain end that reaches it) and grows by phases of
    augmenting searches from the calls that follow none; the row of a call is the bitset of its ancestors, and a search
    steps to ``row & unseen``. From the last phase, which finds nothing, a smallest vertex cover is read off: the calls
    that its searches came to as followers, and never stepped to as ancestors, are the antichain.

    Args:
        predecessors: direct predecessors of each call, all of a lower index.

    Returns:
        The calls, ascending. Of several largest sets the earliest: each of its calls is or precedes one of any other.

    Complexity:
        n² / 2 bits of memory. A phase is O(n² / word size); phases are at most n, and few: up to 6 on the graphs of
        ``benchmarks/scheduling.py`` with 10,000 calls. Larger graphs are bounded by :func:`level_width`.

    Source:
        Dilworth, "A Decomposition Theorem for Partially Ordered Sets", 1950, by way of bipartite matching (Fulkerson
        1956) and König's theorem (1931).

    >>> widest_set([[], [0], [0], [1, 2], [3]])
    [1, 2]
    """
    size = len(predecessors)
    everything = (1 << size) - 1
    rows = list(ancestors(predecessors, range(size)))
    follower = [-1] * size
    ends = everything
    heads = []
    for call, row in enumerate(rows):
        before = row & ends
        if before:
            end = before.bit_length() - 1
            follower[end] = call
            ends ^= 1 << end
        else:
            heads.append(call)
    while True:
        left, ends, unseen = _augment(rows, follower, heads, ends, everything)
        if len(left) == len(heads):
            break
        heads = left
    reached = set(heads)
    seen = everything ^ unseen
    while seen:
        call = seen.bit_length() - 1
        seen ^= 1 << call
        reached.add(follower[call])
    return [call for call in sorted(reached) if unseen >> call & 1]


def _augment(
    rows: list[int], follower: list[int], heads: list[int], ends: int, everything: int
) -> tuple[list[int], int, int]:
    """One phase: disjoint augmenting paths from ``heads`` to ``ends``, flipped in ``follower``.

    Returns:
        The heads that remain, the ends that remain (bitset), and the calls that no search stepped to (bitset).
    """
    unseen = everything
    remaining = []
    for head in heads:
        path, taken = [head], []
        while path:
            near = rows[path[-1]] & unseen
            free = near & ends
            if free:
                end = free.bit_length() - 1
                ends ^= 1 << end
                unseen ^= 1 << end
                taken.append(end)
                for source, call in zip(taken, path, strict=True):
                    follower[source] = call
                break
            if near:
                step = near.bit_length() - 1
                unseen ^= 1 << step
                taken.append(step)
                path.append(follower[step])
            else:
                path.pop()
                if taken:
                    taken.pop()
        else:
            remaining.append(head)
    return remaining, ends, unseen
