"""What changed between two reports: calls, streams, costs, speed, synchronisations, memory, environment, equality."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from statistics import fmean, median, variance
from typing import Any, Literal

from nimble_core.algorithms.median_interval import ERROR
from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, Ratio, Verdict, across
from nimble_core.ir.program import Call
from nimble_core.utils.units import format_ns, format_ratio
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.call_matching import match_calls
from nimble_viz.analysis.labels import label_call, ratio_words, source_of, trains
from nimble_viz.analysis.timeline import shown_timeline
from nimble_viz.report.data import ReportData

__all__ = [
    "COST_BAND", "FEWEST_PROCESSES", "Change", "CostChange", "DifferenceData", "Moved", "SpeedChange", "beside",
    "beside_eager", "differences", "environment_changes", "host_sync_count", "json_value", "processes", "subjects",
]  # fmt: skip

FEWEST_PROCESSES = 3
"""From so many reports a side on, what processes differ by is measured, not assumed."""

COST_BAND = 1.10
"""Single calls are called of another cost beyond this factor. In three pairs of reports of the same models (195 to
1,264 calls, two processes on an H200), a fifth to a third of all calls differed by more than their spreads, 3% to 5%
also by more than this."""

_IDENTITY = (
    "device", "device_name", "host_cpu", "cores", "threads", "torch", "python", "system", "driver", "cuda"
)  # fmt: skip
_Value = str | int | None


@dataclass(frozen=True, slots=True)
class Change:
    """One fact that differs; None where the report does not have it."""

    name: str
    old: str | int | None
    new: str | int | None


@dataclass(frozen=True, slots=True)
class Moved:
    """A call on another stream; ``stream`` is numbered as in the old plan (see ``diff``), None if it is a new one."""

    old: Call
    new: Call
    old_stream: int | None
    new_stream: int | None


@dataclass(frozen=True, slots=True)
class CostChange:
    """A call whose cost (ns) changed by more than both spreads (interquartile ranges) and ``COST_BAND``."""

    old: Call
    new: Call
    old_ns: float
    new_ns: float
    old_spread_ns: float
    new_spread_ns: float


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A run in both reports, or in one.

    Args:
        name: of the run, ``"old -> new"`` where the names differ.
        old_ns: median, None if it was not measured; likewise
        new_ns: the new one.
        ratio: speed of the new over the old (``processes``), above 1 is faster; None if one is missing.
        old_over_eager: speed over eager in the old report, None if either was not measured; likewise
        new_over_eager: in the new one. Where the whole machine was slower these say so.
    """

    name: str
    old_ns: float | None
    new_ns: float | None
    ratio: Ratio | None
    old_over_eager: Ratio | None
    new_over_eager: Ratio | None

    @property
    def verdict(self) -> Verdict | Literal["added", "removed"]:
        """That of the ratio, where there is one."""
        if self.ratio is None:
            return "added" if self.old_ns is None else "removed"
        return self.ratio.verdict


@dataclass(frozen=True, slots=True)
class DifferenceData:
    """What changed from an old report to a new one.

    Args:
        model: name of the new report's model.
        matched: number of calls found in both; ``added`` and ``removed`` are in one only.
        moved: matched calls that the chosen plans put on different streams.
        recosted: matched calls whose cost changed beyond its spread.
        chosen: the chosen runs against each other; None if neither was measured, or they do not the same work.
        speeds: every run that was measured, old ones first; likewise.
        facts: model, dtype, batch, kernels, chosen plan, number of calls, complete or not.
        plans: of each plan streams and waits.
        host_syncs: of the eager run, counts by kind and source line.
        memory: bytes; None also where they were not measured.
        checks: equality of each replay with eager.
        environment: where it was measured, settings included.
        notes: what could not be compared, and why; ``subjects`` first.
        unlike: why the two do not the same work; empty if they may.
        subjects: that the two are of different models, dtypes or batches; empty if they are not.
    """

    model: str
    matched: int
    added: tuple[Call, ...] = ()
    removed: tuple[Call, ...] = ()
    moved: tuple[Moved, ...] = ()
    recosted: tuple[CostChange, ...] = ()
    chosen: SpeedChange | None = None
    speeds: tuple[SpeedChange, ...] = ()
    facts: tuple[Change, ...] = ()
    plans: tuple[Change, ...] = ()
    host_syncs: tuple[Change, ...] = ()
    memory: tuple[Change, ...] = ()
    checks: tuple[Change, ...] = ()
    environment: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    unlike: str = ""
    subjects: str = ""

    @property
    def changes(self) -> dict[str, tuple[Change, ...]]:
        """All facts that differ, by section."""
        sections = ("facts", "plans", "host_syncs", "memory", "checks", "environment")
        return {name: getattr(self, name) for name in sections}

    @property
    def empty(self) -> bool:
        """Whether nothing is known to differ, which undecided times are not."""
        calls = (self.added, self.removed, self.moved, self.recosted)
        same = all(one.verdict in ("undecided", "no difference") for one in self.speeds)
        return same and not any((*calls, *self.changes.values()))

    def to_json(self) -> str:
        """Return the difference as JSON; numbers that are not finite are null."""
        hidden = ("unlike", "subjects")  # the notes say both
        shown = {one.name: json_value(getattr(self, one.name)) for one in fields(self) if one.name not in hidden}
        return json.dumps({"nimble_diff": 1, "empty": self.empty, **shown}, indent=2, allow_nan=False) + "\n"

    def __repr__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.removed)} removed, {len(self.moved)} moved"
        return f"<Difference of {self.model!r}: {self.matched} calls matched, {counts}, {len(self.recosted)} recosted>"


