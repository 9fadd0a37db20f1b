"""Align two sequences: which items of one are which of the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["align"]

_NOWHERE = -(1 << 60)


def align(left: Sequence[Hashable], right: Sequence[Hashable], max_edits: int = 256) -> list[tuple[int, int]]:
    """Return index pairs of equal items, increasing in both: a longest common subsequence while few items differ.

    Complexity: O((n + m) D) for D differing items up to ``max_edits``; after that many the path that reaches furthest
    is kept and the search starts again there, so the whole stays within O((n + m) ``max_edits``).
    Source: E. W. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1 (1986), section 4.

    >>> align(["mm", "relu", "mm", "add"], ["mm", "copy_", "relu", "add"])
    [(0, 0), (1, 2), (3, 3)]
    """
    shared = set(left) & set(right)
    at_left = [i for i, item in enumerate(left) if item in shared]
    at_right = [j for j, item in enumerate(right) if item in shared]
    pairs: list[tuple[int, int]] = []
    x = y = 0
    common_left, common_right = [left[i] for i in at_left], [right[j] for j in at_right]
    while x < len(at_left) and y < len(at_right):
        found, x, y = _edit_path(common_left, common_right, x, y, max_edits)
        pairs += [(at_left[i], at_right[j]) for i, j in found]
    return pairs


def _edit_path(
    left: list[Hashable], right: list[Hashable], x0: int, y0: int, max_edits: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Return matched pairs from ``(x0, y0)`` to where ``max_edits`` edits lead, and that place."""
    n, m = len(left), len(right)
    reach = {1: x0}
    history: list[dict[int, int]] = []
    for edits in range(max_edits + 1):
        history.append(reach)
        row: dict[int, int] = {}
        for k in range(-edits, edits + 1, 2):
            down, before = _step(reach, edits, k)
            x = before if down else before + 1
            y = x - x0 - k + y0
            if x < x0 or x > n or y > m:
                continue
            while x < n and y < m and left[x] == right[y]:
                x, y = x + 1, y + 1
            row[k] = x
            if x == n and y == m:
                return _backtrack(history, edits, k, x, x0, y0), x, y
        reach = row
    furthest = max(reach, key=lambda k: (2 * reach[k] - k, -abs(k)))
    x = reach[furthest]
    return _backtrack(history, max_edits, furthest, x, x0, y0), x, x - x0 - furthest + y0


def _step(reach: dict[int, int], edits: int, k: int) -> tuple[bool, int]:
    """Say whether diagonal ``k`` is best entered by skipping an item on the right, and from which ``x``."""
    above, below = reach.get(k + 1, _NOWHERE), reach.get(k - 1, _NOWHERE)
    down = k == -edits or (k != edits and below < above)
    return down, above if down else below


def _backtrack(history: list[dict[int, int]], edits: int, k: int, x: int, x0: int, y0: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    while True:
        reach = history[edits]
        down, before = _step(reach, edits, k)
        start = before if down else before + 1
        while x > start:
            x -= 1
            pairs.append((x, x - x0 - k + y0))
        if edits == 0:
            return pairs[::-1]
        edits, k, x = edits - 1, k + 1 if down else k - 1, before
