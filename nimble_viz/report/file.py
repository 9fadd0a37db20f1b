"""Report files: ``.nimble`` is gzip over typed JSON. Reading one needs no torch and no GPU, and runs no code from it.

The format is described in ``docs/report-format.md``.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from gzip import GzipFile, compress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import msgspec

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.measurement import Measurement
from nimble_core.ir.program import Program, TensorRef
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.errors import ReportFileError
from nimble_core.utils.files import write_file
from nimble_core.utils.gc_pause import collector_paused
from nimble_viz.report.data import (
    SCHEMA_VERSION,
    CallOverhead,
    EqualityCheck,
    OverheadProfile,
    PhaseOverhead,
    ReportData,
    SourceLines,
    Work,
)

__all__ = [
    "MAX_BYTES",
    "MAX_NUMBER",
    "MAX_RATIO",
    "MAX_SOURCE",
    "SMALL",
    "Wire",
    "check_report",
    "read",
    "save",
    "unpacks_beyond",
]

MAX_BYTES = 512 << 20
"""A file that unpacks to more than this is refused unread."""

MAX_NUMBER = 1e18
"""Largest number a report may hold: 32 years in nanoseconds, an exabyte. Keeps sums and ratios finite in every view."""

MAX_RATIO = 200
"""A file that unpacks to more than 16 MiB and to more than this many times its size is refused unread: reports shrink
to about a ninth, and what a small file can ask for should be small."""

MAX_SOURCE = 1_000_000
"""Most characters of code that a report may hold; those that this version makes hold a fifth of it."""

SMALL = 16 << 20
"""What a file may unpack to however small it is."""

_COMPRESSION = 4
_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_HAZARDS = frozenset({"RAW", "WAR", "WAW"})
_TAKE_AGAIN = "take the report again, or ask for an undamaged copy"
_A_TRACE = "if torch.profiler wrote it: nimble_viz.from_trace(path), or python -m nimble_viz profile FILE"

_CheckNumber = Literal["relative_error", "tolerance", "input_effect", "eager_error", "reference_error"]
_NotFinite = tuple[int, _CheckNumber, Literal["nan", "inf", "-inf"]]


class _Head(msgspec.Struct):
    nimble_report: int


class Wire(msgspec.Struct):
    """What a file holds.

    Args:
        nimble_report: the version of the format.
        report: all of it.
        not_finite: check, field and value of the numbers of equality checks that JSON cannot write (0 there).
    """

    nimble_report: int
    report: ReportData
    not_finite: tuple[_NotFinite, ...] = ()


_head = msgspec.json.Decoder(_Head)
_wire = msgspec.json.Decoder(Wire)


def save(report: ReportData, path: str | os.PathLike[str]) -> Path:
    """Write ``report`` to ``path``, all of it or nothing (see ``utils.files.write_file``), and return the path.

    The same report gives the same bytes. What was written is known to be readable: it is decoded again first.

    Raises:
        ReportFileError: the report is not consistent in itself (see ``check_report``) or holds what JSON cannot.
        InputError: the path is empty.
        OSError: the file cannot be written; a file that was there before is left as it was.
    """
    try:
        data = _encode(check_report(report))
        with collector_paused():  # a report is a great many new values without a cycle
            _decode(data)
    except ReportFileError as error:
        raise ReportFileError(f"this report cannot be saved: {error.what}", where=error.where, fix=error.fix) from error
    return write_file(path, compress(data, _COMPRESSION, mtime=0))


def read(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> ReportData:
    """Read a report that ``save`` wrote. Whatever the file holds, this returns a consistent report or raises.

    Args:
        path: the file.
        max_bytes: refuse a file that unpacks to more.

    Raises:
        ReportFileError: damaged, hostile, not a report, or written by a newer version; says which, and where.
        OSError: the file cannot be read; ``FileNotFoundError`` if there is none.
    """
    with open(os.fspath(path), "rb") as file:  # no number, which open() takes for a descriptor
        packed = file.read(len(_GZIP))
        packed += file.read(max_bytes) if packed == _GZIP else b""
    try:
        data = _unpack(packed, max_bytes)
        with collector_paused():  # a report is a great many new values without a cycle
            return check_report(_decode(data))
    except ReportFileError as error:
        name = os.fspath(path)
        trace = name.endswith((".json", ".json.gz"))
        place = f"{name}, {error.where}" if error.where else name
        raise ReportFileError(error.what, where=place, fix=_A_TRACE if trace else error.fix or _TAKE_AGAIN) from error


def _unpack(packed: bytes, max_bytes: int) -> bytes:
    """The bytes inside a gzip member of at most ``max_bytes``, and of no more than a report's ratio allows."""
    if not packed.startswith(_GZIP):
        raise ReportFileError("not a nimble report: it is not a gzip file", fix="give a file that report.save() wrote")
    most = min(max_bytes, max(SMALL, MAX_RATIO * len(packed)))
    beyond = unpacks_beyond(io.BytesIO(packed), most)
    if beyond and most < max_bytes:
        raise ReportFileError(
            f"the file unpacks to more than {MAX_RATIO} times its size, which no report does",
            fix="do not trust it; take the report again",
        )
    if beyond or len(packed) > max_bytes:
        raise ReportFileError(
            f"the file unpacks to more than {max_bytes:,} bytes",
            fix="if you trust it, nimble_viz.load(path, max_bytes=…)",
        )
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(packed)
    except zlib.error as error:
        raise ReportFileError(f"the file is damaged: {error}") from error
    if not unpacker.eof:
        raise ReportFileError("the file is cut short", fix="copy it again; its end is missing")
    if unpacker.unused_data:
        raise ReportFileError("the file is damaged: more follows its end")
    return data


