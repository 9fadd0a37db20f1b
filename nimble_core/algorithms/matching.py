"""Maximum bipartite matching between calls and their successors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["maximum_matching"]


def maximum_matching(successors: Sequence[Sequence[int]], initial: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Find a maximum matching of the bipartite graph with an edge (u on the left, v on the right) per DAG edge u→v.

    Iterative Hopcroft–Karp after a greedy start, deterministic: lower indices are served first.

    Args:
        successors: right-hand neighbours of each left-hand node.
        initial: a matching to start from instead of the greedy one; edges of the graph, no node twice on one side.

    Returns:
        The partner of each left-hand node, -1 where there is none.

    Complexity:
        O(edges * sqrt(n)) time, O(n) memory.

    Source:
        Hopcroft, Karp, "An n^5/2 Algorithm for Maximum Matchings in Bipartite Graphs", 1973.

    >>> maximum_matching([[1, 2], [3], [3], [4], []])
    [1, 3, -1, 4, -1]
    """
    size = len(successors)
    partner = [-1] * size
    owner = [-1] * size
    for u, v in initial:
        partner[u], owner[v] = v, u
    _greedy(successors, partner, owner)
    while _augment(successors, partner, owner):
        pass
    return partner


def _greedy(successors: Sequence[Sequence[int]], partner: list[int], owner: list[int]) -> None:
    for u, targets in enumerate(successors):
        if partner[u] < 0:
            for v in targets:
                if owner[v] < 0:
                    partner[u], owner[v] = v, u
                    break


def _augment(successors: Sequence[Sequence[int]], partner: list[int], owner: list[int]) -> bool:
    """One phase: flip a maximal set of disjoint shortest augmenting paths; False if there is none."""
    depth = [-1] * len(successors)
    free = [u for u, targets in enumerate(successors) if targets and partner[u] < 0]
    for u in free:
        depth[u] = 0
    layer, level, found = free, 0, False
    while layer and not found:
        level += 1
        following: list[int] = []
        for u in layer:
            for v in successors[u]:
                w = owner[v]
                if w < 0:
                    found = True
                elif depth[w] < 0:
                    depth[w] = level
                    following.append(w)
        layer = following
    if not found:
        return False
    last = level - 1
    cursor = [0] * len(successors)
    flipped = False
    for root in free:
        path = [root]
        while path:
            u = path[-1]
            targets = successors[u]
            if cursor[u] == len(targets):
                path.pop()
                continue
            v = targets[cursor[u]]
            cursor[u] += 1
            w = owner[v]
            if w < 0:
                if depth[u] == last:
                    for x in path:
                        taken = successors[x][cursor[x] - 1]
                        partner[x], owner[taken] = taken, x
                    flipped = True
                    break
            elif depth[w] == depth[u] + 1:
                path.append(w)
    return flipped
