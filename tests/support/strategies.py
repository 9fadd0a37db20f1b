"""Hypothesis strategies shared by the tests: small DAGs and small Programs of random accesses."""

from __future__ import annotations

from hypothesis import strategies as st

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import Access, Call, Program, Role, Storage, TensorRef

STORAGE_ELEMENTS = 24
ITEMSIZE = 2


@st.composite
def dags(draw: st.DrawFn, max_calls: int = 14) -> CallGraph:
    """Any DAG of up to ``max_calls`` calls, from no edge at all to all of them."""
    size = draw(st.integers(0, max_calls))
    possible = [(u, v) for v in range(size) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(possible), max_size=3 * size)) if possible else []
    return graph_from_edges(size, edges)


def costs_for(graph: CallGraph) -> st.SearchStrategy[Costs]:
    """Whole nanoseconds, zeros included, so that sums are exact."""
    ns = st.lists(st.integers(0, 9).map(float), min_size=graph.size, max_size=graph.size)
    return ns.map(lambda values: Costs(ns=tuple(values), source="drawn"))


@st.composite
def windows(draw: st.DrawFn, storage: int = 0) -> TensorRef:
    """A window of up to three dimensions (empty and broadcast ones too) inside a storage of 24 elements."""
    sizes: list[int] = []
    strides: list[int] = []
    room = STORAGE_ELEMENTS - 1
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([0, 1, 2, 2, 3, 4]))
        stride = draw(st.integers(0, 12))
        if size > 1 and stride:
            size = min(size, room // stride + 1)
            room -= (size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    offset = draw(st.integers(0, room)) * ITEMSIZE
    return TensorRef(storage, offset, tuple(sizes), tuple(strides), "float16", ITEMSIZE)


@st.composite
def programs(draw: st.DrawFn, max_calls: int = 9, max_storages: int = 4) -> Program:
    """Calls that read and write random windows of a few storages; the last storage may be a generator."""
    roles: list[Role] = draw(
        st.lists(st.sampled_from(["intermediate", "intermediate", "input", "parameter"]), max_size=max_storages - 1)
    )
    storages = [Storage(STORAGE_ELEMENTS * ITEMSIZE, role) for role in ("intermediate", *roles)]
    if draw(st.booleans()):
        storages.append(Storage(0, "generator"))
    # Few different windows, so that calls meet on the same ones.
    pool = []
    for index, storage in enumerate(storages):
        if storage.role == "generator":
            pool.append(TensorRef(index, 0, (), (), "uint8", 1))
        else:
            pool += draw(st.lists(windows(index), min_size=1, max_size=4))
            pool.append(TensorRef(index, 0, (STORAGE_ELEMENTS,), (1,), "float16", ITEMSIZE))
    accesses = st.lists(st.builds(Access, st.sampled_from(pool), st.booleans()), max_size=3)
    calls = tuple(
        Call(index, "test.touch.default", (), tuple(draw(accesses))) for index in range(draw(st.integers(0, max_calls)))
    )
    outputs = tuple(ref for ref in draw(st.lists(st.sampled_from(pool), max_size=1)))
    return Program(calls=calls, storages=tuple(storages), inputs=(), outputs=outputs)
