"""Reachability in a DAG, in one forward pass with bitsets that are dropped as soon as nobody needs them.

Nodes are ``0 … size - 1`` in topological order: every edge goes from a lower to a higher index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["ancestors", "inherited", "predecessor_lists", "successor_lists", "unconnected"]


def predecessor_lists(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """List the direct predecessors of each node, in the order of ``edges``."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for u, v in edges:
        lists[v].append(u)
    return lists


def successor_lists(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """List the direct successors of each node, in the order of ``edges``."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for u, v in edges:
        lists[u].append(v)
    return lists


def ancestors(predecessors: Sequence[Sequence[int]], marked: Iterable[int]) -> Iterator[int]:
    """Yield for each node in turn the bitset of the marked nodes that reach it.

    Bit ``i`` stands for the ``i``-th marked node.

    Args:
        predecessors: direct predecessors of each node, all of a lower index.
        marked: the nodes to be tracked, ascending.

    Yields:
        One ``int`` per node, in index order.

    Complexity:
        O(edges * marked / word size) time; at most size * marked / 2 bits of memory.

    >>> [bin(bits) for bits in ancestors([[], [0], [0], [1, 2], [3]], [0, 2])]
    ['0b0', '0b1', '0b1', '0b11', '0b11']
    """
    rank = {node: bit for bit, node in enumerate(marked)}
    return inherited(predecessors, lambda node: 1 << rank[node] if node in rank else 0)


def inherited(predecessors: Sequence[Sequence[int]], own: Callable[[int], int]) -> Iterator[int]:
    """Yield for each node in turn the union of its ancestors' bitsets.

    A node's set is dropped as soon as its last successor was served, and nodes that bring nothing share their
    predecessor's set, so layered graphs need memory for a few layers only.

    Args:
        predecessors: direct predecessors of each node, all of a lower index.
        own: what a node brings, 0 for nothing; asked once for each node that has successors.

    Yields:
        One ``int`` per node, in index order.

    Complexity:
        O(edges * bits / word size) time.

    >>> list(inherited([[], [0], [0], [1, 2]], lambda node: 1 << node))
    [0, 1, 1, 7]
    """
    users = [0] * len(predecessors)
    for sources in predecessors:
        for source in sources:
            users[source] += 1
    inclusive: list[int] = [0] * len(predecessors)
    for node, sources in enumerate(predecessors):
        known = 0
        for source in sources:
            bits = inclusive[source]
            known = known | bits if known else bits
            users[source] -= 1
            if not users[source]:
                inclusive[source] = 0
        if users[node]:
            brought = own(node)
            inclusive[node] = known | brought if brought else known
        yield known


def unconnected(predecessors: Sequence[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of ``pairs`` ``(u, v)`` that no path from u to v connects, in the order given.

    Args:
        predecessors: direct predecessors of each node, all of a lower index.
        pairs: nodes to be tested; a pair with ``u >= v`` is never connected.

    Complexity:
        Linear in edges and pairs; pairs that no edge connects cost one pass of :func:`ancestors` over their sources.

    >>> unconnected([[], [0], [0], [1, 2], [3]], [(0, 4), (1, 2), (2, 1), (1, 4)])
    [(1, 2), (2, 1)]
    """
    pairs = list(pairs)
    missing = set(pairs)
    for v, sources in enumerate(predecessors):
        for u in sources:
            missing.discard((u, v))
    # Between neighbours in a topological order there is no room for a detour: only an edge could connect them.
    open_pairs = [(u, v) for u, v in missing if v - u > 1]
    if open_pairs:
        sources = sorted({u for u, _ in open_pairs})
        rank = {u: bit for bit, u in enumerate(sources)}
        targets: dict[int, list[int]] = {}
        for u, v in open_pairs:
            targets.setdefault(v, []).append(u)
        for v, known in enumerate(ancestors(predecessors, sources)):
            for u in targets.get(v, ()):
                if known >> rank[u] & 1:
                    missing.discard((u, v))
    return [pair for pair in pairs if pair in missing]
