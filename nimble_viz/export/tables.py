"""A Report as tables: pandas data frames, or CSV through the standard library alone.

Times are nanoseconds, sizes bytes. What has several values stands in one cell, separated by spaces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast, get_args

from nimble_core.ir.measurement import Ratio
from nimble_core.ir.program import Call
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.gaps import replay_gaps
from nimble_viz.analysis.labels import label_call, label_run
from nimble_viz.analysis.overhead import module_tree
from nimble_viz.analysis.timeline import distortion
from nimble_viz.analysis.work import call_work, launches
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    import pandas

__all__ = [
    "KINDS", "Column", "Kind", "Table", "make_table", "no_formula", "to_csv", "to_dataframe", "write_table",
    "write_tables",
]  # fmt: skip

Kind = Literal[
    "calls",
    "kernels",
    "spans",
    "gaps",
    "syncs",
    "host_syncs",
    "schedules",
    "candidates",
    "measurements",
    "samples",
    "peers",
    "overhead",
    "modules",
    "phases",
    "split",
    "advice",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every table, in the order in which a folder of them is written."""

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``None`` is a missing value."""

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of one length."""

    kind: Kind
    columns: tuple[Column, ...]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """Its rows, in order."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def make_table(report: ReportData, kind: str) -> Table:
    """One table of the report; without rows where the report does not know.

    Args:
        report: what was found out.
        kind: ``"calls"``: calls of the program, their cost and place in the chosen schedule. ``"kernels"``: nodes of
            the captured one-stream graph. ``"spans"``: all timelines, with what to doubt of each.
            ``"gaps"``: where a replay's streams stood still, and why. ``"syncs"``: waits of each schedule.
            ``"host_syncs"``: where eager made the host wait. ``"schedules"``: each plan's promises and counts.
            ``"candidates"``: plans that were tried. ``"measurements"``: wall times; ``"samples"``: each sample of
            them. ``"peers"``: other ways to run the model. ``"overhead"``: eager's host time by eager call;
            ``"modules"``: by module, each with everything in it; ``"phases"``: by phase of a training step.
            ``"split"``: what the replay and the eager run are made of; ``"advice"``: what would help next.

    Raises:
        InputError: no such kind.
    """
    if kind not in _MAKERS:
        raise InputError(f"there is no table {kind!r}", fix=f"one of {', '.join(KINDS)}")
    return _MAKERS[cast(Kind, kind)](report)


def to_dataframe(report: ReportData, kind: str) -> pandas.DataFrame:
    """``make_table`` as a data frame. Integers with missing values are ``Int64``; flags that may be, ``boolean``.

    Raises:
        InputError: no such kind, or pandas is not installed.
    """
    table = make_table(report, kind)
    try:
        import pandas
    except ImportError as error:
        raise InputError(
            f"a data frame needs pandas: {error}",
            fix="pip install 'nimble-viz[export]', or export to a folder of CSV files, which needs no package",
        ) from error
    return pandas.DataFrame({one.name: pandas.Series(one.cells, dtype=_dtype(one)) for one in table.columns})


def to_csv(table: Table) -> str:
    """The table as CSV with a header, as RFC 4180 has it: commas, quotes where needed, lines that end in CR LF.

    Floats are written so that they are read back exactly; a missing value is an empty cell; text is ``no_formula``.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([column.name for column in table.columns])
    writer.writerows(map(no_formula, row) for row in table.rows)
    return out.getvalue()


def no_formula(cell: Cell) -> Cell:
    """``cell``, with an apostrophe before text that a spreadsheet would take for a formula; numbers as they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def write_tables(report: ReportData, folder: Path) -> Path:
    """Write every table as ``folder/KIND.csv`` and return ``folder``. Raises OSError if they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        write_table(report, kind, folder / f"{kind}.csv")
    return folder


