"""Chains of calls, and folding many chains onto few streams without adding an order."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_core.algorithms.reachability import ancestors

__all__ = ["chains_of", "fold_chains"]


def chains_of(partner: Sequence[int]) -> list[list[int]]:
    """The chains that a matching strings together, sorted by their first call.

    Args:
        partner: the call that follows each call, -1 where the chain ends; always a higher index.

    >>> chains_of([1, 3, -1, 4, -1])
    [[0, 1, 3, 4], [2]]
    """
    follows = {v for v in partner if v >= 0}
    chains = []
    for head in range(len(partner)):
        if head not in follows:
            chain = [head]
            while (following := partner[chain[-1]]) >= 0:
                chain.append(following)
            chains.append(chain)
    return chains


def fold_chains(
    predecessors: Sequence[Sequence[int]],
    chains: Sequence[Sequence[int]],
    *,
    cap: int | None = None,
    start_ns: Sequence[float] = (),
    end_ns: Sequence[float] = (),
) -> list[int]:
    """Stream of each call, so that a chain follows another on one stream only where the graph orders them anyway.

    Chain B may follow chain A exactly if the last call of A reaches the first of B; of several, the one that ended
    latest is taken. Where none does, B opens a new stream, or, above ``cap``, joins the stream that is free soonest
    (this adds order).

    Args:
        predecessors: direct predecessors of each call (any edges with the right reachability).
        chains: calls of each chain, ascending, covering every call once; sorted by their first call.
        cap: most streams to use, None for no cap.
        start_ns: earliest start of each call were streams unlimited; needed with ``cap``.
        end_ns: earliest end, likewise.

    Returns:
        Stream of each call, 0-based, no gaps.

    Complexity:
        One pass of :func:`~nimble_core.algorithms.reachability.ancestors` over the chains' last calls.

    >>> fold_chains([[], [0], [0], [1, 2], [3]], [[0, 1, 3], [2], [4]])
    [0, 0, 1, 0, 0]
    """
    chain_at = {chain[0]: chain for chain in chains}
    marked = sorted(chain[-1] for chain in chains)
    rank = {call: bit for bit, call in enumerate(marked)}
    owner = [0] * len(marked)
    tails = 0
    tail_bit: list[int] = []
    busy_until: list[float] = []
    stream = [0] * len(predecessors)
    for head, known in enumerate(ancestors(predecessors, marked)):
        chain = chain_at.get(head)
        if chain is None:
            continue
        last = rank[chain[-1]]
        reachable = known & tails
        if reachable:
            chosen = owner[reachable.bit_length() - 1]
        elif cap is None or len(tail_bit) < cap:
            chosen = len(tail_bit)
            tail_bit.append(-1)
            busy_until.append(0.0)
        else:
            chosen = min(range(cap), key=busy_until.__getitem__)
        if cap is not None:
            begin = max(busy_until[chosen], start_ns[head])
            busy_until[chosen] = begin + end_ns[chain[-1]] - start_ns[head]
        if last > tail_bit[chosen]:
            if tail_bit[chosen] >= 0:
                tails ^= 1 << tail_bit[chosen]
            tails |= 1 << last
            tail_bit[chosen] = last
            owner[last] = chosen
        for call in chain:
            stream[call] = chosen
    return stream
