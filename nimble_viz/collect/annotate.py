"""``annotate``: join what Nsight Systems saw of a report's replays to the report's calls."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling.kernel_matching import replay_timeline
from nimble_core.profiling.kernel_names import short_kernel_name
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_core.utils.units import format_count, format_ns
from nimble_viz.analysis.labels import plural, visible
from nimble_viz.collect.match_replays import Joined, Way, expected, join
from nimble_viz.export.tables import no_formula
from nimble_viz.render.report import Report, load
from nimble_viz.report.data import ReportData
from nimble_viz.traces.nsight import Export, read_export

__all__ = ["COLUMNS", "Annotation", "annotate"]

CLOCK = "Nsight Systems, GPU clock"

COLUMNS = (
    "globalPid",
    "correlationId",
    "graphNodeId",
    "start",
    "end",
    "streamId",
    "kernel",
    "replay",
    "call",
    "operator",
    "module",
    "phase",
    "stream",
)
"""Columns of ``Annotation.rows``. The first six have the names of the export, and join to its tables."""

_HOW: dict[Way, str] = {
    "capture ranges": "by the NVTX ranges in which the graph's nodes were captured",
    "graph node ids": "by graph node id and kernel name",
}
_LISTED = 8

Row = tuple[int, int, int, int, int, int, str, int, int | None, str, str, str, int | None]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A report with a replay as Nsight Systems saw it.

    Args:
        report: the report, with the export's timeline of ``run``.
        run: the plan whose replays were looked for.
        source: name of the export.
        joined: the plan's graph in the export, node by node.
        notes: what the reader should know.
    """

    report: Report
    run: str
    source: str
    joined: Joined
    notes: tuple[str, ...]

    @property
    def check(self) -> SelfCheck:
        """Nodes expected and nodes seen."""
        return self.joined.told.check

    @property
    def exit_code(self) -> int:
        """0 if every expected node was seen in every replay, and no other; else 1."""
        return 0 if self.check.passed else 1

    def rows(self) -> Iterator[Row]:
        """Yield every kernel, copy and fill of every whole replay, in ``COLUMNS``; times in nanoseconds.

        ``replay`` counts from 0. ``call``, ``operator``, ``module``, ``phase`` and ``stream`` (the planned one) are the
        report's, None or empty where no call explains the row.
        """
        calls, schedule = self.report.program.calls, _schedule(self.report, self.run)
        for number, replay in enumerate(self.joined.replays):
            for node, ran in zip(replay.nodes, replay.activities, strict=True):
                index = self.joined.call(node)
                name = short_kernel_name(ran.name)
                seen = (replay.process, replay.launch, node, ran.start_ns, ran.end_ns, ran.stream, name, number)
                if index is None:
                    yield (*seen, None, "", "", "", None)
                else:
                    call = calls[index]
                    yield (*seen, index, call.operator, call.module, call.phase, schedule.stream[index])

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write ``rows`` to ``path``. Raises OSError if it cannot be written."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        writer.writerows(map(no_formula, row) for row in self.rows())
        return write_file(path, out.getvalue().encode())

    def to_text(self) -> str:
        """Say what matched, and what did not, as lines of text."""
        joined, check = self.joined, self.check
        line = self.report.timeline(self.run)
        lines = [
            f"{self.source}: {plural(len(joined.replays), 'replay')} of {self.run!r}, calls told {_HOW[joined.way]}",
            f"  {format_count(check.seen)} of {plural(check.expected, 'node')} seen in every replay"
            + (f"; the median replay took {format_ns(line.length_ns)}" if line else ""),
        ]
        lines += [f"  {note}" for note in self.notes]
        lines.append(
            "  every node matched" if check.passed else "  NOT every node matched: this timeline is unreliable"
        )
        return "\n".join(map(visible, lines)) + "\n"

    def __repr__(self) -> str:
        return f"<Annotation of {self.run!r}: {self.check.seen} of {self.check.expected} nodes>"


def annotate(export: str | os.PathLike[str], report: Report | str | os.PathLike[str], run: str = "") -> Annotation:
    """Join an Nsight Systems profile to the calls of ``report``, by graph node id.

    The profile is of the report's model, in any process, taken with ``--cuda-graph-trace=node`` (and ``nvtx`` in
    ``--trace``, so that the profile itself tells the nodes), exported by ``nsys export --type sqlite``. Needs neither
    torch nor a GPU. The file is only read.

    Args:
        export: the SQLite file.
        report: of the model, or a report's file.
        run: name of the plan whose replays are looked for; empty for the chosen one.

    Raises:
        InputError: no such plan in the report, or no graph in the profile is that plan's.
        ReportFileError: no export of Nsight Systems, damaged, or taken without graph nodes.
        OSError: a file cannot be read.
    """
    if not isinstance(report, ReportData):
        report = load(report)
    schedule = _schedule(report, run or report.chosen)
    line = report.timeline(schedule.policy)
    seen = read_export(export)
    joined = join(seen, expected(report.program, schedule, line))
    source = Path(export).name
    notes = _notes(report, seen, joined)
    known = report.measurement(schedule.policy)
    found = replay_timeline(
        joined.told,
        joined.raw,
        schedule,
        len(joined.replays),
        clock=CLOCK,
        unprofiled_ns=known.median_ns if known and not _elsewhere(report, seen) else 0.0,
        note="; ".join((f"from {source}, {plural(len(joined.replays), 'replay')}, {_HOW[joined.way]}", *notes)),
    )
    at = next((at for at, one in enumerate(report.timelines) if one.run == found.run), len(report.timelines))
    lines = (*report.timelines[:at], found, *report.timelines[at + 1 :])
    return Annotation(replace(report, timelines=lines), schedule.policy, source, joined, notes)


def _schedule(report: Report, run: str) -> Schedule:
    schedule = report.schedule(run)
    if schedule is None:
        plans = ", ".join(repr(one.policy) for one in report.schedules)
        what = f"the report has no plan {run!r}" if run else "no plan was chosen in the report"
        raise InputError(what, fix=f"name one of {plans}" if plans else "take a report of compare()")
    return schedule


def _elsewhere(report: Report, seen: Export) -> bool:
    """Say whether the profile is of another GPU than the report."""
    here = report.environment.device_name
    return bool(seen.gpu and here and seen.gpu != here)


def _notes(report: Report, seen: Export, joined: Joined) -> tuple[str, ...]:
    """Say what did not match, with counts and names, and what else to doubt."""
    notes = []
    if joined.missing:
        notes.append(f"kernels of the report's replay that this one does not run: {_listed(joined.missing)}")
    if joined.strangers:
        notes.append(f"in each replay, of no call: {_listed(joined.strangers)}")
    if joined.partial:
        notes.append(f"left out: {plural(joined.partial, 'replay')} that the profile holds in part")
    if joined.rivals:
        notes.append(
            f"{plural(joined.rivals, 'other graph')} in the profile would fit as well: this one was launched most"
        )
    if _elsewhere(report, seen):
        notes.append(f"profiled on {seen.gpu}, the report is of {report.environment.device_name}")
    return tuple(notes)


def _listed(counts: tuple[tuple[str, int], ...]) -> str:
    named = ", ".join(f"{format_count(count)} x {name}" for name, count in counts[:_LISTED])
    more = sum(count for _, count in counts[_LISTED:])
    return f"{named} and {format_count(more)} more" if more else named
