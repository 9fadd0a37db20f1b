"""What every policy refuses before it plans."""

from __future__ import annotations

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.utils.errors import InputError

__all__ = ["require_fit"]


def require_fit(graph: CallGraph, costs: Costs, max_streams: int | None) -> None:
    """Raise InputError for ``max_streams`` below 1, or costs of another number of calls than the graph has."""
    if max_streams is not None and max_streams < 1:
        raise InputError(f"max_streams={max_streams} leaves no stream to run on", fix="at least 1, or None")
    if len(costs.ns) != graph.size:
        raise InputError(f"costs of {len(costs.ns)} calls for a graph of {graph.size}", fix="costs of the same program")
