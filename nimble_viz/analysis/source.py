"""The model's code, line by line: what its calls cost in eager and in the replay, and where the host waits.

A call belongs to the line it was made on; one of the backward to the line whose forward made its node of autograd. A
replayed call of several lines is shared out among them by their own GPU time in eager.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nimble_core.ir.program import Call
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import about, doubt_of, label_run, plural, trains, visible
from nimble_viz.report.data import HostSync, ReportData, SourceLines

__all__ = ["FIGURES", "hottest", "replay_times", "source"]

FIGURES = ("host", "exposed", "device", "replay")
"""Times of a line, in the order they are shown."""

_SIDES = ("forward", "backward")
_COLUMNS = ("calls", *FIGURES)
_AFTER = "after "


def source(report: ReportData) -> dict[str, Any] | None:
    """Return functions with their text, and a row for each line with calls or waits; None without any.

    ``functions`` lists those with most eager host time first (else most replay time): ``file``, ``name``, ``group``
    (class, else file), ``first``, ``text`` (lines; empty where the report has none), ``note``. ``lines`` are columns:
    ``function`` (place in ``functions``), ``line``; for each of ``sides`` the number of ``calls``, their eager
    ``host`` time, the ``exposed`` part of its overhead, GPU time (``device``) and ``replay`` time (``"host_backward"``,
    …; forward ones without a suffix), whole nanoseconds; ``waits`` and ``wait`` (how often and how long the host waited
    for the device there in eager), ``after`` and ``after_wait`` (likewise between it and the next call). ``elsewhere``
    is one such row for all that has no line. ``totals`` add all up; ``figures`` are key, name and meaning of those that
    are known.
    """
    calls = report.eager_calls
    if not any(origin.file for call in calls for origin in call.origins[:1]):
        return None
    places = _Places(report)
    rows = _line_sums(report, places)
    sides = _SIDES if any(call.phase == "backward" for call in calls) else _SIDES[:1]
    names = [name + ("_backward" if side == "backward" else "") for side in sides for name in _COLUMNS]
    names += ["waits", "wait", "after", "after_wait"]
    elsewhere = rows.pop((-1, 0), None)
    known = _figures(report)
    heat = known[0][0] if known else "calls"

    def weight(row: Mapping[str, float]) -> float:
        return row[heat] + row[f"{heat}_backward"]

    by_function: defaultdict[int, float] = defaultdict(float)
    by_group: defaultdict[str, float] = defaultdict(float)
    for (at, _), row in rows.items():
        by_function[at] += weight(row)
        by_group[places.groups[at]] += weight(row)
    shown = sorted(by_function, key=lambda at: (-by_group[places.groups[at]], places.groups[at], -by_function[at], at))
    rank = {at: k for k, at in enumerate(shown)}
    ordered = sorted(rows, key=lambda key: (rank[key[0]], key[1]))
    everything = [*rows.values(), *([elsewhere] if elsewhere is not None else [])]
    return {
        "functions": [places.function(at) for at in shown],
        "lines": {
            "function": [rank[at] for at, _ in ordered],
            "line": [line for _, line in ordered],
            **{name: [round(rows[key][name]) for key in ordered] for name in names},
        },
        "elsewhere": {name: round(elsewhere[name]) for name in names} if elsewhere is not None else None,
        "totals": {name: round(sum(row[name] for row in everything)) for name in names},
        "sides": sides,
        "figures": known,
        "heat": heat,
        "notes": _notes(report),
    }


def hottest(found: Mapping[str, Any], figure: str, most: int) -> list[dict[str, Any]]:
    """Rank the lines of ``source`` by ``figure`` (ns), forward and backward together, with the share of all."""
    columns, functions = found["lines"], found["functions"]
    forward = columns[figure]
    backward = columns.get(f"{figure}_backward") or [0] * len(forward)
    values = [a + b for a, b in zip(forward, backward, strict=True)]
    total = sum(found["totals"].get(name, 0) for name in (figure, f"{figure}_backward"))
    ranked = sorted(range(len(values)), key=lambda k: (-values[k], columns["function"][k], columns["line"][k]))
    rows = []
    for k in ranked[:most]:
        one, line = functions[columns["function"][k]], columns["line"][k]
        at = line - one["first"]
        rows.append(
            {
                "file": one["file"],
                "line": line,
                "name": one["name"],
                "text": one["text"][at].strip() if 0 <= at < len(one["text"]) else "",
                "value": values[k],
                "share": values[k] / total if total else 0.0,
            }
        )
    return rows


def replay_times(report: ReportData) -> tuple[list[float], str] | None:
    """Return each call's ns in the chosen replay, else alone, and the source of that; None if nothing was timed."""
    line = report.timeline(report.chosen)
    if line is not None and line.reliable and line.source == "measured":
        found = [0.0] * len(report.program.calls)
        for span in line.spans:
            if span.call is not None:
                found[span.call] += span.end_ns - span.start_ns
        plan = report.schedule(report.chosen)
        beside = ", where calls run side by side" if plan and plan.streams > 1 else ""
        return found, f"time in the {label_run(report, line.run)}{beside}"
    if report.costs.source == "uniform":
        return None
    return list(report.costs.ns), "each call alone, as no replay was watched"


