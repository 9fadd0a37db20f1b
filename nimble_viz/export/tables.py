"""Turn a report into tables: pandas data frames, or CSV with the standard library alone.

Times are nanoseconds, sizes bytes. A cell that holds several values separates them by spaces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_core.ir.candidates import Candidate, EqualityCheck
from nimble_core.ir.costs import Kernel
from nimble_core.ir.measurement import Measurement, Ratio
from nimble_core.ir.occupancy import Launch
from nimble_core.ir.program import Call
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Span, Timeline
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.analysis.advice import Change, advice
from nimble_viz.analysis.dag_layout import components
from nimble_viz.analysis.gaps import Gap, replay_gaps
from nimble_viz.analysis.labels import label_call, label_run, source_of
from nimble_viz.analysis.overhead import grouped
from nimble_viz.analysis.timeline import distortion
from nimble_viz.analysis.work import CallWork, call_work, launches
from nimble_viz.report.data import CallOverhead, HostSync, PeerResult, PhaseOverhead, ReportData

if TYPE_CHECKING:
    import pandas

__all__ = [
    "KINDS", "Table", "make_table", "no_formula", "to_csv", "to_dataframe", "write_table",
    "write_tables",
]  # fmt: skip

Cell = str | int | float | bool | None
_CellType = type[str] | type[int] | type[float] | type[bool]
_TYPES: dict[str, _CellType] = {"int": int, "float": float, "bool": bool}
Table = dict[str, tuple[_CellType, Sequence[Cell]]]
"""Type and cells of each column, by its name; None is a missing value."""


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
    return pandas.DataFrame(
        {name: pandas.Series(cells, dtype=_dtype(of, cells)) for name, (of, cells) in table.items()}
    )


def to_csv(table: Table) -> str:
    """Write the table as CSV with a header (RFC 4180: lines end in CR LF).

    Floats read back exactly. A missing value is an empty cell. Text passes through ``no_formula``.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(table)
    writer.writerows(map(no_formula, row) for row in zip(*(cells for _, cells in table.values()), strict=True))
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


def _dtype(of: _CellType, cells: Sequence[Cell]) -> str:
    if of in (int, bool) and None in cells:
        return "Int64" if of is int else "boolean"
    return {int: "int64", float: "float64", bool: "bool", str: "object"}[of]