def differences(before: Sequence[ReportData], after: Sequence[ReportData]) -> DifferenceData:
    """Compare the reports ``before`` with those ``after``; swapped, the result says the opposite.

    Several of one side are of the same model in several processes. Times are those of all, all else is of the first.

    Streams have no names either: each of the new plan counts as the one of the old plan with which it shares most
    calls. Where the two run kernels of different makers (``Program.fuse``), the eager calls are compared, which have
    neither streams nor costs in such reports.
    """
    old, new = before[0], after[0]
    same_kernels = old.program.fuse == new.program.fuse
    olds, news = (old.program.calls, new.program.calls) if same_kernels else (old.eager_calls, new.eager_calls)
    fused = old.eager is not None or new.eager is not None
    pairs = match_calls(olds, news)
    gone, come = {u for u, _ in pairs}, {v for _, v in pairs}
    unlike = ""
    notes = [] if same_kernels else ["kernels of different makers: eager calls are compared, without streams and costs"]
    differ = subjects(old, new)
    if differ:
        notes.insert(0, differ)
    if trains(old) != trains(new):
        unlike = "one is of training steps, the other of inference"
        notes.append(f"times: {unlike}")
    measured = old.measurement(old.chosen) or new.measurement(new.chosen)
    names = dict.fromkeys(taken.name for report in (*before, *after) for taken in report.measurements)
    if same_kernels:
        notes += _cost_doubts(old, new)
    return DifferenceData(
        model=new.model,
        matched=len(pairs),
        added=tuple(call for k, call in enumerate(news) if k not in come),
        removed=tuple(call for k, call in enumerate(olds) if k not in gone),
        moved=_moved(old, new, pairs) if same_kernels else (),
        recosted=_recosted(old, new, pairs) if same_kernels else (),
        chosen=_speed(before, after, "") if measured and not unlike else None,
        speeds=() if unlike else tuple(_speed(before, after, name) for name in names),
        facts=_changes(_facts(old, fused), _facts(new, fused)),
        plans=_changes(_plans(old), _plans(new)),
        host_syncs=_changes(_host_syncs(old), _host_syncs(new)),
        memory=_changes(_memory(old), _memory(new)),
        checks=_changes({one.name: _result(one) for one in old.checks}, {one.name: _result(one) for one in new.checks}),
        environment=environment_changes(old.environment, new.environment),
        notes=tuple(notes),
        unlike=unlike,
        subjects=differ,
    )


def subjects(old: ReportData, new: ReportData) -> str:
    """Say that the two are of different models, dtypes or batches; empty if they are not."""
    found = [
        f"two different {what}: {before} against {after}"
        for what, before, after in (
            ("models", old.model, new.model), ("dtypes", old.dtype, new.dtype), ("batches", old.batch, new.batch)
        )
        if before != after
    ]  # fmt: skip
    return ", ".join(found)