class _Places:
    """Which function each line belongs to: those of the report, and one without text for each other file."""

    def __init__(self, report: ReportData) -> None:
        self.pieces = list(report.sources)
        self.by_file: defaultdict[str, list[int]] = defaultdict(list)
        for at, piece in enumerate(self.pieces):
            self.by_file[piece.file].append(at)
        self.groups = [piece.name.rpartition(".")[0] or piece.file for piece in self.pieces]
        self.bare: dict[str, int] = {}
        self.without = "" if report.sources else "this report carries no code"

    def of(self, file: str, line: int) -> tuple[int, int]:
        """Return ``(function, line)``; ``(-1, 0)`` if there is no file."""
        if not file:
            return -1, 0
        for at in self.by_file.get(file, ()):
            piece = self.pieces[at]
            if piece.first <= line < piece.first + len(piece.lines):
                return at, line
        if file not in self.bare:
            notes = dict.fromkeys(self.pieces[at].note for at in self.by_file.get(file, ()))
            note = "; ".join(filter(None, notes)) or self.without or "no code of these lines"
            self.bare[file] = len(self.pieces)
            self.pieces.append(SourceLines(file, max(line, 1), "", (), note))
            self.groups.append(file)
        return self.bare[file], line

    def of_call(self, call: Call) -> tuple[int, int]:
        """Return ``(function, line)`` of the call's first origin."""
        return self.of(call.origins[0].file, call.origins[0].line) if call.origins else (-1, 0)

    def of_sync(self, sync: HostSync) -> tuple[int, int]:
        """Return the place that a host synchronisation names; an optimizer's waits have none."""
        if sync.phase == "optimizer":
            return -1, 0
        file, colon, line = sync.source.removeprefix(_AFTER).rpartition(":")
        return self.of(file, int(line)) if colon and line.isdecimal() and len(line) < 10 else (-1, 0)

    def function(self, at: int) -> dict[str, Any]:
        """Return a function as the viewer draws it."""
        piece = self.pieces[at]
        return {
            "file": piece.file,
            "name": piece.name,
            "group": self.groups[at],
            "first": piece.first,
            "text": [visible(line) for line in piece.lines],
            "note": piece.note,
        }


def _line_sums(report: ReportData, places: _Places) -> dict[tuple[int, int], dict[str, float]]:
    """Sum what the calls of each line take, by ``(function, line)``; ``(-1, 0)`` is what has no line."""
    times = _times(report)
    rows: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call in report.eager_calls:
        row = rows[places.of_call(call)]
        side = "_backward" if call.phase == "backward" else ""
        row[f"calls{side}"] += 1
        for name in FIGURES:
            row[name + side] += times[name][call.index]
    for sync in report.overhead.host_syncs if report.overhead else ():
        row, after = rows[places.of_sync(sync)], sync.source.startswith(_AFTER)
        row["after" if after else "waits"] += sync.count
        row["after_wait" if after else "wait"] += sync.total_ns
    return rows


def _times(report: ReportData) -> dict[str, list[float]]:
    """Return by figure the time of each eager call; 0 where it is not known."""
    size = len(report.eager_calls)
    found, work = {name: [0.0] * size for name in FIGURES}, [0.0] * size
    serial = report.environment.device != "cuda"
    for row in report.overhead.calls if report.overhead else ():
        work[row.call] += row.work_ns
        found["host"][row.call] += row.overhead_ns + (row.work_ns if serial else 0.0)
        found["exposed"][row.call] += row.exposed_ns
        found["device"][row.call] += 0.0 if serial else row.work_ns
    timed = replay_times(report)
    if timed is None:
        return found
    for call, ns in zip(report.program.calls, timed[0], strict=True):
        own = (call.index,) if report.eager is None else tuple(dict.fromkeys(call.eager))
        total = sum(work[index] for index in own)
        for index in own:
            found["replay"][index] += ns * (work[index] / total if total > 0 else 1 / len(own))
    return found


def _figures(report: ReportData) -> list[tuple[str, str, str]]:
    """List key, name and meaning of the times that are known."""
    serial = report.environment.device != "cuda"
    timed, found = replay_times(report), []
    if report.overhead is not None:
        computing = ", its operators' computing included" if serial else ""
        found.append(("host", "Host", f"host time of the profiled eager iteration{computing}"))
        found.append(("exposed", "Exposed", "the part of the framework's overhead during which the device was idle"))
        if not serial:
            found.append(("device", "GPU", "GPU time of the profiled eager iteration"))
    if timed is not None:
        found.append(("replay", "Replay", timed[1]))
    return found


def _notes(report: ReportData) -> list[str]:
    notes = []
    vary = doubt_of(report.measurement("eager"))
    if report.overhead is not None:
        profiled, bare = report.overhead.profiled_ns, report.overhead.unprofiled_ns
        long = f", {format_ns(profiled)} long" if profiled else ""
        without = f"; without the profiler it takes {about(format_ns(bare), vary)}" if bare else ""
        notes.append(f"Eager's times are those of a profiled iteration{long}{without}.")
    if report.eager is not None:
        notes.append("A fused call's time is shared out among the lines it stands for, by their GPU time in eager.")
    if trains(report):
        notes.append("Backward: calls of the backward, on the line whose forward they belong to.")
    left = [piece for piece in report.sources if not piece.lines]
    if left:
        notes.append(f"{plural(len(left), 'function')} without text: {left[0].file}: {left[0].note}.")
    return notes