def unpacks_beyond(file: BinaryIO, most: int) -> bool:
    """Whether a gzip file unpacks to more than ``most`` bytes: counted piece by piece, none of them kept.

    Of a damaged file: whether it does before the damage. ``file`` stands at its beginning, before and afterwards.
    """
    left = most
    with suppress(EOFError, OSError, zlib.error), GzipFile(fileobj=file) as unpacked:
        while left >= 0 and (piece := unpacked.read(_PIECE)):
            left -= len(piece)
    file.seek(0)
    return left < 0


def _encode(report: ReportData) -> bytes:
    found: list[_NotFinite] = []
    checks = _checks(report)
    for index, check in enumerate(checks):
        for name in get_args(_CheckNumber):
            value = getattr(check, name)
            if not math.isfinite(value):
                found.append((index, name, "nan" if value != value else "inf" if value > 0 else "-inf"))
                checks[index] = _with(checks[index], name, 0.0)
    wire = Wire(SCHEMA_VERSION, _with_checks(report, checks) if found else report, tuple(found))
    try:
        return msgspec.json.encode(wire)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReportFileError(f"it holds a value that JSON cannot ({error})") from error


def _decode(data: bytes) -> ReportData:
    """The report in ``data``, of the right types, not yet checked for meaning."""
    try:
        version = _head.decode(data).nimble_report
        if version > SCHEMA_VERSION:
            raise ReportFileError(
                f"the report has format {version}, this nimble_viz reads up to {SCHEMA_VERSION}",
                fix="upgrade nimble_viz, or save the report again with this version",
            )
        wire = _wire.decode(data)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        raise ReportFileError(f"not a nimble report, or damaged: {what}", where=place.strip("`")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportFileError(f"the file does not hold JSON: {error}") from error
    report = wire.report
    if version < 1 or report.schema_version != version:
        raise ReportFileError(f"the format is given as {version} and as {report.schema_version}")
    if not wire.not_finite:
        return report
    checks = _checks(report)
    for index, name, value in wire.not_finite:
        _require(0 <= index < len(checks), "not_finite", f"there is no check {index}")
        checks[index] = _with(checks[index], name, float(value))
    return _with_checks(report, checks)


def _checks(report: ReportData) -> list[EqualityCheck]:
    """All equality checks, numbered as ``not_finite`` does: the report's, its candidates', its peers'."""
    return [*report.checks, *(one.check for one in (*report.candidates, *report.peers) if one.check is not None)]


def _with_checks(report: ReportData, checks: Sequence[EqualityCheck]) -> ReportData:
    rest = iter(checks[len(report.checks) :])
    candidates = tuple(replace(one, check=next(rest)) if one.check is not None else one for one in report.candidates)
    peers = tuple(replace(one, check=next(rest)) if one.check is not None else one for one in report.peers)
    return replace(report, checks=tuple(checks[: len(report.checks)]), candidates=candidates, peers=peers)


def _with(check: EqualityCheck, name: str, value: float) -> EqualityCheck:
    changes: dict[str, Any] = {name: value}
    return replace(check, **changes)


# What the types cannot say: indices within range, lists as long as they must be, numbers that can be drawn.


def check_report(report: ReportData) -> ReportData:
    """Return ``report`` if it is consistent in itself, so that every view of it can be drawn.

    Raises:
        ReportFileError: an index out of range, lists that do not fit each other, a number that is not finite or
            beyond ``MAX_NUMBER``; ``where`` names the field. Equality checks may hold NaN and infinity: outputs can.
    """
    size, eager = len(report.program.calls), len(report.eager_calls)
    _check_program(report.program, "program", len(report.eager.calls) if report.eager is not None else 0)
    if report.eager is not None:
        _check_program(report.eager, "eager", 0)
    _check_graph(report.graph, size)
    _check_costs(report, size)
    _indices(report.critical_path, size, "critical_path")
    _require(
        all(u < v for u, v in pairwise(report.critical_path)),
        "critical_path",
        "a path goes from lower to higher calls",
    )
    _amounts((report.critical_path_ns, report.batch), "critical_path_ns, batch")
    for k, plan in enumerate(report.schedules):
        _check_schedule(plan, size, f"schedules[{k}]")
    for k, taken in enumerate(report.measurements):
        _check_measurement(taken, f"measurements[{k}]")
    for k, one in enumerate(report.candidates):
        where = f"candidates[{k}]"
        _amounts((one.streams, one.syncs, one.simulated_ns, one.nbytes, one.capture_s, one.fuse_s), where)
        if one.measurement is not None:
            _check_measurement(one.measurement, f"{where}.measurement")
    _amounts((step.seconds for step in report.preparation), "preparation")
    _amounts((peer.prepare_s for peer in report.peers), "peers")
    if report.overhead is not None:
        _check_overhead(report.overhead, eager)
    for k, line in enumerate(report.timelines):
        _check_timeline(line, eager if line.run == "eager" else size, f"timelines[{k}]")
    if report.sampling is not None:
        taken_of, bound = report.sampling, report.sampling.bound
        _amounts((taken_of.seen, taken_of.timed, taken_of.profiled), "sampling")
        _finite((taken_of.loader_ns,), "sampling.loader_ns")
        _amounts((bound.input_ns, bound.device_ns, bound.host_ns), "sampling.bound")
    if report.work is not None:
        _check_work(report.work, size, len(report.eager.calls) if report.eager is not None else 0)
    _check_sources(report.sources)
    memory = report.memory
    _amounts((memory.eager_peak, memory.compare_peak, *(held for _, held in memory.engines)), "memory")
    for k, planned in enumerate(memory.planned):
        _amounts((planned.arena, planned.unshared, planned.workspaces), f"memory.planned[{k}]")
    stamp = report.environment
    _finite((stamp.cores, stamp.threads, stamp.load, stamp.others, *stamp.sm_clock_mhz), "environment")
    _finite((stamp.other_processes or 0,), "environment.other_processes")
    return report


def _check_program(program: Program, where: str, eager: int) -> None:
    """``eager``: how many eager calls there are for the calls of ``program`` to stand for."""
    storages = len(program.storages)
    _amounts((storage.nbytes for storage in program.storages), f"{where}.storages")
    _amounts((program.host_steps,), f"{where}.host_steps")
    for k, call in enumerate(program.calls):
        _require(call.index == k, f"{where}.calls[{k}].index", f"it is {call.index}, its place is {k}")
        for access in call.accesses:
            _check_ref(access.ref, storages, f"{where}.calls[{k}].accesses")
        for origin in call.origins:
            _require(0 <= origin.line < MAX_NUMBER, f"{where}.calls[{k}].origins", f"line {origin.line}")
        _indices(call.eager, eager, f"{where}.calls[{k}].eager")
    for name, refs in (("inputs", program.inputs), ("outputs", program.outputs)):
        for ref in refs:
            _check_ref(ref, storages, f"{where}.{name}")


def _check_ref(ref: TensorRef, storages: int, where: str) -> None:
    _require(0 <= ref.storage < storages, where, f"there is no storage {ref.storage}")
    _require(len(ref.sizes) == len(ref.strides), where, "a tensor has as many strides as sizes")
    count = ref.itemsize
    for extent in ref.sizes:
        _require(0 <= extent <= MAX_NUMBER, where, f"a tensor has size {extent}")
        count *= extent or 1
    _require(0 <= ref.offset <= MAX_NUMBER and 0 <= count <= MAX_NUMBER, where, "a tensor too large to exist")
    _require(all(-MAX_NUMBER <= stride <= MAX_NUMBER for stride in ref.strides), where, "a stride too large to exist")


def _check_graph(graph: CallGraph, size: int) -> None:
    _require(graph.size == size, "graph.size", f"it is {graph.size}, the program has {size} calls")
    for name, edges in (("edges", graph.edges), ("meg", graph.meg)):
        where = f"graph.{name}"
        _pairs(edges, size, where)
        _require(all(u < v for u, v in edges), where, "an edge goes from a lower to a higher call")
        _require(all(a < b for a, b in pairwise(edges)), where, "edges are sorted, without duplicates")
    _require(len(graph.kinds) == len(graph.edges), "graph.kinds", "one kind of hazard for each edge")
    for kinds in set(graph.kinds):
        _require(_HAZARDS.issuperset(kinds.split("+")), "graph.kinds", f"{kinds!r} is no kind of hazard")
    _require(set(graph.edges).issuperset(graph.meg), "graph.meg", "an edge that the graph does not have")


def _check_costs(report: ReportData, size: int) -> None:
    costs = report.costs
    _require(len(costs.ns) == size, "costs.ns", f"{len(costs.ns)} costs for {size} calls")
    _require(len(costs.spread_ns) in (0, size), "costs.spread_ns", f"{len(costs.spread_ns)} spreads for {size} calls")
    _amounts(costs.ns, "costs.ns")
    _amounts(costs.spread_ns, "costs.spread_ns")
    _require(len(costs.demand) in (0, size), "costs.demand", f"{len(costs.demand)} shares for {size} calls")
    for share in costs.demand:
        _require(0 <= share <= 1, "costs.demand", f"{share!r} is no share of a device")
    _indices((kernel.call for kernel in costs.kernels if kernel.call is not None), size, "costs.kernels")
    _amounts((kernel.duration_ns for kernel in costs.kernels), "costs.kernels")
    for k, kernel in enumerate(costs.kernels):
        _finite(
            (*kernel.grid, *kernel.block, kernel.registers, kernel.shared_bytes, kernel.node), f"costs.kernels[{k}]"
        )
    _amounts((costs.observed, costs.expected, costs.seen), "costs")


def _check_work(work: Work, size: int, eager: int) -> None:
    for where, flops, calls in (("work.flops", work.flops, size), ("work.eager", work.eager, eager)):
        _require(len(flops) == calls, where, f"{len(flops)} counts for {calls} calls")
        _amounts((count for count in flops if count is not None), where)
    if work.processors is not None:
        held = work.processors
        limits = (held.count, held.threads, held.registers, held.shared_bytes, held.blocks, held.warp)
        _within(limits, 1, "work.processors")


def _check_sources(sources: Sequence[SourceLines]) -> None:
    left = MAX_SOURCE
    for k, piece in enumerate(sources):
        where = f"sources[{k}]"
        _within((piece.first,), 1, f"{where}.first")
        left -= sum(len(line) + 1 for line in piece.lines)
        _require(left >= 0, where, f"more than {MAX_SOURCE:,} characters of code")


def _check_schedule(plan: Schedule, size: int, where: str) -> None:
    _require(len(plan.stream) == size, f"{where}.stream", f"{len(plan.stream)} streams for {size} calls")
    _require(set(plan.stream) == set(range(len(set(plan.stream)))), f"{where}.stream", "streams have gaps")
    _require(sorted(plan.order) == list(range(size)), f"{where}.order", "it does not name every call once")
    _require(len(plan.priority) in (0, size), f"{where}.priority", "one priority for each call, or none")
    _finite(plan.priority, f"{where}.priority")
    _pairs(plan.syncs, size, f"{where}.syncs")
    _pairs(plan.added_order, size, f"{where}.added_order")
    _amounts(
        (plan.meg_edges, plan.matched, *(getattr(plan.counts, one.name) or 0 for one in fields(SyncCounts))), where
    )


def _check_measurement(taken: Measurement, where: str) -> None:
    _amounts(taken.samples_ns, f"{where}.samples_ns")
    _amounts((taken.median_ns, taken.warmup, taken.dropped), where)
    _finite((taken.spread, taken.drift), where)
    count = len(taken.samples_ns)
    _require(len(taken.rounds) in (0, count), f"{where}.rounds", f"{len(taken.rounds)} rounds for {count} samples")
    _amounts(taken.rounds, f"{where}.rounds")
    _require(
        all(a < b for a, b in pairwise(taken.rounds)), f"{where}.rounds", "rounds are not in order, each named once"
    )


def _check_overhead(profile: OverheadProfile, size: int) -> None:
    _indices((row.call for row in profile.calls), size, "overhead.calls")
    _indices(profile.shared, size, "overhead.shared")
    for k, row in enumerate(profile.calls):
        _finite(_parts(row), f"overhead.calls[{k}]")
    _amounts((profile.profiled_ns, profile.unprofiled_ns, profile.device_busy_ns), "overhead")
    _amounts((profile.waiting_ns, profile.loader_ns), "overhead")
    if profile.idle is not None:
        idle = profile.idle
        _amounts((idle.host_late_ns, idle.launch_ns, idle.dependency_ns, idle.unknown_ns), "overhead.idle")
    _finite((profile.remainder_ns, profile.device_idle_share), "overhead")
    _amounts((profile.matched, profile.total), "overhead")
    for sync in profile.host_syncs:
        _amounts((sync.count, sync.total_ns), "overhead.host_syncs")
    for k, one in enumerate(profile.phases):
        where = f"overhead.phases[{k}]"
        _amounts(_parts(one), where)
        for start, end in one.spans:
            _amounts((start, end - start, end), f"{where}.spans")


def _parts(row: CallOverhead | PhaseOverhead) -> tuple[float, ...]:
    parts = (row.python_ns, row.dispatch_ns, row.allocation_ns, row.launch_ns)
    return (*parts, row.tail_ns, row.work_ns, row.exposed_ns)


def _check_timeline(line: Timeline, size: int, where: str) -> None:
    lanes, before = len(line.lanes), 0.0
    _amounts((line.profiled_ns, line.unprofiled_ns), where)
    spans, streams = len(line.spans), len(line.streams)
    _require(streams in (0, spans), f"{where}.streams", f"{streams} device streams for {spans} spans")
    _require(len(line.nodes) in (0, spans), f"{where}.nodes", f"{len(line.nodes)} graph nodes for {spans} spans")
    _finite((*line.streams, *line.nodes), f"{where}.streams, {where}.nodes")
    if line.check is not None:
        seen = line.check
        _amounts((seen.expected, seen.seen, seen.ambiguous, seen.unexpected), f"{where}.check")
    for k, span in enumerate(line.spans):
        if (
            0 <= span.lane < lanes
            and before <= span.start_ns <= span.end_ns <= MAX_NUMBER
            and (span.call is None or 0 <= span.call < size)
        ):
            before = span.start_ns
            continue
        raise ReportFileError(
            f"lane {span.lane} of {lanes}, call {span.call} of {size}, from {span.start_ns} to {span.end_ns} ns "
            f"after one that began at {before} ns: a span lies on a lane, belongs to a call or none, does not end "
            "before it starts, and spans are sorted",
            where=f"{where}.spans[{k}]",
        )


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ReportFileError(what, where=where)


def _amounts(values: Iterable[float], where: str) -> None:
    _within(values, 0, where)


def _finite(values: Iterable[float], where: str) -> None:
    _within(values, -MAX_NUMBER, where)


def _within(values: Iterable[float], low: float, where: str) -> None:
    for value in values:
        if not low <= value <= MAX_NUMBER:
            raise ReportFileError(f"{value!r} is not between {low:g} and {MAX_NUMBER:g}", where=where)


def _indices(values: Iterable[int], size: int, where: str) -> None:
    for value in values:
        if not 0 <= value < size:
            raise ReportFileError(f"there is no call {value} among {size}", where=where)


def _pairs(pairs: Sequence[tuple[int, int]], size: int, where: str) -> None:
    for pair in pairs:
        _indices(pair, size, where)