def processes(news: Sequence[Measurement], olds: Sequence[Measurement]) -> Ratio:
    """Compute the speed of ``news`` over ``olds`` (> 1: faster), one measurement of each process.

    From ``FEWEST_PROCESSES`` a side on, what processes differ by is known: Welch's t interval of the logarithms of
    their medians, and differences count from ``SAME`` on. Of fewer all pairs together, from ``ACROSS`` on. A
    measurement given twice counts once.
    """
    news, olds = (list({one.samples_ns: one for one in some}.values()) for some in (news, olds))
    new_ns, old_ns = ([taken.median_ns for taken in some] for some in (news, olds))
    if min(*new_ns, *old_ns) <= 0 or min(len(news), len(olds)) < FEWEST_PROCESSES:
        found = [across(new, old) for new in news for old in olds]
        value = median(old_ns) / median(new_ns) if median(new_ns) else math.inf
        low, high = min(one.low for one in found), max(one.high for one in found)
        return replace(found[0], value=value, low=low, high=high)
    from scipy.special import stdtrit

    logs = [[math.log(ns) for ns in some] for some in (old_ns, new_ns)]
    errors = [variance(some) / len(some) for some in logs]
    middle = fmean(logs[0]) - fmean(logs[1])
    wide = 0.0
    if sum(errors):
        freedom = sum(errors) ** 2 / sum(one**2 / (len(some) - 1) for one, some in zip(errors, logs, strict=True))
        wide = float(stdtrit(freedom, 1 - ERROR / 2)) * math.sqrt(sum(errors))
    low, high = math.exp(middle - wide), math.exp(middle + wide)
    return Ratio(news[0].name, olds[0].name, math.exp(middle), low, high)


def beside_eager(reports: Sequence[ReportData], run: str) -> Ratio | None:
    """Compute the speed of a run (``""``: the chosen one) over eager, the median of the reports; None if none has."""
    runs = [(report, run or report.chosen) for report in reports]
    found = [one for report, name in runs if report.measurement(name) and (one := report.ratio(name))]
    if not found:
        return None
    low, high = min(one.low for one in found), max(one.high for one in found)
    return replace(found[0], value=median(one.value for one in found), low=low, high=high)


def environment_changes(old: Environment, new: Environment) -> tuple[Change, ...]:
    """List what makes ``new`` another environment than ``old``, without what varies from run to run."""

    def stamp(where: Environment) -> dict[str, _Value]:
        return {name: getattr(where, name) for name in _IDENTITY} | dict(where.settings)

    return _changes(stamp(old), stamp(new))


def host_sync_count(report: ReportData) -> int | None:
    """Count how often the eager run made the host wait; None if it was not profiled."""
    return sum(sync.count for sync in report.overhead.host_syncs) if report.overhead else None


def _moved(old: ReportData, new: ReportData, pairs: Sequence[tuple[int, int]]) -> tuple[Moved, ...]:
    """List matched calls on another stream; streams that share most calls count as one."""
    before, after = old.schedule(old.chosen), new.schedule(new.chosen)
    if before is None or after is None:
        return ()
    shared = Counter((before.stream[u], after.stream[v]) for u, v in pairs)
    renamed: dict[int, int] = {}
    # Ties go by the sum, so that swapping the reports decides them alike; of equal sums no two share a stream.
    for u, v in sorted(shared, key=lambda uv: (-shared[uv], uv[0] + uv[1])):
        if v not in renamed and u not in renamed.values():
            renamed[v] = u
    return tuple(
        Moved(old.program.calls[u], new.program.calls[v], before.stream[u], renamed.get(after.stream[v]))
        for u, v in sorted(pairs, key=lambda uv: uv[1])
        if renamed.get(after.stream[v]) != before.stream[u]
    )


# Costs and times.


def _recosted(old: ReportData, new: ReportData, pairs: Sequence[tuple[int, int]]) -> tuple[CostChange, ...]:
    before, after = old.costs, new.costs
    if not before.spread_ns or not after.spread_ns:
        return ()
    found = []
    for u, v in pairs:
        times, spreads = (before.ns[u], after.ns[v]), (before.spread_ns[u], after.spread_ns[v])
        low, high = sorted(times)
        if high - low > sum(spreads) and high > COST_BAND * low:
            found.append(CostChange(old.program.calls[u], new.program.calls[v], *times, *spreads))
    return tuple(sorted(found, key=lambda one: (-abs(one.new_ns - one.old_ns), one.new.index)))


def _cost_doubts(old: ReportData, new: ReportData) -> list[str]:
    if "uniform" in (old.costs.source, new.costs.source):
        return ["costs of calls are not compared: they were not measured in both"]
    if not old.costs.spread_ns or not new.costs.spread_ns:
        return ["costs of calls are not compared: their spread is not known in both"]
    if not (old.costs.reliable and new.costs.reliable):
        return ["costs of calls are unreliable: not every expected kernel was seen in both"]
    return []


def _speed(olds: Sequence[ReportData], news: Sequence[ReportData], run: str) -> SpeedChange:
    """Compare a run of all old reports with that of all new ones; ``""``: the chosen ones."""
    before, after = run or olds[0].chosen, run or news[0].chosen
    was, now = ([taken for one in some if (taken := one.measurement(run or one.chosen))] for some in (olds, news))
    return SpeedChange(
        before if before == after else f"{before} -> {after}",
        median(taken.median_ns for taken in was) if was else None,
        median(taken.median_ns for taken in now) if now else None,
        processes(now, was) if was and now else None,
        beside_eager(olds, run) if before != "eager" and was else None,
        beside_eager(news, run) if after != "eager" and now else None,
    )


