"""``annotate``: join what Nsight Systems saw of a report's replays to the report's calls.

A capture leaves NVTX ranges in the profile: a node belongs to the call in whose range it was captured, and a node of an
instantiated graph to the call of the node it was copied from.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling.cupti import Activity
from nimble_core.profiling.kernel_matching import Told, replay_timeline
from nimble_core.profiling.kernel_names import short_kernel_name
from nimble_core.profiling.nvtx import call_name, whole_name
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_core.utils.units import format_count, format_ns
from nimble_viz.analysis.labels import plural, visible
from nimble_viz.export.tables import to_csv
from nimble_viz.render.report import Report, load
from nimble_viz.report.data import ReportData
from nimble_viz.traces.events import HostEvent
from nimble_viz.traces.nsight import Export, Replay, process_of, read_export

__all__ = ["COLUMNS", "Annotation", "Expected", "Joined", "annotate", "expected", "join"]


CLOCK = "Nsight Systems, GPU clock"

COLUMNS = (
    "globalPid", "correlationId", "graphNodeId", "start", "end", "streamId",
    "kernel", "replay", "call", "operator", "module", "phase", "stream",
)  # fmt: skip
"""Columns of ``Annotation.rows``. The first six have the names of the export, and join to its tables."""

_HOW = "by the NVTX ranges in which the graph's nodes were captured"
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
        """Yield every kernel, copy and fill of every whole replay, in ``COLUMNS``; nanoseconds, None for no call."""
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
        rows = tuple(self.rows())
        return write_file(path, to_csv({name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}).encode())

    def to_text(self) -> str:
        """Say what matched, and what did not, as lines of text."""
        joined, check = self.joined, self.check
        line = self.report.timeline(self.run)
        lines = [
            f"{self.source}: {plural(len(joined.replays), 'replay')} of {self.run!r}, calls told {_HOW}",
            f"  {format_count(check.seen)} of {plural(check.expected, 'node')} seen in every replay"
            + (f"; the median replay took {format_ns(line.length_ns)}" if line else ""),
        ]
        lines += [f"  {note}" for note in self.notes]
        lines.append(
            "  every node matched" if check.passed else "  NOT every node matched: this timeline is unreliable"
        )
        return "\n".join(map(visible, lines)) + "\n"


def annotate(export: str | os.PathLike[str], report: Report | str | os.PathLike[str], run: str = "") -> Annotation:
    """Join an Nsight Systems profile to the calls of ``report``.

    The profile is of a process that prepared the report's plan while it was watched with ``--trace=cuda,nvtx
    --cuda-graph-trace=node``, exported by ``nsys export --type sqlite``. Neither torch nor a GPU is needed. The file is
    only read.

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
    seen = read_export(export)
    joined = join(seen, expected(report.program, schedule))
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
        note="; ".join((f"from {source}, {plural(len(joined.replays), 'replay')}, {_HOW}", *notes)),
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


@dataclass(frozen=True, slots=True)
class Expected:
    """Names of the ranges that a profile of a plan holds: of its capture, of its replays, and of its calls."""

    schedule: Schedule
    capture: str
    replay: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The replays of one graph that ran the same nodes as most (``partial`` did not), node by node.

    ``places`` are positions in ``raw`` of the nodes that were told, by whole id. ``strangers`` are kernels of no call
    in each replay, ``rivals`` other graphs that fit as well.
    """

    told: Told
    raw: RawGraph
    places: Mapping[int, int]
    replays: tuple[Replay, ...]
    partial: int
    strangers: tuple[tuple[str, int], ...]
    rivals: int = 0

    def call(self, node: int) -> int | None:
        """Return the call of a graph node, given its whole id."""
        return self.raw.owner[self.places[node]] if node in self.places else None


def expected(program: Program, schedule: Schedule) -> Expected:
    """Name the ranges that a plan's capture and replays leave."""
    capture, replay = (whole_name(kind, program, schedule) for kind in ("capture", "replay"))
    return Expected(schedule, capture, replay, tuple(map(call_name, program.calls)))


def join(export: Export, plan: Expected) -> Joined:
    """Find the graph of ``plan`` among those that were replayed, and tell its nodes.

    Where the profile holds the plan's own ranges around replays, only those replays count.

    Raises:
        InputError: no graph in the profile is the plan's.

    Complexity:
        O(n log n) in activities, nodes and ranges.
    """
    owners = _captured(export, plan)
    found = []
    for replays in _graphs(export, plan):
        whole, partial = _whole(replays)
        sources = {node: (whole[0].process, _source(export, whole[0].process, node)) for node in whole[0].nodes}
        if calls := {node: owners[source] for node, source in sources.items() if source in owners}:
            made_of = {(process, node >> 32) for process, node in sources.values()}
            captured = sum((process, node >> 32) in made_of for process, node in owners)
            found.append(_joined(calls, captured, whole, partial))
    if not found:
        graphs = len({replay.graph for replay in export.replays})
        many = (
            "the CUDA graph in the profile is not" if graphs == 1 else f"none of {graphs} CUDA graphs in the profile is"
        )
        raise InputError(
            f"{many} the plan {plan.schedule.policy!r} of the report",
            fix="profile the report's model with its plan (prepare(..., plan=report.plan)) and --trace=cuda,nvtx, "
            "its preparation included: the ranges of the capture tell the calls",
        )
    best = max(found, key=lambda one: (_rank(one), len(one.replays)))
    return replace(best, rivals=sum(_rank(one) == _rank(best) for one in found) - 1)


