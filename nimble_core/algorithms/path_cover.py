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
    ns: Sequence[float] = (),
) -> list[int]:
    """Stream of each call, so that a chain follows another on one stream only where the graph orders them anyway.

    Chain B may follow chain A exactly if the last call of A reaches the first of B; of several, the one that ended
    latest is taken. Where none does, B opens a new stream, or, above ``cap``, joins the least loaded one (this adds
    order): the one that would be done soonest with the calls it has, were they to start as early as the graph and the
    streams allow.

    Args:
        predecessors: direct predecessors of each call (any edges with the right reachability).
        chains: calls of each chain, ascending, covering every call once; sorted by their first call.
        cap: most streams to use, None for no cap.
        ns: duration of each call, nanoseconds; needed with ``cap``.

    Returns:
        Stream of each call, 0-based, no gaps.

    Complexity:
        One pass of :func:`~nimble_core.algorithms.reachability.ancestors` over the chains' last calls, and O(cap) for
        each chain above the cap.

    >>> fold_chains([[], [0], [0], [1, 2], [3]], [[0, 1, 3], [2], [4]])
    [0, 0, 1, 0, 0]
    """
    chain_at = {chain[0]: chain for chain in chains}
    marked = sorted(chain[-1] for chain in chains)
    rank = {call: bit for bit, call in enumerate(marked)}
    owner = [0] * len(marked)
    tails = 0
    tail_bit: list[int] = []
    free_ns: list[float] = []
    owed_ns: list[float] = []
    stream = [0] * len(predecessors)
    end_ns = [0.0] * len(predecessors)
    for call, known in enumerate(ancestors(predecessors, marked)):
        chain = chain_at.get(call)
        if chain is not None:
            reachable = known & tails
            if reachable:
                chosen = owner[reachable.bit_length() - 1]
            elif cap is None or len(tail_bit) < cap:
                chosen = len(tail_bit)
                tail_bit.append(-1)
                free_ns.append(0.0)
                owed_ns.append(0.0)
            else:
                chosen = min(range(cap), key=lambda index: free_ns[index] + owed_ns[index])
            last = rank[chain[-1]]
            if last > tail_bit[chosen]:
                if tail_bit[chosen] >= 0:
                    tails ^= 1 << tail_bit[chosen]
                tails |= 1 << last
                tail_bit[chosen] = last
                owner[last] = chosen
            for member in chain:
                stream[member] = chosen
            if cap is not None:
                owed_ns[chosen] += sum(ns[member] for member in chain)
        if cap is not None:
            lane = stream[call]
            begin = max((end_ns[source] for source in predecessors[call]), default=0.0)
            end_ns[call] = free_ns[lane] = max(begin, free_ns[lane]) + ns[call]
            owed_ns[lane] -= ns[call]
    return stream