def write_table(report: ReportData, kind: str, path: Path) -> Path:
    """Write one table to ``path``. Raises OSError if it cannot be written, InputError if there is no such kind."""
    text = to_csv(make_table(report, kind))
    return write_file(path, text.encode(errors="backslashreplace"))


def _dtype(column: Column) -> str:
    if column.type in (int, bool) and None in column.cells:
        return "Int64" if column.type is int else "boolean"
    return {int: "int64", float: "float64", bool: "bool", str: "object"}[column.type]


def _table(kind: Kind, types: Mapping[str, type], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table of ``rows`` whose cells have the types of ``types``, by column name."""
    cells = list(zip(*rows, strict=True)) or [()] * len(types)
    return Table(
        kind, tuple(Column(name, kind_, column) for (name, kind_), column in zip(types.items(), cells, strict=True))
    )


def _join(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _source(call: Call) -> str:
    origin = call.origins[0] if call.origins else None
    return f"{origin.file}:{origin.line}" if origin and origin.file else ""


def _calls(report: ReportData) -> Table:
    types = {
        "call": int,
        "operator": str,
        "label": str,
        "phase": str,
        "module": str,
        "source": str,
        "origins": int,
        "eager_calls": str,
        "flops": int,
        "bytes_read": int,
        "bytes_written": int,
        "cost_ns": float,
        "cost_spread_ns": float,
        "gflops": float,
        "gbytes": float,
        "demand": float,
        "waves": float,
        "occupancy": float,
        "critical": bool,
        "stream": int,
    }
    costs, chosen, critical = report.costs, report.schedule(report.chosen), frozenset(report.critical_path)
    return _table(
        "calls",
        types,
        (
            (
                call.index,
                call.operator,
                label_call(call),
                call.phase,
                call.module,
                _source(call),
                len(call.origins),
                _join(call.eager),
                done.flops,
                done.bytes_read,
                done.bytes_written,
                costs.ns[call.index],
                costs.spread_ns[call.index] if costs.spread_ns else None,
                done.gflops,
                done.gbytes,
                done.fill,
                done.waves,
                done.occupancy,
                call.index in critical,
                chosen.stream[call.index] if chosen else None,
            )
            for call, done in zip(report.program.calls, call_work(report), strict=True)
        ),
    )


def _kernels(report: ReportData) -> Table:
    types = {
        "call": int,
        "kernel": str,
        "grid": str,
        "block": str,
        "registers": int,
        "shared_bytes": int,
        "node": int,
        "duration_ns": float,
        "blocks": int,
        "blocks_resident": int,
        "waves": float,
        "occupancy": float,
    }
    return _table(
        "kernels",
        types,
        (
            (
                one.call,
                one.name,
                _join(one.grid),
                _join(one.block),
                one.registers,
                one.shared_bytes,
                one.node,
                one.duration_ns,
                *((lies.blocks, lies.resident, lies.waves, lies.occupancy) if lies else (None,) * 4),
            )
            for one, lies in zip(report.costs.kernels, launches(report), strict=True)
        ),
    )


def _spans(report: ReportData) -> Table:
    types = {
        "run": str,
        "lane": str,
        "lane_kind": str,
        "start_ns": float,
        "end_ns": float,
        "call": int,
        "name": str,
        "device_stream": int,
        "source": str,
        "reliable": bool,
        "profiled_over_unprofiled": float,
    }
    return _table(
        "spans",
        types,
        (
            (
                line.run,
                line.lanes[span.lane].name,
                line.lanes[span.lane].kind,
                span.start_ns,
                span.end_ns,
                span.call,
                span.name,
                line.streams[at] if line.streams else None,
                line.source,
                line.reliable,
                distortion(line) or None,
            )
            for line in report.timelines
            for at, span in enumerate(line.spans)
        ),
    )


def _gaps(report: ReportData) -> Table:
    types = {
        "run": str,
        "lane": str,
        "call": int,
        "awaited": int,
        "start_ns": float,
        "end_ns": float,
        "launch_ns": float,
        "wait_ns": float,
        "unready_ns": float,
    }
    return _table(
        "gaps",
        types,
        (
            (
                line.run,
                line.lanes[gap.lane].name,
                gap.call,
                gap.awaited,
                gap.start_ns,
                gap.end_ns,
                gap.launch_ns,
                gap.wait_ns,
                gap.unready_ns,
            )
            for line in report.timelines
            for gap in replay_gaps(report, line)
        ),
    )


def _syncs(report: ReportData) -> Table:
    types = {
        "schedule": str,
        "producer": int,
        "consumer": int,
        "producer_stream": int,
        "consumer_stream": int,
        "hazards": str,
    }
    hazards = dict(zip(report.graph.edges, report.graph.kinds, strict=True))
    return _table(
        "syncs",
        types,
        (
            (plan.policy, u, v, plan.stream[u], plan.stream[v], hazards.get((u, v), ""))
            for plan in report.schedules
            for u, v in plan.syncs
        ),
    )


def _host_syncs(report: ReportData) -> Table:
    types = {"kind": str, "count": int, "total_ns": float, "source": str, "phase": str}
    found = report.overhead.host_syncs if report.overhead else ()
    return _table("host_syncs", types, ((one.kind, one.count, one.total_ns, one.source, one.phase) for one in found))


def _schedules(report: ReportData) -> Table:
    types = {
        "schedule": str,
        "chosen": bool,
        "streams": int,
        "full": int,
        "meg": int,
        "planned": int,
        "emitted": int,
        "forks": int,
        "joins": int,
        "inside": int,
        "ahead": int,
        "added_order": int,
        "maximum_concurrency": bool,
        "minimum_syncs": bool,
    }
    return _table(
        "schedules",
        types,
        (
            (
                plan.policy,
                plan.policy == report.chosen,
                plan.streams,
                plan.counts.full,
                plan.counts.meg,
                plan.counts.planned,
                plan.counts.emitted,
                plan.counts.forks,
                plan.counts.joins,
                plan.counts.inside,
                plan.counts.ahead,
                len(plan.added_order),
                plan.maximum_concurrency,
                plan.minimum_syncs,
            )
            for plan in report.schedules
        ),
    )


def _candidates(report: ReportData) -> Table:
    types = {
        "candidate": str,
        "kernels": str,
        "streams": int,
        "syncs": int,
        "simulated_ns": float,
        "median_ns": float,
        "spread": float,
        "passed": bool,
        "error": float,
        "tolerance": float,
        "nbytes": int,
        "capture_s": float,
        "fuse_s": float,
        "chosen": bool,
        "note": str,
    }
    return _table(
        "candidates",
        types,
        (
            (
                one.name,
                one.fuse,
                one.streams,
                one.syncs,
                one.simulated_ns or None,
                one.measurement.median_ns if one.measurement else None,
                one.measurement.spread if one.measurement else None,
                one.check.passed if one.check else None,
                one.check.error if one.check else None,
                one.check.tolerance if one.check else None,
                one.nbytes or None,
                one.capture_s,
                one.fuse_s,
                one.chosen,
                one.note,
            )
            for one in report.candidates
        ),
    )


def _measurements(report: ReportData) -> Table:
    types = {
        "run": str,
        "label": str,
        "median_ns": float,
        "spread": float,
        "drift": float,
        "samples": int,
        "warmup": int,
        "over_eager": float,
        "over_eager_low": float,
        "over_eager_high": float,
        "verdict": str,
        "dropped": int,
        "stable": bool,
        "warnings": str,
    }
    ratios = {taken.name: report.ratio(taken.name) for taken in report.measurements}
    return _table(
        "measurements",
        types,
        (
            (
                taken.name,
                label_run(report, taken.name),
                taken.median_ns,
                taken.spread,
                taken.drift,
                len(taken.samples_ns),
                taken.warmup,
                *_figures(ratios[taken.name]),
                taken.dropped,
                taken.stable,
                "; ".join(taken.warnings),
            )
            for taken in report.measurements
        ),
    )


def _figures(ratio: Ratio | None) -> tuple[float | None, float | None, float | None, str]:
    return (ratio.value, ratio.low, ratio.high, ratio.verdict) if ratio else (None, None, None, "")


def _samples(report: ReportData) -> Table:
    types = {"run": str, "round": int, "ns": float}
    return _table(
        "samples",
        types,
        (
            (taken.name, at, ns)
            for taken in report.measurements
            for at, ns in zip(taken.rounds or range(len(taken.samples_ns)), taken.samples_ns, strict=True)
        ),
    )


def _peers(report: ReportData) -> Table:
    types = {
        "peer": str,
        "median_ns": float,
        "prepare_s": float,
        "passed": bool,
        "error": float,
        "tolerance": float,
        "note": str,
    }
    medians = {taken.name: taken.median_ns for taken in report.measurements}
    return _table(
        "peers",
        types,
        (
            (
                peer.name,
                medians.get(peer.name),
                peer.prepare_s,
                peer.check.passed if peer.check else None,
                peer.check.error if peer.check else None,
                peer.check.tolerance if peer.check else None,
                peer.note,
            )
            for peer in report.peers
        ),
    )


_PARTS = ("python", "dispatch", "allocation", "launch", "tail", "work", "exposed")
_PART_TYPES = {f"{part}_ns": float for part in _PARTS}


def _overhead(report: ReportData) -> Table:
    types = {"call": int, "operator": str, "phase": str, "module": str, "source": str, **_PART_TYPES}
    calls, found = report.eager_calls, report.overhead.calls if report.overhead else ()
    return _table(
        "overhead",
        types,
        (
            (
                row.call,
                calls[row.call].operator,
                calls[row.call].phase,
                calls[row.call].module,
                _source(calls[row.call]),
                *(getattr(row, name) for name in _PART_TYPES),
            )
            for row in found
        ),
    )


def _modules(report: ReportData) -> Table:
    types = {"module": str, "depth": int, "calls": int, "overhead_ns": float, **_PART_TYPES}
    rows = (row for root in module_tree(report) for row in root if not row.own)
    sums = ("overhead", *_PARTS)
    return _table(
        "modules", types, ((row.path, row.depth, len(row.eager), *(row.sums[name] for name in sums)) for row in rows)
    )


def _phases(report: ReportData) -> Table:
    types = {"phase": str, "host_ns": float, **_PART_TYPES}
    found = report.overhead.phases if report.overhead else ()
    return _table(
        "phases", types, ((one.phase, one.host_ns, *(getattr(one, name) for name in _PART_TYPES)) for one in found)
    )


def _split(report: ReportData) -> Table:
    types = {"run": str, "part": str, "ns": float, "share": float}
    found = advice(report)
    return _table(
        "split",
        types,
        (
            (split.run, row.name, row.ns, row.share)
            for split in (found.eager, found.replay)
            if split
            for row in split.rows
        ),
    )


def _advice(report: ReportData) -> Table:
    types = {"change": str, "run": str, "gain_ns": float, "of_ns": float, "basis": str, "per_sample": bool, "why": str}
    rows = advice(report).changes
    return _table(
        "advice",
        types,
        ((one.what, one.run, one.gain_ns, one.of_ns, one.basis, one.per_sample, one.why) for one in rows),
    )


_MAKERS: Mapping[Kind, Callable[[ReportData], Table]] = MappingProxyType(
    {
        "calls": _calls,
        "kernels": _kernels,
        "spans": _spans,
        "gaps": _gaps,
        "syncs": _syncs,
        "host_syncs": _host_syncs,
        "schedules": _schedules,
        "candidates": _candidates,
        "measurements": _measurements,
        "samples": _samples,
        "peers": _peers,
        "overhead": _overhead,
        "modules": _modules,
        "phases": _phases,
        "split": _split,
        "advice": _advice,
    }
)