def _rank(one: Joined) -> tuple[bool, int]:
    return one.told.check.passed, one.told.check.seen


def _graphs(export: Export, plan: Expected) -> list[list[Replay]]:
    """Group replays by graph; only those inside the plan's ranges, if there are any."""
    inside = _Ranges(one for one in export.ranges if one.name == plan.replay)
    named = [replay for replay in export.replays if inside.at(replay.thread, replay.launched_ns)]
    graphs: dict[tuple[int, int], list[Replay]] = {}
    for replay in named or export.replays:
        graphs.setdefault(replay.graph, []).append(replay)
    return list(graphs.values())


def _whole(replays: Sequence[Replay]) -> tuple[tuple[Replay, ...], int]:
    """Return the replays that ran what most of them ran, and how many did not."""
    ran = [tuple(sorted(replay.nodes)) for replay in replays]
    counts = Counter(ran)
    usual = max(counts, key=lambda nodes: (counts[nodes], len(nodes)))
    whole = tuple(replay for replay, nodes in zip(replays, ran, strict=True) if nodes == usual)
    return whole, len(replays) - len(whole)


class _Ranges:
    """Ranges that do not nest; says which of them holds a moment on a thread."""

    def __init__(self, ranges: Iterable[HostEvent]) -> None:
        self._of: dict[int, list[HostEvent]] = {}
        for one in ranges:
            self._of.setdefault(one.thread, []).append(one)
        self._starts = {thread: [one.start_ns for one in of] for thread, of in self._of.items()}

    def at(self, thread: int, moment: int) -> HostEvent | None:
        index = bisect_right(self._starts.get(thread, ()), moment) - 1
        found = self._of[thread][index] if index >= 0 else None
        return found if found is not None and moment <= found.end_ns else None


def _captured(export: Export, plan: Expected) -> dict[tuple[int, int], int | None]:
    """Return the call that captured each node, by process and node, from whole captures of the plan.

    Inside a capture's range there is one for each call, in the order of issue. A capture with other names or another
    order (one that was given up, one of another version) says nothing.
    """
    order = plan.schedule.order
    wanted = [plan.calls[call] for call in order]
    names = set(wanted)
    ranges = [one for one in export.ranges if one.name in names]
    range_keys = [(one.thread, one.start_ns) for one in ranges]
    node_keys = [(node.thread, node.start_ns) for node in export.created]
    owners: dict[tuple[int, int], int | None] = {}
    for whole in (one for one in export.ranges if one.name == plan.capture):
        begin, end = (whole.thread, whole.start_ns), (whole.thread, whole.end_ns)
        inside = ranges[bisect_left(range_keys, begin) : bisect_right(range_keys, end)]
        if [one.name for one in inside] != wanted:
            continue
        held, call_of = _Ranges(inside), dict(zip(inside, order, strict=True))
        for node in export.created[bisect_left(node_keys, begin) : bisect_right(node_keys, end)]:
            one = held.at(node.thread, node.start_ns)
            owners[process_of(node.thread), node.node] = call_of[one] if one else None
    return owners


def _source(export: Export, process: int, node: int) -> int:
    """Return the captured node of which ``node`` is a copy, or a copy's copy."""
    seen: set[int] = set()
    while node not in seen and (process, node) in export.copied:
        seen.add(node)
        node = export.copied[process, node]
    return node


def _joined(calls: Mapping[int, int | None], captured: int, whole: tuple[Replay, ...], partial: int) -> Joined:
    places = {node: place for place, node in enumerate(sorted(calls))}
    runs: dict[int, list[Activity]] = {place: [] for place in range(len(calls))}
    strangers: Counter[str] = Counter()
    for replay in whole:
        for node, activity in zip(replay.nodes, replay.activities, strict=True):
            if node in places:
                runs[places[node]].append(activity)
            elif replay is whole[0]:
                strangers[short_kernel_name(activity.name) if activity.kind == "kernel" else activity.kind] += 1
    kinds = tuple(of[0].kind for of in runs.values())
    raw = RawGraph(tuple(runs), kinds, (), tuple(calls[node] for node in places))
    once = {place: tuple(of) for place, of in runs.items() if len(of) == len(whole)}
    check = SelfCheck(captured, len(once), "graph node id", strangers.total() * len(whole))
    counted = sorted(strangers.items(), key=lambda one: (-one[1], one[0]))
    return Joined(Told(once, check), raw, places, whole, partial, tuple(counted))
