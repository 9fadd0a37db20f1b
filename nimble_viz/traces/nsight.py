"""What an SQLite export of Nsight Systems says about replays of CUDA graphs.

The file is opened read-only and read table by table, without joins, views or triggers: what is in it is data. Tables
and columns are those of the exporter's documentation ("SQLite Schema Reference" in NVIDIA's analysis guide); those that
a version does not write are done without.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_core.profiling.cupti import Activity
from nimble_core.profiling.nvtx import DOMAIN
from nimble_core.utils.errors import ReportFileError
from nimble_viz.report.file import in_file
from nimble_viz.traces.events import HostEvent

__all__ = ["Created", "Export", "Replay", "read_export"]

_SQLITE = b"SQLite format 3\0"
_LATEST = 1 << 62
_THREAD_BITS = 24
"""A thread's global id has its process's in the bits above these."""
_DOMAIN_CREATED = 75
_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch")

_KERNELS, _MEMCPYS, _MEMSETS, _GRAPHS, _NODES, _CALLS, _RANGES, _STRINGS, _GPUS = (
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUDA_GRAPH_NODE_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU",
)  # fmt: skip
_EXPORT_AGAIN = "nsys export --type sqlite profile.nsys-rep"
_PROFILE_AGAIN = "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node …, then " + _EXPORT_AGAIN


@dataclass(frozen=True, slots=True)
class Replay:
    """What one launch (its correlation id) of a graph did on the GPU; ``launched_ns`` is -1 if unknown.

    ``nodes`` are graph node ids, all 64 bits: in the upper half the graph, here an instance of the captured one, in the
    lower half the node's place in it (``node_of``). ``activities`` are sorted by start.
    """

    process: int
    launch: int
    thread: int
    launched_ns: int
    nodes: tuple[int, ...]
    activities: tuple[Activity, ...]

    @property
    def graph(self) -> tuple[int, int]:
        """Process, and the graph that was launched."""
        return self.process, min(self.nodes) >> 32


@dataclass(frozen=True, slots=True)
class Created:
    """A node that was added to a graph, by hand or by a capture: not one that an instance copied."""

    thread: int
    start_ns: int
    node: int


@dataclass(frozen=True, slots=True)
class Export:
    """What the file holds about replayed graphs; ``replays`` are sorted by start.

    Args:
        created: nodes as they were captured; empty where the profile began later.
        copied: the node that a node was copied from, by process and node: instances copy the nodes that were captured.
        ranges: NVTX ranges of this project's domain; of all domains where the file does not name them.
        gpu: name of the GPU; empty if unknown, or if there are several kinds.
    """

    replays: tuple[Replay, ...]
    created: tuple[Created, ...] = ()
    copied: Mapping[tuple[int, int], int] = field(default_factory=dict)
    ranges: tuple[HostEvent, ...] = ()
    gpu: str = ""


def node_of(node: int) -> int:
    """Return a node's place in its graph, the lower half of its id; a copied node has that of its source.

    >>> node_of((7 << 32) + 41)
    41
    """
    return node & 0xFFFFFFFF


def process_of(thread: int) -> int:
    """Return the global id of a thread's process."""
    return thread >> _THREAD_BITS << _THREAD_BITS


