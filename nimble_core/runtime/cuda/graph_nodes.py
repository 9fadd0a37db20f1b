"""Reads and edits nodes and edges of CUDA graphs through the driver (``cuda-bindings``)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from nimble_core.scheduling.verify_capture import RawGraph, begun_by, leading_fills
from nimble_core.utils.errors import DeviceError

__all__ = [
    "CaptureProbe",
    "add_roots",
    "cuda_driver",
    "driver_library",
    "linked",
    "links_change",
    "read_graph",
    "zeroed_at_once",
]

_PROGRAMMATIC = (1, 0, 1)
"""An edge's port of its tail, port of its head, and type, where the head is launched ahead."""
_WORTH = 2
"""Fewest nodes that one node at the beginning replaces."""


def cuda_driver() -> Any:
    """Return cuda-bindings' driver. Raises DeviceError where that is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            "cuda-bindings is not installed: captured graphs cannot be read",
            fix='pip install "nimble-viz[cuda13]" (or [cuda12], as your torch was built: torch.version.cuda)',
        ) from error
    return driver


def _checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    code, *values = result
    if int(code) != 0:
        raise DeviceError(f"{what} failed: {code.name if hasattr(code, 'name') else code}")
    return tuple(values)


class CaptureProbe:
    """Looks into the capture under way on one stream.

    Args:
        stream: raw handle of a stream that is capturing.
    """

    def __init__(self, stream: int) -> None:
        self._driver = cuda_driver()
        _, _, graph, *_ = _checked(self._driver.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")
        self._graph = int(graph)
        self._count = ctypes.c_size_t()
        self._at = ctypes.byref(self._count)
        self._ask = _nodes_of()

    def nodes(self) -> int:
        """Count the nodes captured so far: by ctypes, a µs where the bindings take seven."""
        code = self._ask(self._graph, None, self._at)
        if code != 0:
            raise DeviceError(f"cuGraphGetNodes failed: error {code}")
        return self._count.value

    def zeroed(self, nodes: Collection[int]) -> dict[int, range]:
        """Return the addresses that each of these nodes zeroes, if it does only that. Raises DeviceError."""
        if not nodes:
            return {}
        driver = self._driver
        asked = driver.cuGraphGetNodes(driver.CUgraph(init_value=self._graph), self.nodes())
        found, _ = _checked(asked, "cuGraphGetNodes")
        there = [node for node in nodes if node < len(found)]
        fills = {node: _zeroed(driver, found[node]) for node in there if _kind_of(driver, found[node]) == "memset"}
        return {node: reach for node, reach in fills.items() if reach}


@cache
def driver_library() -> ctypes.CDLL:
    """Return the driver's library, for what is called so often that the bindings' microseconds count."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _nodes_of() -> Any:
    function = driver_library().cuGraphGetNodes
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


def read_graph(handle: int) -> RawGraph:
    """Read the graph behind ``CUDAGraph.raw_cuda_graph()``. Raises DeviceError."""
    driver = cuda_driver()
    graph = driver.CUgraph(init_value=handle)
    _, count = _checked(driver.cuGraphGetNodes(graph, 0), "cuGraphGetNodes")
    if not count:
        return RawGraph((), (), ())
    found, _ = _checked(driver.cuGraphGetNodes(graph, count), "cuGraphGetNodes")
    nodes = tuple(int(node) for node in found)
    kinds = tuple(_kind_of(driver, node) for node in found)
    get_edges = _of_edges(driver, "cuGraphGetEdges")
    *_, edge_count = _checked(get_edges(graph, 0), "cuGraphGetEdges")
    if not edge_count:
        return RawGraph(nodes, kinds, ())
    tails, heads, *said = _checked(get_edges(graph, edge_count), "cuGraphGetEdges")
    place = {node: position for position, node in enumerate(nodes)}
    edges = [(place[int(tail)], place[int(head)]) for tail, head in zip(tails, heads, strict=True)]
    kinds_of_edges = said[0] if _edges_have_kinds(driver) else ()
    ahead = sorted(
        edge
        for edge, data in zip(edges, kinds_of_edges, strict=bool(kinds_of_edges))
        if (int(data.from_port), int(data.to_port), int(data.type)) == _PROGRAMMATIC
    )
    return RawGraph(nodes, kinds, tuple(sorted(edges)), ahead=tuple(ahead))


