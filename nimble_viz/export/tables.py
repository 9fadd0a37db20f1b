"""Turn a report into tables: pandas data frames, or CSV with the standard library alone.

Times are nanoseconds, sizes bytes. A cell that holds several values separates them by spaces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nimble_core.ir.schedule import SyncCounts
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.dag_layout import components
from nimble_viz.analysis.gaps import replay_gaps
from nimble_viz.analysis.labels import label_call, label_run, source_of
from nimble_viz.analysis.overhead import grouped
from nimble_viz.analysis.timeline import distortion
from nimble_viz.analysis.work import call_work, launches
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    import pandas

__all__ = [
    "KINDS", "Table", "make_table", "no_formula", "to_csv", "to_dataframe", "write_table",
    "write_tables",
]  # fmt: skip

Cell = str | int | float | bool | None
Table = Mapping[str, Sequence[Cell]]
"""The cells of each column, by its name; None is a missing value."""


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
            ``"split"``: what the replay is made of; ``"advice"``: what would help next.

    Raises:
        InputError: no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"there is no table {kind!r}", fix=f"one of {', '.join(KINDS)}")
    return _MAKERS[kind](report)


def to_dataframe(report: ReportData, kind: str) -> pandas.DataFrame:
    """Make one table as a data frame, or raise InputError; integers with missing values are ``Int64``."""
    table = make_table(report, kind)
    try:
        import pandas
    except ImportError as error:
        raise InputError(
            f"a data frame needs pandas: {error}",
            fix="pip install 'nimble-viz[export]', or export to a folder of CSV files, which needs no package",
        ) from error
    return pandas.DataFrame({name: pandas.Series(cells, dtype=_dtype(cells)) for name, cells in table.items()})


def to_csv(table: Table) -> str:
    """Write the table as CSV with a header (RFC 4180: lines end in CR LF).

    Floats read back exactly. A missing value is an empty cell. Text passes through ``no_formula``.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(table)
    writer.writerows(map(no_formula, row) for row in zip(*table.values(), strict=True))
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


def _dtype(cells: Sequence[Cell]) -> str:
    of = next((type(cell) for cell in cells if cell is not None), float)
    if of in (int, bool) and None in cells:
        return "Int64" if of is int else "boolean"
    return {int: "int64", float: "float64", bool: "bool"}.get(of, "object")