def _join(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _told(of: type, rows: Iterable[object], *names: str) -> Table:
    """Return these attributes of ``rows`` as columns of the types that their class ``of`` declares; None has none."""
    declared = dict(of.__annotations__)
    declared |= {
        name: one.fget.__annotations__["return"] for name, one in vars(of).items() if isinstance(one, property)
    }
    types: dict[str, _CellType] = {name: _TYPES.get(declared[name].removesuffix(" | None"), str) for name in names}
    rows = list(rows)
    return {name: (kind, [getattr(row, name, None) for row in rows]) for name, kind in types.items()}


# One function for each table.


def _calls(report: ReportData) -> Table:
    calls, costs = report.program.calls, report.costs
    chosen, critical = report.schedule(report.chosen), frozenset(report.critical_path)
    work = _told(
        CallWork,
        call_work(report),
        *("flops", "bytes_read", "bytes_written", "gflops", "gbytes", "fill", "waves", "occupancy"),
    )
    work["demand"] = work.pop("fill")
    return {
        "call": (int, [call.index for call in calls]),
        **_told(Call, calls, "operator"),
        "label": (str, [label_call(call) for call in calls]),
        **_told(Call, calls, "phase", "module"),
        "source": (str, [source_of(call) for call in calls]),
        "origins": (int, [len(call.origins) for call in calls]),
        "eager_calls": (str, [_join(call.eager) for call in calls]),
        "cost_ns": (float, costs.ns),
        "cost_spread_ns": (float, costs.spread_ns or [None] * len(calls)),
        **work,
        "critical": (bool, [call.index in critical for call in calls]),
        "stream": (int, chosen.stream if chosen else [None] * len(calls)),
    }


def _kernels(report: ReportData) -> Table:
    kernels = report.costs.kernels
    launched = _told(Launch, launches(report), "blocks", "resident", "waves", "occupancy")
    launched["blocks_resident"] = launched.pop("resident")
    return {
        **_told(Kernel, kernels, "call"),
        "kernel": (str, [one.name for one in kernels]),
        "grid": (str, [_join(one.grid) for one in kernels]),
        "block": (str, [_join(one.block) for one in kernels]),
        **_told(Kernel, kernels, "registers", "shared_bytes", "node", "duration_ns"),
        **launched,
    }


def _spans(report: ReportData) -> Table:
    rows = [(line, at, span) for line in report.timelines for at, span in enumerate(line.spans)]
    lines, lanes = [line for line, _, _ in rows], [line.lanes[span.lane] for line, _, span in rows]
    return {
        **_told(Timeline, lines, "run"),
        "lane": (str, [lane.name for lane in lanes]),
        "lane_kind": (str, [lane.kind for lane in lanes]),
        **_told(Span, (span for _, _, span in rows), "start_ns", "end_ns", "call", "name"),
        "device_stream": (int, [line.streams[at] if line.streams else None for line, at, _ in rows]),
        **_told(Timeline, lines, "source", "reliable"),
        "profiled_over_unprofiled": (float, [distortion(line) or None for line in lines]),
    }


def _gaps(report: ReportData) -> Table:
    rows = [(line, gap) for line in report.timelines for gap in replay_gaps(report, line)]
    names = ("call", "awaited", "start_ns", "end_ns", "launch_ns", "wait_ns", "unready_ns")
    return {
        "run": (str, [line.run for line, _ in rows]),
        "lane": (str, [line.lanes[gap.lane].name for line, gap in rows]),
        **_told(Gap, (gap for _, gap in rows), *names),
    }


def _syncs(report: ReportData) -> Table:
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


def _host_syncs(report: ReportData) -> Table:
    rows = report.overhead.host_syncs if report.overhead else ()
    return _told(HostSync, rows, "kind", "count", "total_ns", "source", "phase")


def _schedules(report: ReportData) -> Table:
    plans = report.schedules
    return {
        "schedule": (str, [plan.policy for plan in plans]),
        "chosen": (bool, [plan.policy == report.chosen for plan in plans]),
        **_told(Schedule, plans, "streams"),
        **_told(SyncCounts, (plan.counts for plan in plans), *SyncCounts.__annotations__),
        "added_order": (int, [len(plan.added_order) for plan in plans]),
        **_told(Schedule, plans, "maximum_concurrency", "minimum_syncs"),
    }


def _candidates(report: ReportData) -> Table:
    rows = report.candidates
    return {
        "candidate": (str, [one.name for one in rows]),
        "kernels": (str, [one.fuse for one in rows]),
        **_told(Candidate, rows, "streams", "syncs"),
        "simulated_ns": (float, [one.simulated_ns or None for one in rows]),
        **_told(Measurement, (one.measurement for one in rows), "median_ns", "spread"),
        **_told(EqualityCheck, (one.check for one in rows), "passed", "error", "tolerance"),
        "nbytes": (int, [one.nbytes or None for one in rows]),
        **_told(Candidate, rows, "capture_s", "fuse_s", "chosen", "note"),
    }


def _measurements(report: ReportData) -> Table:
    rows = report.measurements
    ratios = [report.ratio(taken.name) for taken in rows]
    over = _told(Ratio, ratios, "value", "low", "high")
    return {
        "run": (str, [taken.name for taken in rows]),
        "label": (str, [label_run(report, taken.name) for taken in rows]),
        **_told(Measurement, rows, "median_ns", "spread", "drift"),
        "samples": (int, [len(taken.samples_ns) for taken in rows]),
        **_told(Measurement, rows, "warmup"),
        "over_eager": over["value"],
        "over_eager_low": over["low"],
        "over_eager_high": over["high"],
        "verdict": (str, [ratio.verdict if ratio else "" for ratio in ratios]),
        **_told(Measurement, rows, "dropped", "stable"),
        "warnings": (str, ["; ".join(taken.warnings) for taken in rows]),
    }


def _samples(report: ReportData) -> Table:
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


def _peers(report: ReportData) -> Table:
    rows = report.peers
    return {
        "peer": (str, [peer.name for peer in rows]),
        **_told(Measurement, (report.measurement(peer.name) for peer in rows), "median_ns"),
        **_told(PeerResult, rows, "prepare_s"),
        **_told(EqualityCheck, (peer.check for peer in rows), "passed", "error", "tolerance"),
        **_told(PeerResult, rows, "note"),
    }


_PARTS = ("python_ns", "dispatch_ns", "allocation_ns", "launch_ns", "tail_ns", "work_ns", "exposed_ns")


def _overhead(report: ReportData) -> Table:
    rows = report.overhead.calls if report.overhead else ()
    calls = [report.eager_calls[row.call] for row in rows]
    return {
        **_told(CallOverhead, rows, "call"),
        **_told(Call, calls, "operator", "phase", "module"),
        "source": (str, [source_of(call) for call in calls]),
        **_told(CallOverhead, rows, *_PARTS),
    }


def _modules(report: ReportData) -> Table:
    parts = [part.removesuffix("_ns") for part in ("overhead_ns", *_PARTS)]
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for inner in grouped(report, "module"):
        steps = components(inner["name"])
        for depth in range(len(steps)):
            row = rows.setdefault(steps[: depth + 1], dict.fromkeys(("calls", *parts), 0.0))
            for key in row:
                row[key] += inner[key]
    outer_first = sorted(rows)
    return {
        "module": (str, [".".join(steps) for steps in outer_first]),
        "depth": (int, [len(steps) - 1 for steps in outer_first]),
        "calls": (int, [int(rows[steps]["calls"]) for steps in outer_first]),
        **{f"{part}_ns": (float, [rows[steps][part] for steps in outer_first]) for part in parts},
    }


def _phases(report: ReportData) -> Table:
    return _told(PhaseOverhead, report.overhead.phases if report.overhead else (), "phase", "host_ns", *_PARTS)


def _split(report: ReportData) -> Table:
    found = advice(report)
    rows = [(split, name, ns) for split in (found.replay,) if split for name, ns, _ in split.rows]
    return {
        "run": (str, [split.run for split, _, _ in rows]),
        "part": (str, [name for _, name, _ in rows]),
        "ns": (float, [ns for _, _, ns in rows]),
        "share": (float, [ns / split.total_ns if split.total_ns else 0.0 for split, _, ns in rows]),
    }


def _advice(report: ReportData) -> Table:
    rows = advice(report).changes
    named: Table = {"change": (str, [one.what for one in rows])}
    return named | _told(Change, rows, "run", "gain_ns", "of_ns", "basis", "per_sample", "why")


_MAKERS: dict[str, Callable[[ReportData], Table]] = {
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

KINDS = tuple(_MAKERS)
"""Every table, in the order in which a folder of them is written."""