# Facts, as names and values.


def _changes(old: Mapping[str, _Value], new: Mapping[str, _Value]) -> tuple[Change, ...]:
    names: Iterable[str] = dict.fromkeys((*old, *new))
    return tuple(Change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def _facts(report: ReportData, fused: bool) -> dict[str, _Value]:
    return {
        "model": report.model,
        "dtype": report.dtype,
        "batch": report.batch,
        "kernels": "eager's own" if report.program.fuse == "none" else report.program.fuse,
        "chosen": report.chosen,
        "calls": len(report.program.calls),
        **({"eager calls": len(report.eager_calls)} if fused else {}),
        "measured": "completely" if report.complete else "until it was interrupted",
    }


def _plans(report: ReportData) -> dict[str, _Value]:
    return {
        f"{plan.policy}: {what}": count
        for plan in report.schedules
        for what, count in (
            ("streams", plan.streams),
            ("waits, full DAG", plan.counts.full),
            ("waits, MEG", plan.counts.meg),
            ("waits, planned", plan.counts.planned),
            ("waits, emitted", plan.counts.emitted),
        )
    }


def _host_syncs(report: ReportData) -> dict[str, _Value]:
    counts: Counter[str] = Counter()
    for sync in report.overhead.host_syncs if report.overhead else ():
        counts[f"{sync.kind} at {sync.source}" if sync.source else sync.kind] += sync.count
    return dict(counts)


def _memory(report: ReportData) -> dict[str, _Value]:
    memory = report.memory
    facts: dict[str, _Value] = {"eager's peak": memory.eager_peak or None}  # 0 is unknown
    facts |= {f"{name}: held": held or None for name, held in memory.engines}
    for engine in memory.planned:
        facts |= {f"{engine.name}: arena": engine.arena, f"{engine.name}: workspaces": engine.workspaces}
    return facts


def _result(check: EqualityCheck) -> str:
    return "equal" if check.passed else "differs" if check.differs else "not shown"


def json_value(value: Any) -> Any:
    """Turn values into what JSON holds; numbers that are not finite become None."""
    if isinstance(value, Call):
        return {"index": value.index, "operator": value.operator, "module": value.module, "source": source_of(value)}
    if isinstance(value, Ratio):
        return {name: json_value(getattr(value, name)) for name in ("value", "low", "high")}
    if is_dataclass(value):
        told = {one.name: json_value(getattr(value, one.name)) for one in fields(value)}
        return told | {"verdict": value.verdict} if isinstance(value, SpeedChange) else told
    if isinstance(value, tuple):
        return [json_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The two in one page: the old replay on the same axis, and what got slower since.

_BEFORE = "before"


def beside(old: ReportData, new: ReportData) -> dict[str, Any]:
    """Return what a page of ``new`` shows of ``old``.

    Returns:
        ``line``: the old replay as ``timelines`` describes one, its spans by the calls of ``new``, -1 for those that
        are gone; None if it was not watched. ``run``: it in the picture. ``slower``: calls of ``new`` whose isolated
        time grew beyond what both vary by, most first. ``text``: the verdict on the two, and what cannot be compared.
    """
    found, name = differences([old], [new]), best_run(old) or "eager"
    line, taken, shown = old.timeline(name), old.measurement(name), None
    if line is not None:
        place, shown = dict(match_calls(old.program.calls, new.program.calls)), shown_timeline(old, line)
        shown["columns"]["call"] = [place.get(call, -1) for call in shown["columns"]["call"]]
        shown["gaps"] = {column: [] for column in shown["gaps"]}  # they name calls of the old report
        shown |= {"run": _BEFORE, "label": "before", "longest": []}
    ns = taken.median_ns if taken else line.length_ns if line else 0.0
    scale = ns / line.length_ns if line and line.length_ns else 1.0
    over = found.chosen.ratio if found.chosen else None
    return {
        "line": shown,
        "run": line and {"run": _BEFORE, "label": _BEFORE, "ns": ns, "text": format_ns(ns), "scale": min(1.0, scale)},
        "slower": [
            {
                "call": one.new.index,
                "label": label_call(one.new),
                "old": format_ns(one.old_ns),
                "new": format_ns(one.new_ns),
                "ratio": format_ratio(one.new_ns / one.old_ns),
            }
            for one in found.recosted
            if one.new_ns > one.old_ns
        ],
        "text": "; ".join(((ratio_words(over, "before") if over else "no time to compare"), *found.notes)),
    }
