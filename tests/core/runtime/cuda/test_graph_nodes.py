"""Edges of a graph changed through the driver: all of them or none. On a GPU: ``test_fusing_cuda``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.runtime.cuda import graph_nodes
from nimble_core.runtime.cuda.graph_nodes import linked, links_change, read_graph, zeroed_at_once
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.utils.errors import DeviceError

PROGRAMMATIC, USUAL = (1, 0, 1), (0, 0, 0)


class Code(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class Data:
    def __init__(self, kind: tuple[int, int, int] = USUAL) -> None:
        self.from_port, self.to_port, self.type = kind

    @property
    def kind(self) -> tuple[int, int, int]:
        return int(self.from_port), int(self.to_port), int(self.type)


class Kind:
    name = "CU_GRAPH_NODE_TYPE_KERNEL"


class Driver:
    """As much of the driver as edges need: it keeps them, and refuses what is not there or is there already."""

    CUgraphEdgeData = Data
    CUgraphDependencyType = int

    def __init__(self, nodes: int, edges: dict[tuple[int, int], tuple[int, int, int]], version: int = 13000) -> None:
        self.nodes, self.edges, self.version, self.refused = nodes, dict(edges), version, False

    @staticmethod
    def CUgraph(init_value: int) -> int:  # the driver's name
        return init_value

    @staticmethod
    def CUgraphNode(init_value: int) -> int:
        return init_value

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        return (0, list(range(count)), count) if count else (0, [], self.nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, type[Kind]]:
        return 0, Kind

    def cuGraphGetEdges(self, graph: int, count: int) -> tuple[Any, ...]:
        if not count:
            return 0, [], [], [], len(self.edges)
        tails, heads = zip(*self.edges, strict=True)
        return 0, list(tails), list(heads), [Data(kind) for kind in self.edges.values()], count

    def cuGraphRemoveDependencies(self, graph: int, tails: Any, heads: Any, data: Any, count: int) -> Any:
        for tail, head, one in zip(tails, heads, data, strict=True):
            assert self.edges.pop((tail, head)) == one.kind
        return (Code(0),)

    def cuGraphAddDependencies(self, graph: int, tails: Any, heads: Any, data: Any, count: int) -> Any:
        if self.refused and any(one.kind == PROGRAMMATIC for one in data):
            return (Code(1),)
        for tail, head, one in zip(tails, heads, data, strict=True):
            assert (tail, head) not in self.edges
            self.edges[tail, head] = one.kind
        return (Code(0),)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], tuple[int, int, int]], set[tuple[int, int]]]:
    """Nodes, edges with their kinds, and edges that are to be programmatic."""
    nodes = draw(st.integers(2, 7))
    pairs = [(tail, head) for head in range(nodes) for tail in range(head)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1))
    kinds = {pair: draw(st.sampled_from([PROGRAMMATIC, USUAL])) for pair in chosen}
    return nodes, kinds, draw(st.sets(st.sampled_from(chosen)))


@given(graphs(), st.booleans())
def test_edges_are_changed_all_of_them_or_not_at_all(graph: Any, refused: bool) -> None:
    nodes, kinds, ahead = graph
    driver = Driver(nodes, kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_nodes, "cuda_driver", lambda: driver)
        raw = read_graph(7)
        assert raw.edges == tuple(sorted(kinds))
        assert raw.ahead == tuple(sorted(pair for pair, kind in kinds.items() if kind == PROGRAMMATIC))
        assert links_change(raw)
        driver.refused = refused
        if refused and ahead - set(raw.ahead):
            with pytest.raises(DeviceError, match="cuGraphAddDependencies failed: CUDA_ERROR_INVALID_VALUE"):
                linked(7, raw, sorted(ahead))
            assert set(driver.edges) == set(kinds), "no edge is lost"
            assert {pair for pair, kind in driver.edges.items() if kind == PROGRAMMATIC} <= set(raw.ahead)
        else:
            assert linked(7, raw, sorted(ahead)) == read_graph(7)
            assert {pair for pair, kind in driver.edges.items() if kind == PROGRAMMATIC} == ahead


class Fill:
    """Parameters of a node that fills memory."""

    def __init__(self, dst: int = 0, width: int = 0, value: int = 0) -> None:
        self.dst, self.width, self.value = dst, width, value
        self.elementSize, self.height, self.pitch = 1, 1, 0


class FillingDriver(Driver):
    """Of which some nodes fill memory: ``fills`` by node."""

    CUDA_MEMSET_NODE_PARAMS = Fill
    CUdeviceptr = int

    def __init__(self, edges: set[tuple[int, int]], fills: dict[int, Fill], nodes: int) -> None:
        super().__init__(nodes, dict.fromkeys(edges, USUAL))
        self.fills = dict(fills)
        self.refuses = ""

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[int, Fill]:
        return 0, self.fills[node]

    def cuCtxGetCurrent(self) -> tuple[int, str]:
        return 0, "context"

    def cuGraphAddMemsetNode(self, graph: int, before: None, count: int, what: Fill, where: str) -> tuple[int, int]:
        assert (before, count, where) == (None, 0, "context")
        if self.refuses == ("a second node" if 99 in self.fills else "a node"):
            return Code(1), 0
        node = 98 if 99 in self.fills else 99
        self.fills[node] = what
        return 0, node

    def cuGraphAddDependencies(self, *args: Any) -> Any:
        return (Code(1),) if self.refuses == "edges" else super().cuGraphAddDependencies(*args)

    def cuGraphDestroyNode(self, node: int) -> tuple[int]:
        if self.refuses == "to let go" and node not in (98, 99):
            return (Code(1),)
        del self.fills[node]
        self.edges = {edge: kind for edge, kind in self.edges.items() if node not in edge}
        return (0,)


@given(
    st.lists(
        st.sampled_from(["cell", "cell", "elsewhere", "another's", "ones", "across", "kernel"]), min_size=1, max_size=7
    )
)
def test_what_calls_zero_in_their_cells_is_zero_from_the_beginning(calls: list[str]) -> None:
    """Calls one after the other: what they fill first, if anything, then a kernel."""
    kinds: list[str] = []
    owner: list[int] = []
    fills: dict[int, Fill] = {}
    for call, what in enumerate(calls):
        cell = 1024 + 512 * call
        given_ = {
            "cell": Fill(cell, 4),
            "elsewhere": Fill(64, 4),
            "another's": Fill(cell + 512, 4),
            "ones": Fill(cell, 4, 1),
            "across": Fill(cell - 4, 8),
        }
        if what in given_:
            fills[len(kinds)] = given_[what]
            kinds.append("memset")
            owner.append(call)
        kinds.append("kernel")
        owner.append(call)
    size = len(kinds)
    edges = {(node, node + 1) for node in range(size - 1)}
    driver = FillingDriver(edges, fills, size)
    raw = RawGraph(tuple(range(size)), tuple(kinds), tuple(sorted(edges)), tuple(owner))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_nodes, "cuda_driver", lambda: driver)
        cells = {call: [range(1024 + 512 * call, 1536 + 512 * call)] for call in range(len(calls))}
        made = zeroed_at_once(7, raw, [cells])
    cells = [call for call, what in enumerate(calls) if what == "cell"]
    if len(cells) < 2:
        assert made is raw
        assert set(driver.edges) == edges
        return
    once = driver.fills.pop(99)
    assert (once.dst, once.dst + once.width) == (1024 + 512 * cells[0], 1024 + 512 * cells[-1] + 4)
    assert len(driver.fills) == len(fills) - len(cells)
    assert made.nodes[0] == 99
    assert {(made.nodes[tail], made.nodes[head]) for tail, head in made.edges} == set(driver.edges)
    kernels = [node for node in raw.nodes if kinds[node] == "kernel"]
    assert [node for node in made.nodes if node in kernels] == kernels
    assert len(made.edges) == len(made.nodes) - 1, "still one after the other"


@pytest.mark.parametrize("refuses", ["", "a node", "a second node", "edges", "to let go"])
def test_pieces_of_memory_far_from_each_other_have_nodes_of_their_own(refuses: str) -> None:
    far = 1 << 30
    edges = {(node, node + 1) for node in range(7)}
    fills = {2 * call: Fill(1024 + 512 * (call // 2) + far * (call % 2), 4) for call in range(4)}
    driver = FillingDriver(edges, fills, 8)
    driver.refuses = refuses
    raw = RawGraph(tuple(range(8)), ("memset", "kernel") * 4, tuple(sorted(edges)), (0, 0, 1, 1, 2, 2, 3, 3))
    pieces = [
        {call: [range(fills[2 * call].dst, fills[2 * call].dst + 512)] for call in calls} for calls in ((0, 2), (1, 3))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_nodes, "cuda_driver", lambda: driver)
        made = zeroed_at_once(7, raw, pieces)
    assert edges <= set(driver.edges) or not refuses
    if refuses == "to let go":
        assert made.nodes == (99, 98, *range(8))
        return
    if refuses:
        assert made is raw
        assert driver.fills == fills
        assert set(driver.edges) == edges
        return
    assert made.nodes == (99, 98, 1, 3, 5, 7)
    assert [(driver.fills[node].dst, driver.fills[node].width) for node in (99, 98)] == [(1024, 516), (1024 + far, 516)]
    assert {(made.nodes[tail], made.nodes[head]) for tail, head in made.edges} == set(driver.edges)
    assert set(driver.edges) == {(99, 1), (98, 1), (1, 3), (3, 5), (5, 7)}


def test_where_edges_have_no_kinds_or_cannot_be_removed_they_stay() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_nodes, "cuda_driver", lambda: old)
        old = Driver(2, {(0, 1): USUAL}, version=12020)
        raw = read_graph(7)
        assert raw == RawGraph((0, 1), ("kernel", "kernel"), ((0, 1),))
        assert not links_change(raw)
        patch.setattr(graph_nodes, "cuda_driver", lambda: Driver(2, {}))
        assert links_change(raw)
        assert not links_change(RawGraph((0, 1), ("kernel", "mem_alloc"), ()))
