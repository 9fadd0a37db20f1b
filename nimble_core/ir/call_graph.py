"""The CallGraph: calls and the hazards between them, read from the bytes that they touch.

Hazards are found storage by storage. The windows on one storage are few; each is a *cell* that remembers who wrote it
last and who read it since. Windows that provably share no byte (slices of one buffer) never meet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nimble_core.algorithms.reachability import predecessor_lists, successor_lists
from nimble_core.algorithms.transitive_reduction import transitive_reduction
from nimble_core.ir.program import Program, TensorRef
from nimble_core.utils.errors import InputError

__all__ = ["CallGraph", "build_graph", "disjoint", "graph_from_edges", "predecessors", "successors"]

_RAW, _WAR, _WAW = 1, 2, 4
_KINDS = tuple(
    "+".join(name for bit, name in ((_RAW, "RAW"), (_WAR, "WAR"), (_WAW, "WAW")) if mask & bit) for mask in range(8)
)


@dataclass(frozen=True, slots=True)
class CallGraph:
    """A DAG over call indices; every edge goes from a lower to a higher index (program order is topological).

    Args:
        size: number of calls.
        edges: hazard edges ``(u, v)``, sorted, no duplicates: v must wait for u.
        kinds: kinds of hazard of each edge, parallel to ``edges``: ``"RAW"``, ``"WAR"``, ``"WAW"``, joined by ``"+"``.
        meg: edges of the minimum equivalent graph: the fewest edges with the same reachability (for a DAG its unique
            transitive reduction; Aho, Garey, Ullman 1972), sorted.
    """

    size: int
    edges: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    meg: tuple[tuple[int, int], ...]

    def to_networkx(self, program: Program | None = None) -> Any:
        """Return a ``networkx.DiGraph`` over call indices.

        Args:
            program: adds ``label`` (short operator name) and ``module`` to the nodes.

        Returns:
            A DiGraph whose edges have ``kinds`` (``"RAW+WAW"``) and ``meg`` (whether the edge is in the minimum
            equivalent graph).
        """
        import networkx

        digraph = networkx.DiGraph()
        for call in range(self.size):
            attributes: dict[str, object] = {}
            if program is not None:
                attributes.update(label=program.calls[call].label, module=program.calls[call].module)
            digraph.add_node(call, **attributes)
        kept = set(self.meg)
        for edge, kinds in zip(self.edges, self.kinds, strict=True):
            digraph.add_edge(*edge, kinds=kinds, meg=edge in kept)
        return digraph


def predecessors(graph: CallGraph, *, meg: bool = False) -> list[list[int]]:
    """Direct predecessors of each call, ascending: by all hazards, or by the minimum equivalent graph only."""
    return predecessor_lists(graph.size, graph.meg if meg else graph.edges)


def successors(graph: CallGraph, *, meg: bool = False) -> list[list[int]]:
    """Direct successors of each call, ascending: by all hazards, or by the minimum equivalent graph only."""
    return successor_lists(graph.size, graph.meg if meg else graph.edges)


def graph_from_edges(size: int, edges: Iterable[tuple[int, int]]) -> CallGraph:
    """Make a CallGraph from bare edges, all of kind RAW: for tests, benchmarks and graphs made by hand.

    Args:
        size: number of calls.
        edges: pairs ``(u, v)`` with ``0 <= u < v < size``, in any order, duplicates allowed.

    Raises:
        InputError: an edge that points backwards or outside.

    >>> graph_from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (3, 4)]).meg
    ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
    """
    masks = dict.fromkeys(edges, _RAW)
    for u, v in masks:
        if not 0 <= u < v < size:
            raise InputError(f"edge ({u}, {v}) does not fit a graph of {size} calls", fix="edges go from low to high")
    return _graph(size, masks)


def build_graph(program: Program) -> CallGraph:
    """Find the hazards between the calls of a program.

    Two accesses of one storage conflict if at least one writes and their windows are not provably disjoint. A call
    waits for the *last* writers of what it reads or writes and for those who read since what it overwrites; older
    accesses are ordered through these. Storages that nobody writes cause no edges. Every access of a ``generator``
    storage counts as reading and writing all of it, so that calls that draw random numbers keep their order.

    Complexity:
        Linear in accesses and edges where each storage is seen through one window; for storages with several, times
        the number of windows that one of them overlaps.
    """
    generators = {index for index, storage in enumerate(program.storages) if storage.role == "generator"}
    written = generators | {access.ref.storage for call in program.calls for access in call.accesses if access.write}
    histories: dict[int, _History] = {storage: _History() for storage in sorted(written)}
    windows: dict[tuple[int, tuple[int, ...], tuple[int, ...], int], _Window] = {}
    for call in program.calls:
        for access in call.accesses:
            ref = access.ref
            history = histories.get(ref.storage)
            if history is None:
                continue
            if ref.storage in generators:
                history.touch(call.index, _WHOLE, write=False)
                history.touch(call.index, _WHOLE, write=True)
            else:
                layout = ref.offset, ref.sizes, ref.strides, ref.itemsize
                window = windows.get(layout) or windows.setdefault(layout, _window(ref))
                if window.end > window.start:
                    history.touch(call.index, window, write=access.write)
    masks: dict[tuple[int, int], int] = {}
    for history in histories.values():
        history.hazards(masks)
    return _graph(len(program.calls), masks)


def disjoint(first: TensorRef, second: TensorRef) -> bool:
    """Whether two windows provably share no byte. False means: not proved.

    Proved are windows on different storages, empty windows, byte spans apart, and interleaved windows that keep to
    different offsets of one period, such as columns of a row-major matrix or channel slices of a channels-last image.
    """
    if first.storage != second.storage:
        return True
    a, b = _window(first), _window(second)
    return a.start == a.end or b.start == b.end or not _overlap(a, b)


def _graph(size: int, masks: dict[tuple[int, int], int]) -> CallGraph:
    edges = tuple(sorted(masks))
    meg = transitive_reduction(predecessor_lists(size, edges))
    return CallGraph(size=size, edges=edges, kinds=tuple(_KINDS[masks[edge]] for edge in edges), meg=tuple(meg))


@dataclass(frozen=True, slots=True)
class _Window:
    """Bytes ``start … end`` of a storage; ``steps`` are ``(count, stride in bytes)`` from the widest, () if dense."""

    start: int
    end: int
    steps: tuple[tuple[int, int], ...] = ()


_WHOLE = _Window(0, 1)


def _window(ref: TensorRef) -> _Window:
    start, end = ref.span
    steps: list[tuple[int, int]] = []
    dense = ref.itemsize
    for stride, count in sorted(
        (abs(stride) * ref.itemsize, count)
        for count, stride in zip(ref.sizes, ref.strides, strict=True)
        if count > 1 and stride
    ):
        if not steps and stride <= dense:
            # Up to here the bytes lie side by side (or over one another).
            dense += (count - 1) * stride
        elif steps and stride == steps[-1][0] * steps[-1][1]:
            steps[-1] = (steps[-1][0] * count, steps[-1][1])
        else:
            steps.append((count, stride))
    return _Window(start, end, tuple(reversed(steps)))


def _overlap(a: _Window, b: _Window) -> bool:
    """Whether two windows of one storage may share a byte."""
    if a.end <= b.start or b.end <= a.start:
        return False
    for period in {stride for _, stride in a.steps + b.steps}:
        # Modulo the period, a window keeps to [start, start + reach): steps that are multiples of it do not show.
        shift = (b.start - a.start) % period
        if shift >= _reach(a, period) and shift + _reach(b, period) <= period:
            return False
    return True


def _reach(window: _Window, period: int) -> int:
    return window.end - window.start - sum((count - 1) * step for count, step in window.steps if step % period == 0)


def _covers(a: _Window, b: _Window) -> bool:
    """Whether every byte of ``b`` certainly is one of ``a``."""
    return a == b or (not a.steps and a.start <= b.start and b.end <= a.end)


@dataclass(slots=True)
class _History:
    """Accesses of one storage in program order, and the windows that they go through."""

    cells: dict[_Window, int] = field(default_factory=dict)
    accesses: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def touch(self, call: int, window: _Window, *, write: bool) -> None:
        """Note an access; calls come in program order."""
        cell = self.cells.setdefault(window, len(self.cells))
        cells = self.accesses.setdefault((call, write), [])
        if cell not in cells:
            cells.append(cell)

    def hazards(self, masks: dict[tuple[int, int], int]) -> None:
        """Add this storage's hazards to ``masks``."""
        others, inner = self._neighbours()
        # The last call that wrote all of a cell, through whatever window: what came before is ordered through it.
        covered = [-1] * len(self.cells)
        writer = [-1] * len(self.cells)
        readers: list[list[int]] = [[] for _ in self.cells]
        # A call reads before it writes, however its accesses are listed.
        for (call, write), cells in sorted(self.accesses.items()):
            for cell in cells:
                base = covered[cell]
                if not write:
                    if base >= 0:
                        _add(masks, base, call, _RAW)
                    for other in others[cell]:
                        if writer[other] > base:
                            _add(masks, writer[other], call, _RAW)
                    continue
                if base >= 0 and (not readers[cell] or readers[cell][0] == call):
                    _add(masks, base, call, _WAW)
                for reader in readers[cell]:
                    _add(masks, reader, call, _WAR)
                for other in others[cell]:
                    if writer[other] > base:
                        _add(masks, writer[other], call, _WAW)
                    since = readers[other]
                    for reader in since[bisect_right(since, base) :]:
                        _add(masks, reader, call, _WAR)
            for cell in cells:
                if not write:
                    readers[cell].append(call)
                    continue
                for other in inner[cell]:
                    covered[other] = call
                    writer[other] = -1
                    readers[other] = []
                writer[cell] = call

    def _neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each cell, the other cells that may share bytes with it, and the cells (itself too) that it covers."""
        if len(self.cells) == 1:  # most storages
            return [[]], [[0]]
        windows: Sequence[_Window] = list(self.cells)
        others: list[list[int]] = [[] for _ in windows]
        inner: list[list[int]] = [[cell] for cell in range(len(windows))]
        alive: list[int] = []
        for cell in sorted(range(len(windows)), key=lambda index: (windows[index].start, windows[index].end)):
            alive = [other for other in alive if windows[other].end > windows[cell].start]
            for other in alive:
                if _overlap(windows[cell], windows[other]):
                    others[cell].append(other)
                    others[other].append(cell)
                    for large, small in ((cell, other), (other, cell)):
                        if _covers(windows[large], windows[small]):
                            inner[large].append(small)
            alive.append(cell)
        return others, inner


def _add(masks: dict[tuple[int, int], int], u: int, v: int, kind: int) -> None:
    if u != v:
        masks[u, v] = masks.get((u, v), 0) | kind