def links_change(raw: RawGraph) -> bool:
    """Return whether kinds of edges can be changed: not beside nodes that allocate, nor before CUDA 12.3."""
    return not {"mem_alloc", "mem_free"} & set(raw.kinds) and _edges_have_kinds(cuda_driver())


def linked(handle: int, raw: RawGraph, ahead: Sequence[tuple[int, int]]) -> RawGraph:
    """Launch just these edges' heads before their tails have ended, in the graph's next instances.

    Args:
        handle: of the graph that ``raw`` was read from, which is changed.
        raw: as it is; ``links_change``.
        ahead: edges of ``raw`` between kernels.

    Raises:
        DeviceError: the driver refused.
    """
    for edges, programmatic in ((set(raw.ahead) - set(ahead), False), (set(ahead) - set(raw.ahead), True)):
        _link(handle, raw, sorted(edges), programmatic=programmatic)
    return replace(raw, ahead=tuple(sorted(ahead)))


def zeroed_at_once(handle: int, raw: RawGraph, untouched: Sequence[Mapping[int, Sequence[range]]]) -> RawGraph:
    """Zero workspaces by one node at the graph's beginning instead of one for each call, where safe.

    A library may have a counter in its workspace that must be zero when its kernel begins: the kernel waits for a node
    that zeroes it. What nothing touches before can be zeroed at the beginning.

    Args:
        handle: of the graph that ``raw`` was read from, which is changed.
        raw: as it is, with the call of each node; ``links_change``.
        untouched: addresses that nothing touches between the beginning and a call, by call; of what lies together, and
            has nothing in between that is of use at the beginning. One node for each such piece.

    Returns:
        ``raw`` where there is too little of that, or the driver refuses.
    """
    driver = cuda_driver()
    pieces: list[dict[int, range]] = [{} for _ in untouched]
    for node in leading_fills(raw):
        call = raw.owner[node]
        for piece, of_calls in zip(pieces, untouched, strict=True):
            if call is not None and call in of_calls:
                reach = _zeroed(driver, _node(driver, raw.nodes[node]))
                if reach and any(reach[0] in one and reach[-1] in one for one in of_calls[call]):
                    piece[node] = reach
    pieces = [piece for piece in pieces if len(piece) >= _WORTH]
    graph = driver.CUgraph(init_value=handle)
    firsts: list[Any] = []
    for piece in pieces:
        code, first = _add_fill(driver, graph, list(piece.values()))
        if int(code) != 0:
            return _without(driver, raw, firsts)
        firsts.append(first)
    if not firsts:
        return raw
    handles, filled = [int(first) for first in firsts], [node for piece in pieces for node in piece]
    made = begun_by(raw, handles, filled)
    there = {(raw.nodes[tail], raw.nodes[head]) for tail, head in raw.edges}
    wanted = ((made.nodes[tail], made.nodes[head]) for tail, head in made.edges)
    code = _change_edges(driver, "cuGraphAddDependencies", graph, [edge for edge in wanted if edge not in there])
    if int(code) != 0:
        return _without(driver, raw, firsts)
    # Only now, with all others in order: a fill that cannot go sets to zero what is zero already.
    gone = [node for node in filled if int(driver.cuGraphDestroyNode(_node(driver, raw.nodes[node]))[0]) == 0]
    return begun_by(raw, handles, gone)


