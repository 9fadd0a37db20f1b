"""Turn a report into tables: pandas data frames, or CSV with the standard library alone.

Times are nanoseconds, sizes bytes. A cell that holds several values separates them by spaces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.schedule import SyncCounts
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.gaps import replay_gaps
from nimble_viz.analysis.labels import label_call, label_run, source_of
from nimble_viz.analysis.overhead import module_tree
from nimble_viz.analysis.timeline import distortion
from nimble_viz.analysis.work import call_work, launches
from nimble_viz.report.data import CallOverhead, PhaseOverhead, ReportData

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
_CellType = type[str] | type[int] | type[float] | type[bool]
_Columns = dict[str, tuple[_CellType, Sequence[Cell]]]
"""Type and cells of each column, by its name."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``None`` is a missing value."""

    name: str
    type: _CellType
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
    """Make one table of the report; it has no rows where the report holds no such data.

    Args:
        report: the source.
        kind: ``"calls"``: calls of the program, their cost and place in the chosen schedule. ``"kernels"``: nodes of
            the captured one-stream graph. ``"spans"``: all timelines, with what to doubt of each.
            ``"gaps"``: where a replay's streams idled, and why. ``"syncs"``: waits of each schedule.
            ``"host_syncs"``: where eager made the host wait. ``"schedules"``: each plan's promises and counts.
            ``"candidates"``: plans that were tried. ``"measurements"``: wall times; ``"samples"``: each sample of
            them. ``"peers"``: other ways to run the model. ``"overhead"``: eager's host time by eager call;
            ``"modules"``: by module, each with everything in it; ``"phases"``: by phase of a training step.
            ``"split"``: what the replay and the eager run are made of; ``"advice"``: what would help next.

    Raises:
        InputError: no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"there is no table {kind!r}", fix=f"one of {', '.join(KINDS)}")
    columns = _MAKERS[kind](report)
    return Table(kind, tuple(Column(name, of, tuple(cells)) for name, (of, cells) in columns.items()))


def to_dataframe(report: ReportData, kind: str) -> pandas.DataFrame:
    """Make one table as a data frame; integers with missing values are ``Int64``, flags ``boolean``.

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
    """Write the table as CSV with a header (RFC 4180: lines end in CR LF).

    Floats read back exactly. A missing value is an empty cell. Text passes through ``no_formula``.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([column.name for column in table.columns])
    writer.writerows(map(no_formula, row) for row in table.rows)
    return out.getvalue()


def no_formula(cell: Cell) -> Cell:
    """Put an apostrophe before text that a spreadsheet would take for a formula; numbers stay as they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def write_tables(report: ReportData, folder: Path) -> Path:
    """Write every table as ``folder/KIND.csv`` and return ``folder``; raise OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        write_table(report, kind, folder / f"{kind}.csv")
    return folder


def write_table(report: ReportData, kind: str, path: Path) -> Path:
    """Write one table to ``path``; raise OSError if that fails, InputError if there is no such kind."""
    text = to_csv(make_table(report, kind))
    return write_file(path, text.encode(errors="backslashreplace"))


def _dtype(column: Column) -> str:
    if column.type in (int, bool) and None in column.cells:
        return "Int64" if column.type is int else "boolean"
    return {int: "int64", float: "float64", bool: "bool", str: "object"}[column.type]


def _join(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


# One function for each table.


def _calls(report: ReportData) -> _Columns:
    calls, work, costs = report.program.calls, call_work(report), report.costs
    chosen, critical = report.schedule(report.chosen), frozenset(report.critical_path)
    return {
        "call": (int, [call.index for call in calls]),
        "operator": (str, [call.operator for call in calls]),
        "label": (str, [label_call(call) for call in calls]),
        "phase": (str, [call.phase for call in calls]),
        "module": (str, [call.module for call in calls]),
        "source": (str, [source_of(call) for call in calls]),
        "origins": (int, [len(call.origins) for call in calls]),
        "eager_calls": (str, [_join(call.eager) for call in calls]),
        "flops": (int, [done.flops for done in work]),
        "bytes_read": (int, [done.bytes_read for done in work]),
        "bytes_written": (int, [done.bytes_written for done in work]),
        "cost_ns": (float, costs.ns),
        "cost_spread_ns": (float, costs.spread_ns or [None] * len(calls)),
        "gflops": (float, [done.gflops for done in work]),
        "gbytes": (float, [done.gbytes for done in work]),
        "demand": (float, [done.fill for done in work]),
        "waves": (float, [done.waves for done in work]),
        "occupancy": (float, [done.occupancy for done in work]),
        "critical": (bool, [call.index in critical for call in calls]),
        "stream": (int, chosen.stream if chosen else [None] * len(calls)),
    }


def _kernels(report: ReportData) -> _Columns:
    kernels, placed = report.costs.kernels, launches(report)
    return {
        "call": (int, [one.call for one in kernels]),
        "kernel": (str, [one.name for one in kernels]),
        "grid": (str, [_join(one.grid) for one in kernels]),
        "block": (str, [_join(one.block) for one in kernels]),
        "registers": (int, [one.registers for one in kernels]),
        "shared_bytes": (int, [one.shared_bytes for one in kernels]),
        "node": (int, [one.node for one in kernels]),
        "duration_ns": (float, [one.duration_ns for one in kernels]),
        "blocks": (int, [one.blocks if one else None for one in placed]),
        "blocks_resident": (int, [one.resident if one else None for one in placed]),
        "waves": (float, [one.waves if one else None for one in placed]),
        "occupancy": (float, [one.occupancy if one else None for one in placed]),
    }


def _spans(report: ReportData) -> _Columns:
    rows = [(line, at, span) for line in report.timelines for at, span in enumerate(line.spans)]
    slowdowns = [factor for line in report.timelines for factor in [distortion(line) or None] * len(line.spans)]
    return {
        "run": (str, [line.run for line, _, _ in rows]),
        "lane": (str, [line.lanes[span.lane].name for line, _, span in rows]),
        "lane_kind": (str, [line.lanes[span.lane].kind for line, _, span in rows]),
        "start_ns": (float, [span.start_ns for _, _, span in rows]),
        "end_ns": (float, [span.end_ns for _, _, span in rows]),
        "call": (int, [span.call for _, _, span in rows]),
        "name": (str, [span.name for _, _, span in rows]),
        "device_stream": (int, [line.streams[at] if line.streams else None for line, at, _ in rows]),
        "source": (str, [line.source for line, _, _ in rows]),
        "reliable": (bool, [line.reliable for line, _, _ in rows]),
        "profiled_over_unprofiled": (float, slowdowns),
    }


def _gaps(report: ReportData) -> _Columns:
    rows = [(line, gap) for line in report.timelines for gap in replay_gaps(report, line)]
    return {
        "run": (str, [line.run for line, _ in rows]),
        "lane": (str, [line.lanes[gap.lane].name for line, gap in rows]),
        "call": (int, [gap.call for _, gap in rows]),
        "awaited": (int, [gap.awaited for _, gap in rows]),
        "start_ns": (float, [gap.start_ns for _, gap in rows]),
        "end_ns": (float, [gap.end_ns for _, gap in rows]),
        "launch_ns": (float, [gap.launch_ns for _, gap in rows]),
        "wait_ns": (float, [gap.wait_ns for _, gap in rows]),
        "unready_ns": (float, [gap.unready_ns for _, gap in rows]),
    }


def _syncs(report: ReportData) -> _Columns:
    rows = [(plan, *wait) for plan in report.schedules for wait in plan.syncs]
    hazards = dict(zip(report.graph.edges, report.graph.kinds, strict=True))
    return {
        "schedule": (str, [plan.policy for plan, _, _ in rows]),
        "producer": (int, [producer for _, producer, _ in rows]),
        "consumer": (int, [consumer for _, _, consumer in rows]),
        "producer_stream": (int, [plan.stream[producer] for plan, producer, _ in rows]),
        "consumer_stream": (int, [plan.stream[consumer] for plan, _, consumer in rows]),
        "hazards": (str, [hazards.get((u, v), "") for _, u, v in rows]),
    }


def _host_syncs(report: ReportData) -> _Columns:
    rows = report.overhead.host_syncs if report.overhead else ()
    return {
        "kind": (str, [one.kind for one in rows]),
        "count": (int, [one.count for one in rows]),
        "total_ns": (float, [one.total_ns for one in rows]),
        "source": (str, [one.source for one in rows]),
        "phase": (str, [one.phase for one in rows]),
    }


def _schedules(report: ReportData) -> _Columns:
    plans = report.schedules
    return {
        "schedule": (str, [plan.policy for plan in plans]),
        "chosen": (bool, [plan.policy == report.chosen for plan in plans]),
        "streams": (int, [plan.streams for plan in plans]),
        **{one.name: (int, [getattr(plan.counts, one.name) for plan in plans]) for one in fields(SyncCounts)},
        "added_order": (int, [len(plan.added_order) for plan in plans]),
        "maximum_concurrency": (bool, [plan.maximum_concurrency for plan in plans]),
        "minimum_syncs": (bool, [plan.minimum_syncs for plan in plans]),
    }


def _check_columns(checks: Sequence[EqualityCheck | None]) -> _Columns:
    return {
        "passed": (bool, [one.passed if one else None for one in checks]),
        "error": (float, [one.error if one else None for one in checks]),
        "tolerance": (float, [one.tolerance if one else None for one in checks]),
    }


def _candidates(report: ReportData) -> _Columns:
    rows = report.candidates
    return {
        "candidate": (str, [one.name for one in rows]),
        "kernels": (str, [one.fuse for one in rows]),
        "streams": (int, [one.streams for one in rows]),
        "syncs": (int, [one.syncs for one in rows]),
        "simulated_ns": (float, [one.simulated_ns or None for one in rows]),
        "median_ns": (float, [one.measurement.median_ns if one.measurement else None for one in rows]),
        "spread": (float, [one.measurement.spread if one.measurement else None for one in rows]),
        **_check_columns([one.check for one in rows]),
        "nbytes": (int, [one.nbytes or None for one in rows]),
        "capture_s": (float, [one.capture_s for one in rows]),
        "fuse_s": (float, [one.fuse_s for one in rows]),
        "chosen": (bool, [one.chosen for one in rows]),
        "note": (str, [one.note for one in rows]),
    }


def _measurements(report: ReportData) -> _Columns:
    rows = report.measurements
    ratios = [report.ratio(taken.name) for taken in rows]
    return {
        "run": (str, [taken.name for taken in rows]),
        "label": (str, [label_run(report, taken.name) for taken in rows]),
        "median_ns": (float, [taken.median_ns for taken in rows]),
        "spread": (float, [taken.spread for taken in rows]),
        "drift": (float, [taken.drift for taken in rows]),
        "samples": (int, [len(taken.samples_ns) for taken in rows]),
        "warmup": (int, [taken.warmup for taken in rows]),
        "over_eager": (float, [ratio.value if ratio else None for ratio in ratios]),
        "over_eager_low": (float, [ratio.low if ratio else None for ratio in ratios]),
        "over_eager_high": (float, [ratio.high if ratio else None for ratio in ratios]),
        "verdict": (str, [ratio.verdict if ratio else "" for ratio in ratios]),
        "dropped": (int, [taken.dropped for taken in rows]),
        "stable": (bool, [taken.stable for taken in rows]),
        "warnings": (str, ["; ".join(taken.warnings) for taken in rows]),
    }


def _samples(report: ReportData) -> _Columns:
    rows = [
        (taken.name, at, ns)
        for taken in report.measurements
        for at, ns in zip(taken.rounds or range(len(taken.samples_ns)), taken.samples_ns, strict=True)
    ]
    return {
        "run": (str, [name for name, _, _ in rows]),
        "round": (int, [at for _, at, _ in rows]),
        "ns": (float, [ns for _, _, ns in rows]),
    }


def _peers(report: ReportData) -> _Columns:
    medians = {taken.name: taken.median_ns for taken in report.measurements}
    return {
        "peer": (str, [peer.name for peer in report.peers]),
        "median_ns": (float, [medians.get(peer.name) for peer in report.peers]),
        "prepare_s": (float, [peer.prepare_s for peer in report.peers]),
        **_check_columns([peer.check for peer in report.peers]),
        "note": (str, [peer.note for peer in report.peers]),
    }


_PARTS = ("python_ns", "dispatch_ns", "allocation_ns", "launch_ns", "tail_ns", "work_ns", "exposed_ns")


def _part_columns(rows: Sequence[CallOverhead | PhaseOverhead]) -> _Columns:
    return {part: (float, [getattr(row, part) for row in rows]) for part in _PARTS}


def _overhead(report: ReportData) -> _Columns:
    rows = report.overhead.calls if report.overhead else ()
    calls = [report.eager_calls[row.call] for row in rows]
    return {
        "call": (int, [row.call for row in rows]),
        "operator": (str, [call.operator for call in calls]),
        "phase": (str, [call.phase for call in calls]),
        "module": (str, [call.module for call in calls]),
        "source": (str, [source_of(call) for call in calls]),
        **_part_columns(rows),
    }


def _modules(report: ReportData) -> _Columns:
    rows = [row for root in module_tree(report) for row in root if not row.own]
    return {
        "module": (str, [row.path for row in rows]),
        "depth": (int, [row.depth for row in rows]),
        "calls": (int, [len(row.eager) for row in rows]),
        **{part: (float, [row.sums[part.removesuffix("_ns")] for row in rows]) for part in ("overhead_ns", *_PARTS)},
    }


def _phases(report: ReportData) -> _Columns:
    rows = report.overhead.phases if report.overhead else ()
    return {
        "phase": (str, [row.phase for row in rows]),
        "host_ns": (float, [row.host_ns for row in rows]),
        **_part_columns(rows),
    }


def _split(report: ReportData) -> _Columns:
    found = advice(report)
    rows = [(split.run, part) for split in (found.eager, found.replay) if split for part in split.rows]
    return {
        "run": (str, [run for run, _ in rows]),
        "part": (str, [part.name for _, part in rows]),
        "ns": (float, [part.ns for _, part in rows]),
        "share": (float, [part.share for _, part in rows]),
    }


def _advice(report: ReportData) -> _Columns:
    rows = advice(report).changes
    return {
        "change": (str, [one.what for one in rows]),
        "run": (str, [one.run for one in rows]),
        "gain_ns": (float, [one.gain_ns for one in rows]),
        "of_ns": (float, [one.of_ns for one in rows]),
        "basis": (str, [one.basis for one in rows]),
        "per_sample": (bool, [one.per_sample for one in rows]),
        "why": (str, [one.why for one in rows]),
    }


_MAKERS: dict[Kind, Callable[[ReportData], _Columns]] = {
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