def _join(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _picked(rows: Iterable[object], *columns: str) -> Table:
    """Return attributes of ``rows`` as columns, ``"name"`` or ``"name=attribute.of.attribute"``; None has none."""

    def cell(row: Any, path: str) -> Cell:
        for step in path.split("."):
            row = getattr(row, step, None)
        return cast(Cell, row)

    rows, pairs = list(rows), [column.partition("=") for column in columns]
    return {name: [cell(row, path or name) for row in rows] for name, _, path in pairs}


# One function for each table.


def _calls(report: ReportData) -> Table:
    calls, costs = report.program.calls, report.costs
    chosen, critical = report.schedule(report.chosen), frozenset(report.critical_path)
    rates = ("flops", "bytes_read", "bytes_written", "gflops", "gbytes", "demand=fill", "waves", "occupancy")
    return {
        **_picked(calls, "call=index", "operator"),
        "label": [label_call(call) for call in calls],
        **_picked(calls, "phase", "module"),
        "source": [source_of(call) for call in calls],
        "origins": [len(call.origins) for call in calls],
        "eager_calls": [_join(call.eager) for call in calls],
        "cost_ns": costs.ns,
        "cost_spread_ns": costs.spread_ns or [None] * len(calls),
        **_picked(call_work(report), *rates),
        "critical": [call.index in critical for call in calls],
        "stream": chosen.stream if chosen else [None] * len(calls),
    }


def _kernels(report: ReportData) -> Table:
    kernels = report.costs.kernels
    return {
        **_picked(kernels, "call", "kernel=name"),
        "grid": [_join(one.grid) for one in kernels],
        "block": [_join(one.block) for one in kernels],
        **_picked(kernels, "registers", "shared_bytes", "node", "duration_ns"),
        **_picked(launches(report), "blocks", "waves", "occupancy", "blocks_resident=resident"),
    }


def _spans(report: ReportData) -> Table:
    rows = [(line, at, span) for line in report.timelines for at, span in enumerate(line.spans)]
    lines = [line for line, _, _ in rows]
    return {
        **_picked(lines, "run"),
        **_picked((line.lanes[span.lane] for line, _, span in rows), "lane=name", "lane_kind=kind"),
        **_picked((span for _, _, span in rows), "start_ns", "end_ns", "call", "name"),
        "device_stream": [line.streams[at] if line.streams else None for line, at, _ in rows],
        **_picked(lines, "source", "reliable"),
        "profiled_over_unprofiled": [distortion(line) or None for line in lines],
    }


def _gaps(report: ReportData) -> Table:
    rows = [(line, gap) for line in report.timelines for gap in replay_gaps(report, line)]
    names = ("call", "awaited", "start_ns", "end_ns", "launch_ns", "wait_ns", "unready_ns")
    return {
        "run": [line.run for line, _ in rows],
        "lane": [line.lanes[gap.lane].name for line, gap in rows],
        **_picked((gap for _, gap in rows), *names),
    }


def _syncs(report: ReportData) -> Table:
    rows = [(plan, *wait) for plan in report.schedules for wait in plan.syncs]
    hazards = dict(zip(report.graph.edges, report.graph.kinds, strict=True))
    return {
        "schedule": [plan.policy for plan, _, _ in rows],
        "producer": [producer for _, producer, _ in rows],
        "consumer": [consumer for _, _, consumer in rows],
        "producer_stream": [plan.stream[producer] for plan, producer, _ in rows],
        "consumer_stream": [plan.stream[consumer] for plan, _, consumer in rows],
        "hazards": [hazards.get((u, v), "") for _, u, v in rows],
    }


def _schedules(report: ReportData) -> Table:
    plans = report.schedules
    return {
        **_picked(plans, "schedule=policy"),
        "chosen": [plan.policy == report.chosen for plan in plans],
        **_picked(plans, "streams", *(f"{name}=counts.{name}" for name in SyncCounts.__annotations__)),
        "added_order": [len(plan.added_order) for plan in plans],
        **_picked(plans, "maximum_concurrency", "minimum_syncs"),
    }


_CHECK = ("passed=check.passed", "error=check.error", "tolerance=check.tolerance")


def _candidates(report: ReportData) -> Table:
    rows = report.candidates
    return {
        **_picked(rows, "candidate=name", "kernels=fuse", "streams", "syncs"),
        "simulated_ns": [one.simulated_ns or None for one in rows],
        **_picked(rows, "median_ns=measurement.median_ns", "spread=measurement.spread", *_CHECK),
        "nbytes": [one.nbytes or None for one in rows],
        **_picked(rows, "capture_s", "fuse_s", "chosen", "note"),
    }


def _measurements(report: ReportData) -> Table:
    rows = report.measurements
    ratios = [report.ratio(taken.name) for taken in rows]
    return {
        **_picked(rows, "run=name"),
        "label": [label_run(report, taken.name) for taken in rows],
        **_picked(rows, "median_ns", "spread", "drift"),
        "samples": [len(taken.samples_ns) for taken in rows],
        **_picked(rows, "warmup"),
        **_picked(ratios, "over_eager=value", "over_eager_low=low", "over_eager_high=high"),
        "verdict": [ratio.verdict if ratio else "" for ratio in ratios],
        **_picked(rows, "dropped", "stable"),
        "warnings": ["; ".join(taken.warnings) for taken in rows],
    }


def _samples(report: ReportData) -> Table:
    rows = [
        (taken.name, at, ns)
        for taken in report.measurements
        for at, ns in zip(taken.rounds or range(len(taken.samples_ns)), taken.samples_ns, strict=True)
    ]
    return {name: [row[at] for row in rows] for at, name in enumerate(("run", "round", "ns"))}


def _peers(report: ReportData) -> Table:
    rows = report.peers
    return {
        **_picked(rows, "peer=name"),
        **_picked((report.measurement(peer.name) for peer in rows), "median_ns"),
        **_picked(rows, "prepare_s", *_CHECK, "note"),
    }


_PARTS = ("python_ns", "dispatch_ns", "allocation_ns", "launch_ns", "tail_ns", "work_ns", "exposed_ns")


def _overhead(report: ReportData) -> Table:
    rows = report.overhead.calls if report.overhead else ()
    calls = [report.eager_calls[row.call] for row in rows]
    return {
        **_picked(rows, "call"),
        **_picked(calls, "operator", "phase", "module"),
        "source": [source_of(call) for call in calls],
        **_picked(rows, *_PARTS),
    }


def _modules(report: ReportData) -> Table:
    parts = [part.removesuffix("_ns") for part in ("overhead_ns", *_PARTS)]
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for inner in grouped(report, "module"):
        steps = components(inner["name"])
        for depth in range(len(steps)):
            row = rows.setdefault(steps[: depth + 1], {"calls": 0, **dict.fromkeys(parts, 0.0)})
            for key in row:
                row[key] += inner[key]
    outer_first = sorted(rows)
    return {
        "module": [".".join(steps) for steps in outer_first],
        "depth": [len(steps) - 1 for steps in outer_first],
        "calls": [rows[steps]["calls"] for steps in outer_first],
        **{f"{part}_ns": [rows[steps][part] for steps in outer_first] for part in parts},
    }


def _split(report: ReportData) -> Table:
    split = advice(report).replay
    total = sum(ns for _, ns, _ in split.rows) if split else 0.0
    rows = [(split.run, name, ns, ns / total if total else 0.0) for name, ns, _ in split.rows] if split else []
    return {name: [row[at] for row in rows] for at, name in enumerate(("run", "part", "ns", "share"))}


_WAIT = ("kind", "count", "total_ns", "source", "phase")
_CHANGE = ("change=what", "run", "gain_ns", "of_ns", "basis", "per_sample", "why")

_MAKERS: dict[str, Callable[[ReportData], Table]] = {
    "calls": _calls,
    "kernels": _kernels,
    "spans": _spans,
    "gaps": _gaps,
    "syncs": _syncs,
    "host_syncs": lambda report: _picked(report.overhead.host_syncs if report.overhead else (), *_WAIT),
    "schedules": _schedules,
    "candidates": _candidates,
    "measurements": _measurements,
    "samples": _samples,
    "peers": _peers,
    "overhead": _overhead,
    "modules": _modules,
    "phases": lambda report: _picked(report.overhead.phases if report.overhead else (), "phase", "host_ns", *_PARTS),
    "split": _split,
    "advice": lambda report: _picked(advice(report).changes, *_CHANGE),
}

KINDS = tuple(_MAKERS)
"""Every table, in the order in which a folder of them is written."""