def add_roots(handle: int, raw: RawGraph, adding: Sequence[Callable[[Any], tuple[Any, Any]]]) -> list[int]:
    """Add nodes that all others wait for, and return their handles; none, and the graph as it was, if that fails.

    Args:
        handle: of the graph that ``raw`` was read from, which is changed.
        raw: as it is; ``links_change``.
        adding: each adds a node without edges to the graph that it is given, and returns ``(code, node)``.
    """
    driver = cuda_driver()
    graph = driver.CUgraph(init_value=handle)
    waiting = sorted({*range(len(raw.nodes))} - {head for _, head in raw.edges})
    made: list[Any] = []
    for add in adding:
        code, node = add(graph)
        if int(code) == 0:
            made.append(node)
    edges = [(int(node), raw.nodes[one]) for node in made for one in waiting]
    code = _change_edges(driver, "cuGraphAddDependencies", graph, edges)
    if int(code) != 0 or len(made) < len(adding):
        _without(driver, raw, made)
        return []
    return list(map(int, made))


def _add_fill(driver: Any, graph: Any, reaches: Sequence[range]) -> tuple[Any, Any]:
    """Add a node that waits for nothing and zeroes all of ``reaches``; return ``(code, node)``."""
    once = driver.CUDA_MEMSET_NODE_PARAMS()
    once.dst = driver.CUdeviceptr(min(reach.start for reach in reaches))
    once.elementSize, once.height, once.value, once.pitch = 1, 1, 0, 0
    once.width = max(reach.stop for reach in reaches) - int(once.dst)
    (context,) = _checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    code, node = driver.cuGraphAddMemsetNode(graph, None, 0, once, context)
    return code, node


def _without(driver: Any, raw: RawGraph, added: Sequence[Any]) -> RawGraph:
    """Remove these nodes; return the graph as it was."""
    for node in added:
        _checked(driver.cuGraphDestroyNode(node), "cuGraphDestroyNode")
    return raw


def _zeroed(driver: Any, node: Any) -> range:
    """Return the addresses that a memset node zeroes; none if it sets another value, or rows."""
    (found,) = _checked(driver.cuGraphMemsetNodeGetParams(node), "cuGraphMemsetNodeGetParams")
    start = int(found.dst)
    plain = int(found.value) == 0 and int(found.height) <= 1
    return range(start, start + int(found.elementSize) * int(found.width) * plain)


def _node(driver: Any, handle: int) -> Any:
    return driver.CUgraphNode(init_value=handle)


def _link(handle: int, raw: RawGraph, edges: Sequence[tuple[int, int]], *, programmatic: bool) -> None:
    """Make usual edges programmatic, or the reverse; where the driver refuses, they stay as they were."""
    if not edges:
        return
    driver = cuda_driver()
    graph = driver.CUgraph(init_value=handle)
    nodes = [(raw.nodes[tail], raw.nodes[head]) for tail, head in edges]

    def change(step: str, ahead: bool) -> None:
        _checked((_change_edges(driver, step, graph, nodes, ahead=ahead),), step)

    change("cuGraphRemoveDependencies", not programmatic)
    try:
        change("cuGraphAddDependencies", programmatic)
    except DeviceError:
        change("cuGraphAddDependencies", not programmatic)
        raise


def _change_edges(driver: Any, step: str, graph: Any, edges: Sequence[tuple[int, int]], *, ahead: bool = False) -> Any:
    """Add or remove edges, usual ones or programmatic, between nodes given by their handles; return the code."""
    tails, heads = ([_node(driver, edge[end]) for edge in edges] for end in (0, 1))
    data = driver.CUgraphEdgeData()
    if ahead:
        port, _, kind = _PROGRAMMATIC
        data.from_port, data.type = port, driver.CUgraphDependencyType(kind)
    code, *_ = _of_edges(driver, step)(graph, tails, heads, [data] * len(edges), len(edges))
    return code


def _of_edges(driver: Any, name: str) -> Any:
    """Return the variant of a driver function that knows kinds of edges, if there is one."""
    variant = getattr(driver, f"{name}_v2", None) if _edges_have_kinds(driver) else None
    return variant or getattr(driver, name)


@cache
def _edges_have_kinds(driver: Any) -> bool:
    _, version = driver.cuDriverGetVersion()
    return hasattr(driver, "CUgraphEdgeData") and version >= 12030


def _kind_of(driver: Any, node: Any) -> str:
    (kind,) = _checked(driver.cuGraphNodeGetType(node), "cuGraphNodeGetType")
    name: str = kind.name
    return name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