def read_export(path: str | os.PathLike[str]) -> Export:
    """Read an export: ``nsys export --type sqlite`` of a profile taken with ``--cuda-graph-trace=node``.

    Raises:
        ReportFileError: no database, damaged, no export of Nsight Systems, or taken without graph nodes;
            says which, and what to do.
        OSError: the file cannot be read.
    """
    place = Path(path)
    with place.open("rb") as file:
        head = file.read(len(_SQLITE))
    with in_file(path, fix=_EXPORT_AGAIN):
        if head != _SQLITE:
            raise ReportFileError("not an SQLite database")
        try:
            # Immutable: a file beside it (a journal) is not read, and none is made.
            with closing(sqlite3.connect(f"{place.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                return _Reader(connection).export()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: of a name in a message about it
            raise ReportFileError(f"the file is damaged: {error}") from error


class _Reader:
    """Reads tables, and only tables, of an untrusted file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.text_factory = lambda text: text.decode(errors="replace")
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")
        stored = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
        self._tables = {str(name) for (name,) in stored}
        self._texts: dict[int, str] = {}

    def export(self) -> Export:
        if _STRINGS not in self._tables or self._tables.isdisjoint((_KERNELS, _RANGES, _CALLS, _GRAPHS)):
            raise ReportFileError("not an export of Nsight Systems: its tables are not there")
        found: dict[tuple[int, int], list[tuple[int, Activity]]] = {}
        for process, launch, node, activity in self._activities():
            if node:
                found.setdefault((process, launch), []).append((node, activity))
        if not found:
            whole = _GRAPHS in self._tables
            what = "graphs were traced as a whole" if whole else "no CUDA graph was launched"
            raise ReportFileError(f"{what}: there is no kernel of a graph node in it", fix=_PROFILE_AGAIN)
        launched = self._launches()
        replays = []
        for (process, launch), ran in found.items():
            ran.sort(key=lambda one: (one[1].start_ns, one[1].end_ns, one[0]))
            nodes, activities = zip(*ran, strict=True)
            thread, at = launched.get((process, launch), (0, -1))
            replays.append(Replay(process, launch, thread, at, nodes, activities))
        replays.sort(key=lambda one: (one.activities[0].start_ns, one.process, one.launch))
        created, copied = self._nodes()
        gpus = {name for (name,) in self._rows(_GPUS, ("name",)) if isinstance(name, str)}
        return Export(tuple(replays), created, copied, self._ranges(), gpus.pop() if len(gpus) == 1 else "")

    def _activities(self) -> Iterator[tuple[int, int, int, Activity]]:
        """Yield ``(process, launch, node, activity)``; node 0 outside graphs."""
        common = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId")
        grid, block = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
        more = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory")
        names = ("demangledName", "shortName")
        for row in self._rows(_KERNELS, ("start", "end"), (*common[2:], *grid, *block, *more, *names)):
            ids, rest = self._ids(_KERNELS, row), [_count(value) for value in row[6:15]]
            name = self._text(row[15]) or self._text(row[16]) or "kernel"
            shape = (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5])
            node, start, end, stream = ids[2:]
            kernel = Activity("kernel", name, start, end, stream, node_of(node), *shape, rest[6], rest[7] + rest[8])
            yield *ids[:3], kernel
        for table, kind in ((_MEMCPYS, "memcpy"), (_MEMSETS, "memset")):
            for row in self._rows(table, ("start", "end"), common[2:]):
                process, launch, node, start, end, stream = self._ids(table, row)
                yield process, launch, node, Activity(kind, kind, start, end, stream, node_of(node))

    def _ids(self, table: str, row: Sequence[Any]) -> tuple[int, int, int, int, int, int]:
        start, end, stream, launch, process, node = row[:6]
        if not (_is_time(start) and _is_time(end) and start <= end):
            raise ReportFileError(f"the file is damaged: from {start!r} to {end!r}", where=table)
        return _global_id(process), _count(launch), _count(node), start, end, _count(stream)

    def _launches(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return thread and time of each launch of a graph, by process and correlation id."""
        found = {}
        for start, thread, launch, name in self._rows(_CALLS, ("start", "globalTid", "correlationId", "nameId")):
            if _is_time(start) and self._text(name).startswith(_LAUNCH):
                thread = _global_id(thread)
                found[process_of(thread), _count(launch)] = (thread, start)
        return found

    def _nodes(self) -> tuple[tuple[Created, ...], dict[tuple[int, int], int]]:
        created, copied = [], {}
        columns = ("start", "graphNodeId"), ("globalTid", "originalGraphNodeId")
        for start, node, thread, source in self._rows(_NODES, *columns):
            thread = _global_id(thread)
            if _is_time(start) and _count(node):
                if _count(source):
                    copied[process_of(thread), node] = source
                else:
                    created.append(Created(thread, start, node))
        return tuple(sorted(created, key=lambda one: (one.thread, one.start_ns, one.node))), copied

    def _ranges(self) -> tuple[HostEvent, ...]:
        columns = ("eventType", "text", "textId", "globalTid", "domainId")
        domains: set[tuple[int, int]] = set()
        found: list[tuple[int, HostEvent]] = []
        for start, end, kind, text, text_id, thread, domain in self._rows(_RANGES, ("start", "end"), columns):
            said = text if isinstance(text, str) and text else self._text(text_id)
            thread, domain = _global_id(thread), _count(domain)
            if kind == _DOMAIN_CREATED:
                if said == DOMAIN:
                    domains.add((process_of(thread), domain))
            elif said and _is_time(start) and _is_time(end) and start <= end:
                found.append((domain, HostEvent(said, start, end, thread)))
        if domains:
            found = [one for one in found if (process_of(one[1].thread), one[0]) in domains]
        return tuple(sorted((one for _, one in found), key=lambda one: (one.thread, one.start_ns, -one.end_ns)))

    def _text(self, key: object) -> str:
        if not self._texts:
            pairs = self._rows(_STRINGS, ("id", "value"))
            self._texts = {key: value for key, value in pairs if isinstance(key, int) and isinstance(value, str)}
        return self._texts.get(key, "") if isinstance(key, int) else ""

    def _rows(self, table: str, needed: Sequence[str], more: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield rows of ``table``, None for a column of ``more`` that this version does not write; none without it.

        Generated columns, which would run what the file says, are not among those that are asked for.
        """
        if table not in self._tables:
            return
        there = {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        lacking = [name for name in needed if name not in there]
        if lacking:
            raise ReportFileError(f"there is no column {lacking[0]}", where=table)
        columns = ", ".join(f'"{name}"' if name in there else "NULL" for name in (*needed, *more))
        yield from self._connection.execute(f'SELECT {columns} FROM "{table}"')


def _is_time(value: object) -> bool:
    return isinstance(value, int) and -_LATEST < value < _LATEST


def _count(value: object) -> int:
    """Return a number from 0 on; 0 for what is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _global_id(value: object) -> int:
    """Return the global id of a process or thread: all 64 bits count, the sign's too; 0 for what is none."""
    return value if isinstance(value, int) else 0
