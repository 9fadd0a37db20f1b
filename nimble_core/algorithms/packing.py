"""Offline packing: an offset for each block, so that blocks which conflict share no unit and the whole stays small."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

__all__ = ["first_fit", "pack"]

_MANY = 4000


def pack(sizes: Sequence[int], conflicts: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of all blocks: the smallest of a few first-fit packings.

    The order decides: blocks go by size, by size times conflicts, by size and conflicts in sum, and as numbered.
    A fifth try starts with those that reached highest in the best one. Many blocks are packed once only, by size: each
    packing takes seconds then.

    Args:
        sizes: units of each block, at least 0.
        conflicts: bitset of each block's conflicts, symmetric, by block.

    Returns:
        ``(offsets, total)``: the first unit of each block; units in all.

    Complexity:
        That of :func:`first_fit`, five times for up to 4,000 blocks.

    Source:
        Pisarchyk, Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys workshop 2020, §5: greedy by
        size, here for any conflicts instead of intervals.

    >>> pack([2, 3, 2], [0b010, 0b101, 0b010])
    ([3, 0, 3], 5)
    """
    degree = [row.bit_count() for row in conflicts]
    blocks = range(len(sizes))
    best, least = first_fit(sizes, conflicts, sorted(blocks, key=lambda block: (-sizes[block], -degree[block])))
    if len(sizes) > _MANY:
        return best, least
    area = sorted(blocks, key=lambda block: -sizes[block] * degree[block])
    crowded = sorted(blocks, key=lambda block: (-degree[block], -sizes[block]))
    for order in (area, crowded, blocks, None):
        if order is None:
            order = sorted(blocks, key=lambda block: -best[block] - sizes[block])
        offsets, total = first_fit(sizes, conflicts, order)
        if total < least:
            best, least = offsets, total
    return best, least


def first_fit(sizes: Sequence[int], conflicts: Sequence[int], order: Iterable[int]) -> tuple[list[int], int]:
    """Put each block in turn at the lowest offset where it meets no block that it conflicts with.

    Args:
        sizes: units of each block, at least 0.
        conflicts: bitset of each block's conflicts, symmetric, by block.
        order: blocks in the order they are placed.

    Returns:
        ``(offsets, total)``: the first unit of each block, -1 if not placed; units in all.

    Complexity:
        O(blocks * b) set operations on ``blocks`` bits, b the number of different boundaries of blocks.

    >>> first_fit([2, 3, 2], [0b010, 0b101, 0b010], [0, 1, 2])
    ([0, 2, 0], 5)
    """
    offsets = [-1] * len(sizes)
    # Units from bounds[i] to bounds[i + 1] all have the same tenants, a bitset.
    bounds = [0]
    tenants: list[int] = []
    for block in order:
        size = sizes[block]
        if not size:
            offsets[block] = 0
            continue
        rivals = conflicts[block]
        free = 0
        for index, here in enumerate(tenants):
            if here & rivals:
                free = index + 1
            elif bounds[index + 1] - bounds[free] >= size:
                break
        offsets[block] = start = bounds[free]
        end = start + size
        if end > bounds[-1]:
            bounds.append(end)
            tenants.append(0)
        at = bisect_right(bounds, end) - 1
        if bounds[at] < end:
            at += 1
            bounds.insert(at, end)
            tenants.insert(at, tenants[at - 1])
        mark = 1 << block
        for index in range(free, at):
            tenants[index] |= mark
    return offsets, bounds[-1]
