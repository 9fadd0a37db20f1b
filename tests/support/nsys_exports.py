"""SQLite files laid out as ``nsys export --type sqlite`` documents them, of profiles that a test makes up."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from nimble_core.profiling.nvtx import DOMAIN, call_name, whole_name
from nimble_viz.render.report import Report

PID = 281_474_976_710_656 + (4321 << 24)
TID = PID + 4321

# The documented columns of every table that is read (Nsight Systems 2024 and 2025).
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL PRIMARY KEY, name TEXT, busLocation TEXT, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,
    cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL,
    staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
    localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER,
    sharedMemoryLimitConfig INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
    bytes INTEGER NOT NULL, memKind INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUDA_GRAPH_NODE_EVENTS (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    nameId INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER,
    int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
    jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """One kernel, copy or fill; ``node`` is the whole id, 0 outside graphs."""

    name: str
    start: int
    end: int
    stream: int
    launch: int
    node: int
    kind: str = "kernel"
    grid: int = 8
    process: int = PID


@dataclass(slots=True)
class Profile:
    """What a profile holds; every list may be cut, shuffled or added to before it is written."""

    ran: list[Ran] = field(default_factory=list)
    launches: dict[int, tuple[int, int]] = field(default_factory=dict)
    """``(thread, time)`` by correlation id."""
    nodes: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    """``(thread, time, node, original)``."""
    ranges: list[tuple[int, int, int, str]] = field(default_factory=list)
    """``(thread, start, end, text)``."""
    gpu: str = ""
    call_of: dict[int, int] = field(default_factory=dict)
    """What captured each node, by the whole id of the instance's: the truth."""


def profile_of(
    report: Report,
    run: str,
    replays: int = 3,
    *,
    graph: int = 7,
    names: Mapping[int, Sequence[str]] | None = None,
    marked: bool = True,
    begin: int = 1_000_000,
    launch: int = 100,
) -> Profile:
    """Capture, instantiate and replay the plan ``run``: nodes in issue order, each as soon as its waits allow.

    Args:
        report: whose calls.
        run: name of the plan.
        replays: how often it is launched.
        graph: id of the captured graph; its instance has the next.
        names: kernels of each call; None: one, ``"<operator>_kernel"``.
        marked: whether the profile has NVTX ranges and was on during the capture.
        begin: when.
        launch: correlation id of the first launch.
    """
    plan = report.schedule(run)
    assert plan is not None
    made, now, number = Profile(), begin, 0
    of_call: dict[int, list[int]] = {}
    for call in plan.order:
        start = now = now + 10
        for _ in _kernels(report, call, names):
            now += 5
            of_call.setdefault(call, []).append(number)
            made.call_of[((graph + 1) << 32) + number] = call
            made.nodes.append((TID, now, (graph << 32) + number, None))
            number += 1
        now += 5
        made.ranges.append((TID, start, now, call_name(report.program.calls[call])))
    made.ranges.insert(0, (TID, begin, now + 10, whole_name("capture", report.program, plan)))
    now += 100
    made.nodes += [(TID, now + at, ((graph + 1) << 32) + at, (graph << 32) + at) for at in range(number)]
    now += number + 100
    waits: dict[int, list[int]] = {}
    for producer, consumer in plan.syncs:
        waits.setdefault(consumer, []).append(producer)
    for replay in range(replays):
        correlation, ended, free = launch + replay, dict[int, int](), dict[int, int]()
        made.launches[correlation] = TID, now + 5
        latest = now + 50
        for call in plan.order:
            stream = plan.stream[call]
            at = max(
                [latest if not free else now + 50, free.get(stream, 0), *(ended[one] for one in waits.get(call, ()))]
            )
            for name, node in zip(_kernels(report, call, names), of_call.get(call, ()), strict=True):
                kind = name if name in ("memcpy", "memset") else "kernel"
                end = at + 20 + 3 * (call % 5) + replay
                made.ran.append(Ran(name, at + 1, end, 13 + stream, correlation, ((graph + 1) << 32) + node, kind))
                at = end
            ended[call] = free[stream] = at
        finish = max(free.values(), default=now)
        made.ranges.append((TID, now, now + 20, whole_name("replay", report.program, plan)))
        now = finish + 100
    if not marked:
        made.ranges.clear()
        made.nodes.clear()
    return made


def _kernels(report: Report, call: int, names: Mapping[int, Sequence[str]] | None) -> Sequence[str]:
    return [f"{report.program.calls[call].label}_kernel"] if names is None else names.get(call, ())


def write_export(path: Path, profile: Profile, *, without: Iterable[str] = (), domain: bool = True) -> Path:
    """Write ``profile`` to ``path``; tables named in ``without`` are left out, as where nothing of them was seen."""
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings) + 1)

    with closing(sqlite3.connect(path)) as file, file:
        file.executescript(f"PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; BEGIN; {SCHEMA}")
        for one in profile.ran:
            node = one.node or None
            common = (one.start, one.end, 0, 1)
            if one.kind == "kernel":
                long = text(f"void at::native::{one.name}<float, (int)4>(float *, int)")
                row = (
                    *(*common, None, one.stream, one.launch, one.process, long, text(one.name), None, 1, 0),
                    *(32, one.grid, 1, 1, 64, 1, 1, 1024, 512, 0, 0, 1, None, node, None),
                )
                _insert(file, "CUPTI_ACTIVITY_KIND_KERNEL", row)
            elif one.kind == "memcpy":
                row = (*common, one.stream, one.launch, one.process, 256, 8, 2, 2, node)
                _insert(file, "CUPTI_ACTIVITY_KIND_MEMCPY", row)
            else:
                row = (*common, one.stream, one.launch, one.process, 0, 256, 2, node)
                _insert(file, "CUPTI_ACTIVITY_KIND_MEMSET", row)
        for correlation, (thread, at) in profile.launches.items():
            row = (at, at + 10, 0, thread, correlation, text("cudaGraphLaunch_v10000"), 0, None)
            _insert(file, "CUPTI_ACTIVITY_KIND_RUNTIME", row)
        for thread, at, node, original in profile.nodes:
            row = (at, at, 0, thread, text("Graph Node Creation"), node, original)
            _insert(file, "CUDA_GRAPH_NODE_EVENTS", row)
        if domain:
            _insert(file, "NVTX_EVENTS", _range(0, None, 75, DOMAIN, None, TID, 3))
        for number, (thread, start, end, said) in enumerate(profile.ranges):
            own, key = (said, None) if number % 2 else (None, text(said))  # registered strings are StringIds
            _insert(file, "NVTX_EVENTS", _range(start, end, 59, own, key, thread, 3))
        if profile.gpu:
            _insert(file, "TARGET_INFO_GPU", (0, profile.gpu, "", 132))
        file.executemany("INSERT INTO StringIds (value, id) VALUES (?, ?)", strings.items())
        for name in without:
            file.execute(f"DROP TABLE {name}")
    return path


def _range(
    start: int, end: int | None, kind: int, said: str | None, key: int | None, thread: int, domain: int
) -> tuple[object, ...]:
    return (start, end, kind, None, None, None, said, thread, None, key, domain, *[None] * 9)


def _insert(file: sqlite3.Connection, table: str, row: Sequence[object]) -> None:
    file.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
