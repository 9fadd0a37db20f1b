"""Check what a report's types cannot say, so that every view of a report can be drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.measurement import Measurement
from nimble_core.ir.program import Program, TensorRef
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.errors import ReportFileError
from nimble_viz.report.data import EqualityCheck, OverheadProfile, ReportData, SourceLines, Work

__all__ = ["MAX_NUMBER", "MAX_SOURCE", "check_report"]

MAX_NUMBER = 1e18
"""Largest number of a report: 32 years in nanoseconds, an exabyte. Sums and ratios stay finite in every view."""

MAX_SOURCE = 1_000_000
"""Most characters of code in a report; those that this version makes hold a fifth of it."""

_TEXT = frozenset({"str", "bool", "tuple", "None"})
"""Words of annotations of fields without numbers."""

_SIGNED: dict[str, set[str]] = {
    "TensorRef": {"strides"},
    "Schedule": {"priority"},
    "Measurement": {"spread", "drift"},
    "Kernel": {"node"},
    "Timeline": {"streams"},
    "CallOverhead": {"python_ns", "dispatch_ns", "allocation_ns", "launch_ns", "tail_ns", "work_ns", "exposed_ns"},
    "OverheadProfile": {"remainder_ns", "device_idle_share"},
    "Sampling": {"loader_ns"},
    "Environment": {"load", "others"},
}
"""Fields that may hold negative numbers, by dataclass."""


def check_report(report: ReportData) -> ReportData:
    """Return ``report`` if it is consistent in itself, so that every view of it can be drawn.

    Raise ReportFileError otherwise; ``where`` names the field. What equality checks hold may be larger.
    """
    if found := _out_of_range(report):
        place, number = found
        raise ReportFileError(f"{number!r} is negative, not finite or beyond {MAX_NUMBER:g}", where=place.lstrip("."))
    size = len(report.program.calls)
    eager_size = len(report.eager.calls) if report.eager is not None else 0
    profiled_size = len(report.eager_calls)
    _check_program(report.program, "program", eager_size)
    if report.eager is not None:
        _check_program(report.eager, "eager", 0)
    _check_graph(report.graph, size)
    _check_costs(report, size)
    _check_indices(report.critical_path, size, "critical_path")
    rising = all(u < v for u, v in pairwise(report.critical_path))
    _require(rising, "critical_path", "a path goes from lower to higher calls")
    for k, plan in enumerate(report.schedules):
        _check_schedule(plan, size, f"schedules[{k}]")
    for k, taken in enumerate(report.measurements):
        _check_measurement(taken, f"measurements[{k}]")
    for k, one in enumerate(report.candidates):
        if one.measurement is not None:
            _check_measurement(one.measurement, f"candidates[{k}].measurement")
    if report.overhead is not None:
        _check_overhead(report.overhead, profiled_size)
    for k, line in enumerate(report.timelines):
        _check_timeline(line, profiled_size if line.run == "eager" else size, f"timelines[{k}]")
    if report.work is not None:
        _check_work(report.work, size, eager_size)
    _check_sources(report.sources)
    return report


def _out_of_range(value: Any, signed: bool = False) -> tuple[str, float] | None:
    """Find the first number that is negative (unless ``signed``) or beyond ``MAX_NUMBER``: its place and itself."""
    if isinstance(value, int | float):
        return None if (-MAX_NUMBER if signed else 0) <= value <= MAX_NUMBER else ("", value)
    if isinstance(value, tuple):
        for k, one in enumerate(value):
            if found := _out_of_range(one, signed):
                return f"[{k}]{found[0]}", found[1]
    elif value is not None:
        kind: Any = type(value)  # mypy takes no class for hashable
        for name, may_be_negative in _numeric_fields(kind):
            if found := _out_of_range(getattr(value, name), may_be_negative):
                return f".{name}{found[0]}", found[1]
    return None


@cache
def _numeric_fields(kind: type) -> tuple[tuple[str, bool], ...]:
    """Name the fields of a dataclass that may hold numbers, each with whether these may be negative."""
    if not is_dataclass(kind) or kind is EqualityCheck:
        return ()
    signed = _SIGNED.get(kind.__name__, set())
    numeric = [one.name for one in fields(kind) if not _TEXT.issuperset(re.findall(r"\w+", str(one.type)))]
    return tuple((name, name in signed) for name in numeric)


def _check_program(program: Program, where: str, eager_size: int) -> None:
    """Check calls and storages; ``eager_size``: how many eager calls there are to stand for."""
    storages = len(program.storages)
    for k, call in enumerate(program.calls):
        _require(call.index == k, f"{where}.calls[{k}].index", f"it is {call.index}, its place is {k}")
        for access in call.accesses:
            _check_ref(access.ref, storages, f"{where}.calls[{k}].accesses")
        _check_indices(call.eager, eager_size, f"{where}.calls[{k}].eager")
    for name, refs in (("inputs", program.inputs), ("outputs", program.outputs)):
        for ref in refs:
            _check_ref(ref, storages, f"{where}.{name}")


def _check_ref(ref: TensorRef, storages: int, where: str) -> None:
    _require(ref.storage < storages, where, f"there is no storage {ref.storage}")
    _require(len(ref.sizes) == len(ref.strides), where, "a tensor has as many strides as sizes")
    nbytes = ref.itemsize
    for extent in ref.sizes:
        nbytes *= extent or 1
    _require(nbytes <= MAX_NUMBER, where, "a tensor too large to exist")


def _check_graph(graph: CallGraph, size: int) -> None:
    _require(graph.size == size, "graph.size", f"it is {graph.size}, the program has {size} calls")
    for name, edges in (("edges", graph.edges), ("meg", graph.meg)):
        where = f"graph.{name}"
        _check_pairs(edges, size, where)
        _require(all(u < v for u, v in edges), where, "an edge goes from a lower to a higher call")
        _require(all(a < b for a, b in pairwise(edges)), where, "edges are sorted, without duplicates")
    _require(len(graph.kinds) == len(graph.edges), "graph.kinds", "one kind of hazard for each edge")
    _require(set(graph.edges).issuperset(graph.meg), "graph.meg", "an edge that the graph does not have")


def _check_costs(report: ReportData, size: int) -> None:
    costs = report.costs
    _require(len(costs.ns) == size, "costs.ns", f"{len(costs.ns)} costs for {size} calls")
    _require(len(costs.spread_ns) in (0, size), "costs.spread_ns", f"{len(costs.spread_ns)} spreads for {size} calls")
    _require(len(costs.demand) in (0, size), "costs.demand", f"{len(costs.demand)} shares for {size} calls")
    for share in costs.demand:
        _require(share <= 1, "costs.demand", f"{share!r} is no share of a device")
    _check_indices((kernel.call for kernel in costs.kernels if kernel.call is not None), size, "costs.kernels")


def _check_work(work: Work, size: int, eager_size: int) -> None:
    _require(len(work.flops) == size, "work.flops", f"{len(work.flops)} counts for {size} calls")
    _require(len(work.eager) == eager_size, "work.eager", f"{len(work.eager)} counts for {eager_size} calls")
    if work.processors is not None:
        for one in fields(work.processors):
            least_one = getattr(work.processors, one.name) >= 1
            _require(least_one, f"work.processors.{one.name}", "a GPU holds at least one of everything")


def _check_sources(sources: Sequence[SourceLines]) -> None:
    left = MAX_SOURCE
    for k, piece in enumerate(sources):
        where = f"sources[{k}]"
        _require(piece.first >= 1, f"{where}.first", "lines count from 1")
        left -= sum(len(line) + 1 for line in piece.lines)
        _require(left >= 0, where, f"more than {MAX_SOURCE:,} characters of code")


def _check_schedule(plan: Schedule, size: int, where: str) -> None:
    _require(len(plan.stream) == size, f"{where}.stream", f"{len(plan.stream)} streams for {size} calls")
    _require(set(plan.stream) == set(range(len(set(plan.stream)))), f"{where}.stream", "streams have gaps")
    _require(sorted(plan.order) == list(range(size)), f"{where}.order", "it does not name every call once")
    _require(len(plan.priority) in (0, size), f"{where}.priority", "one priority for each call, or none")
    _check_pairs(plan.syncs, size, f"{where}.syncs")
    _check_pairs(plan.added_order, size, f"{where}.added_order")


def _check_measurement(taken: Measurement, where: str) -> None:
    count, rounds = len(taken.samples_ns), taken.rounds
    _require(len(rounds) in (0, count), f"{where}.rounds", f"{len(rounds)} rounds for {count} samples")
    _require(all(a < b for a, b in pairwise(rounds)), f"{where}.rounds", "rounds are in order, each named once")


def _check_overhead(profile: OverheadProfile, size: int) -> None:
    _check_indices((row.call for row in profile.calls), size, "overhead.calls")
    _check_indices(profile.shared, size, "overhead.shared")
    for k, one in enumerate(profile.phases):
        for start, end in one.spans:
            _require(start <= end, f"overhead.phases[{k}].spans", "a span does not end before it starts")


def _check_timeline(line: Timeline, size: int, where: str) -> None:
    lanes, spans, before = len(line.lanes), len(line.spans), 0.0
    rule = "a span lies on a lane, belongs to a call or none, does not end before it starts, and spans are sorted"
    _require(len(line.streams) in (0, spans), f"{where}.streams", f"{len(line.streams)} for {spans} spans")
    for k, span in enumerate(line.spans):
        fits = span.lane < lanes and before <= span.start_ns <= span.end_ns and (span.call is None or span.call < size)
        if not fits:
            raise ReportFileError(rule, where=f"{where}.spans[{k}]")
        before = span.start_ns


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ReportFileError(what, where=where)


def _check_indices(values: Iterable[int], size: int, where: str) -> None:
    for value in values:
        if not 0 <= value < size:
            raise ReportFileError(f"there is no call {value} among {size}", where=where)


def _check_pairs(pairs: Sequence[tuple[int, int]], size: int, where: str) -> None:
    for pair in pairs:
        _check_indices(pair, size, where)
