"""CUDA graphs through the driver (``cuda-bindings``): nodes and edges, during a capture and after it; and parts."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

from nimble_core.emitted import RawGraph
from nimble_core.errors import DeviceError
from nimble_core.observation import Launch

__all__ = ["CaptureProbe", "GraphPart", "keep_nodes", "read_graph", "read_launches"]


def _driver() -> Any:
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
        self._driver = _driver()
        _, _, self._graph, *_ = _checked(self._driver.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")

    def nodes(self) -> int:
        """Nodes captured so far."""
        code, _, count = self._driver.cuGraphGetNodes(self._graph, 0)
        if int(code) != 0:
            raise DeviceError(f"cuGraphGetNodes failed: {code.name}")
        return int(count)

    def last(self, stream: int) -> tuple[int, ...]:
        """Nodes that the next node on ``stream`` would depend on (raw handles)."""
        _, _, _, dependencies, *_ = _checked(self._driver.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")
        return tuple(int(node) for node in dependencies or ())


def read_graph(handle: int) -> RawGraph:
    """Read the graph behind ``CUDAGraph.raw_cuda_graph()``. Raises DeviceError."""
    driver = _driver()
    graph = driver.CUgraph(init_value=handle)
    _, count = _checked(driver.cuGraphGetNodes(graph, 0), "cuGraphGetNodes")
    if not count:
        return RawGraph((), (), ())
    found, _ = _checked(driver.cuGraphGetNodes(graph, count), "cuGraphGetNodes")
    nodes = tuple(int(node) for node in found)
    kinds = tuple(_kind(_checked(driver.cuGraphNodeGetType(node), "cuGraphNodeGetType")[0].name) for node in found)
    *_, edge_count = _checked(driver.cuGraphGetEdges(graph, 0), "cuGraphGetEdges")
    edges: list[tuple[int, int]] = []
    if edge_count:
        tails, heads, *_ = _checked(driver.cuGraphGetEdges(graph, edge_count), "cuGraphGetEdges")
        place = {node: position for position, node in enumerate(nodes)}
        edges = sorted((place[int(a)], place[int(b)]) for a, b in zip(tails, heads, strict=True))
    return RawGraph(nodes, kinds, tuple(edges))


class GraphPart:
    """Some nodes of a captured graph, with the edges between them, as a graph of their own that can be launched.

    Args:
        handle: the whole graph, which stays as it is.
        raw: its nodes.
        kept: positions in ``raw`` of the nodes.

    Raises:
        DeviceError: the driver could not make it.
    """

    def __init__(self, handle: int, raw: RawGraph, kept: Collection[int]) -> None:
        self._driver = driver = _driver()
        (graph,) = _checked(driver.cuGraphClone(driver.CUgraph(init_value=handle)), "cuGraphClone")
        self._free = weakref.finalize(self, driver.cuGraphDestroy, graph)
        self._free.atexit = False
        copies = [
            _checked(
                driver.cuGraphNodeFindInClone(driver.CUgraphNode(init_value=node), graph), "cuGraphNodeFindInClone"
            )
            for node in raw.nodes
        ]
        for position, (copy,) in enumerate(copies):
            if position not in kept:
                _checked(driver.cuGraphDestroyNode(copy), "cuGraphDestroyNode")
        self.nodes: Mapping[int, int] = {position: int(copies[position][0]) for position in kept}
        """Raw handle of each node in this graph, by position."""
        (self._exec,) = _checked(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        self._free_exec = weakref.finalize(self, driver.cuGraphExecDestroy, self._exec)
        self._free_exec.atexit = False

    def launch(self, stream: int) -> None:
        """Launch on a stream, given by its raw handle. Raises DeviceError."""
        (code,) = self._driver.cuGraphLaunch(self._exec, stream)
        if code:
            _checked((code,), "cuGraphLaunch")

    def close(self) -> None:
        """Free it; nothing of it may be running."""
        self._free_exec()
        self._free()


def keep_nodes(raw: RawGraph, kept: Collection[int]) -> None:
    """Take all other nodes out of the captured graph, which is not instantiated yet. Raises DeviceError."""
    driver = _driver()
    for position, node in enumerate(raw.nodes):
        if position not in kept:
            _checked(driver.cuGraphDestroyNode(driver.CUgraphNode(init_value=node)), "cuGraphDestroyNode")


def read_launches(raw: RawGraph) -> tuple[Launch, ...]:
    """What each node launches; the name is empty where the driver does not say. Raises DeviceError.

    The graph must not have been destroyed.
    """
    driver = _driver()
    return tuple(
        _launch(driver, driver.CUgraphNode(init_value=node)) if kind == "kernel" else Launch()
        for node, kind in zip(raw.nodes, raw.kinds, strict=True)
    )


def _launch(driver: Any, node: Any) -> Launch:
    (found,) = _checked(driver.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
    name = ""
    for read, handle in (("cuFuncGetName", found.func), ("cuKernelGetName", getattr(found, "kern", None))):
        if not name and handle is not None and int(handle) and hasattr(driver, read):
            code, said = getattr(driver, read)(handle)
            name = bytes(said).decode(errors="replace") if int(code) == 0 and said else ""
    grid = (int(found.gridDimX), int(found.gridDimY), int(found.gridDimZ))
    return Launch(name, grid, (int(found.blockDimX), int(found.blockDimY), int(found.blockDimZ)))


def _kind(name: str) -> str:
    return name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
