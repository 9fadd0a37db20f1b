"""Offline packing: an offset for each block, so that blocks which conflict share no unit and the whole stays small."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

__all__ = ["first_fit", "pack"]

_MANY = 4000
_NOWHERE: Mapping[int, int] = MappingProxyType({})


def pack(sizes: Sequence[int], conflicts: Sequence[int], fixed: Mapping[int, int] = _NOWHERE) -> tuple[list[int], int]:
    """Offsets of all blocks: the smallest of a few first-fit packings.

    The order decides: blocks go by size, by size times conflicts, by size and conflicts in sum, and as numbered.
    A fifth try starts with those that reached highest in the best one. Many blocks are packed once only, by size: each
    packing takes seconds then.

    Args:
        sizes: units of each block, at least 0.
        conflicts: bitset of each block's conflicts, symmetric, by block.
        fixed: blocks that have their place: their first units.

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
    best, least = first_fit(sizes, conflicts, sorted(blocks, key=lambda block: (-sizes[block], -degree[block])), fixed)
    if len(sizes) > _MANY:
        return best, least
    area = sorted(blocks, key=lambda block: -sizes[block] * degree[block])
    crowded = sorted(blocks, key=lambda block: (-degree[block], -sizes[block]))
    for order in (area, crowded, blocks, None):
        if order is None:
            order = sorted(blocks, key=lambda block: -best[block] - sizes[block])
        offsets, total = first_fit(sizes, conflicts, order, fixed)
        if total < least:
            best, least = offsets, total
    return best, least


def first_fit(
    sizes: Sequence[int], conflicts: Sequence[int], order: Iterable[int], fixed: Mapping[int, int] = _NOWHERE
) -> tuple[list[int], int]:
    """Put each block in turn at the lowest offset where it meets no block that it conflicts with.

    Args:
        sizes: units of each block, at least 0.
        conflicts: bitset of each block's conflicts, symmetric, by block.
        order: blocks in the order they are placed.
        fixed: blocks that have their place: their first units. They may meet whom they conflict with.

    Returns:
        ``(offsets, total)``: the first unit of each block, -1 if not placed; units in all.

    Complexity:
        O(blocks * b) set operations on ``blocks`` bits, b the number of different boundaries of blocks.

    >>> first_fit([2, 3, 2], [0b010, 0b101, 0b010], [0, 1, 2])
    ([0, 2, 0], 5)
    >>> first_fit([2, 3, 2], [0b010, 0b101, 0b010], [0, 1, 2], {1: 1})
    ([4, 1, 4], 6)
    """
    offsets = [-1] * len(sizes)
    # Units from bounds[i] to bounds[i + 1] all have the same tenants, a bitset.
    bounds = [0]
    tenants: list[int] = []
    for block, start in fixed.items():
        offsets[block] = start
        _settle(bounds, tenants, block, start, start + sizes[block])
    for block in order:
        size = sizes[block]
        if block in fixed:
            continue
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
        _settle(bounds, tenants, block, start, start + size)
    return offsets, bounds[-1]


def _settle(bounds: list[int], tenants: list[int], block: int, start: int, end: int) -> None:
    """Mark ``block`` as a tenant of the units from ``start`` to ``end``."""
    mark = 1 << block
    first = _cut(bounds, tenants, start)
    for index in range(first, _cut(bounds, tenants, end)):
        tenants[index] |= mark


def _cut(bounds: list[int], tenants: list[int], at: int) -> int:
    """Make ``at`` a boundary; its index. What lies beyond the last one was free so far."""
    index = bisect_left(bounds, at)
    if index == len(bounds):
        bounds.append(at)
        tenants.append(0)
    elif bounds[index] != at:
        bounds.insert(index, at)
        tenants.insert(index, tenants[index - 1])
    return index
