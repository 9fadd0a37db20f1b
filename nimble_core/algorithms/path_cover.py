"""Chains of calls, and folding many chains onto few streams without adding an order."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_core.algorithms.reachability import ancestors

__all__ = ["chains_of", "fold_chains"]


def chains_of(partner: Sequence[int]) -> list[list[int]]:
    """Join matched calls into chains, sorted by their first call.

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
    """Assign a stream to each call: one chain follows another on a stream only where the graph orders them anyway.

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
    streams = _Streams(len(marked), cap)
    stream = [0] * len(predecessors)
    end_ns = [0.0] * len(predecessors)
    for call, known in enumerate(ancestors(predecessors, marked)):
        chain = chain_at.get(call)
        if chain is not None:
            chosen = streams.choose(known)
            streams.append(chosen, rank[chain[-1]])
            for member in chain:
                stream[member] = chosen
            if cap is not None:
                streams.owed_ns[chosen] += sum(ns[member] for member in chain)
        if cap is not None:
            lane = stream[call]
            begin = max((end_ns[source] for source in predecessors[call]), default=0.0)
            end_ns[call] = streams.free_ns[lane] = max(begin, streams.free_ns[lane]) + ns[call]
            streams.owed_ns[lane] -= ns[call]
    return stream


class _Streams:
    """The chains on each stream so far: the last call of each stream, and when each is done.

    Last calls are named by their bits among all chains' last calls.
    """

    def __init__(self, chains: int, cap: int | None) -> None:
        self.free_ns: list[float] = []
        self.owed_ns: list[float] = []
        self._cap = cap
        self._last: list[int] = []
        self._last_calls = 0  # bitset
        self._stream_of = [0] * chains

    def choose(self, known: int) -> int:
        """Choose the stream of a chain whose first call comes after the calls of the bitset ``known``."""
        reachable = known & self._last_calls
        if reachable:
            return self._stream_of[reachable.bit_length() - 1]
        if self._cap is None or len(self._last) < self._cap:
            self._last.append(-1)
            self.free_ns.append(0.0)
            self.owed_ns.append(0.0)
            return len(self._last) - 1
        return min(range(self._cap), key=lambda index: self.free_ns[index] + self.owed_ns[index])

    def append(self, chosen: int, last: int) -> None:
        """Put a chain that ends with the call ``last`` on a stream."""
        if last > self._last[chosen]:
            if self._last[chosen] >= 0:
                self._last_calls ^= 1 << self._last[chosen]
            self._last_calls |= 1 << last
            self._last[chosen] = last
            self._stream_of[last] = chosen
