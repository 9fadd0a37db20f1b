"""What is written down of a call: its arguments, allocations and random numbers."""

from __future__ import annotations

from nimble_core.ir.call_graph import build_graph
from tests.support.models import make
from tests.support.recordings import recorded


def test_random_calls_keep_their_order_through_the_generator() -> None:
    model, args, kwargs = make("dropout")
    program = recorded(model, *args, **kwargs).program
    drawn = [
        call.index
        for call in program.calls
        if any(program.storages[access.ref.storage].role == "generator" for access in call.accesses)
    ]
    assert len(drawn) == 2
    edges = set(build_graph(program).edges)
    assert tuple(drawn) in edges
