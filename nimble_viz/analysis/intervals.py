"""Intervals of time, ``(start, end)`` in nanoseconds; the end is not part of one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

__all__ = ["covered", "covers", "union"]

_Ns = TypeVar("_Ns", int, float)


def union(intervals: Iterable[tuple[_Ns, _Ns]]) -> list[tuple[_Ns, _Ns]]:
    """Merge intervals into disjoint, sorted ones that cover the same; empty ones vanish."""
    merged: list[tuple[_Ns, _Ns]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[tuple[_Ns, _Ns]]) -> _Ns | Literal[0]:
    """Return the length of ``union``."""
    return sum(end - start for start, end in union(intervals))


def covers(intervals: Sequence[tuple[int, int]], at: int) -> bool:
    """Say whether one of these disjoint, sorted intervals holds ``at``."""
    position = bisect_right(intervals, at, key=lambda interval: interval[0]) - 1
    return position >= 0 and at < intervals[position][1]
