"""Transitive reduction: the fewest edges with the same reachability."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["transitive_reduction"]


def transitive_reduction(predecessors: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Compute the unique transitive reduction (of a DAG also its minimum equivalent graph) in one forward pass.

    The predecessors of a node are looked at from the latest to the earliest: an edge is redundant exactly if its
    source already is an ancestor of a predecessor that was kept.

    Args:
        predecessors: direct predecessors of each node, all of a lower index; duplicates are harmless.

    Returns:
        The kept edges ``(u, v)``, sorted.

    Complexity:
        O(edges * n / word size) time. A node's ancestor set is dropped after its last successor: memory is that of the
        sets alive at one time, at most n² / 2 bits.

    Source:
        Aho, Garey, Ullman, "The Transitive Reduction of a Directed Graph", 1972; bitset ancestors are folklore.

    >>> transitive_reduction([[], [0], [0], [1, 2, 0], [3, 1]])
    [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    """
    size = len(predecessors)
    users = [0] * size
    for sources in predecessors:
        for source in sources:
            users[source] += 1
    # Only a node with two ways out, one of them into a node with two ways in, can be the source of a redundant edge.
    doubtful = sorted({u for sources in predecessors if len(sources) > 1 for u in sources if users[u] > 1})
    rank = {u: bit for bit, u in enumerate(doubtful)}
    inclusive: list[int] = [0] * size
    kept: list[tuple[int, int]] = []
    for node, sources in enumerate(predecessors):
        known = 0
        if len(sources) == 1:
            source = sources[0]
            kept.append((source, node))
            known = inclusive[source]
            users[source] -= 1
            if not users[source]:
                inclusive[source] = 0
        elif sources:
            for source in sorted(sources, reverse=True):
                bit = rank.get(source)
                if bit is None or not known >> bit & 1:
                    kept.append((source, node))
                    bits = inclusive[source]
                    known = known | bits if known else bits
                users[source] -= 1
                if not users[source]:
                    inclusive[source] = 0
        if users[node]:
            bit = rank.get(node)
            inclusive[node] = known if bit is None else known | 1 << bit
    kept.sort()
    return kept
