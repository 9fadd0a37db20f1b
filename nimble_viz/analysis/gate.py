"""Is a report good enough? Rules, a report and perhaps a baseline in; verdicts out, for people and for CI."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal
from xml.etree import ElementTree

from nimble_core.ir.measurement import ACROSS, Measurement
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_bytes, format_count, format_ratio
from nimble_viz.analysis.compared import unshown
from nimble_viz.analysis.diff import beside_eager, environment_changes, host_sync_count, json_value, processes
from nimble_viz.analysis.labels import context, interval_text, label_plan, label_run, trains, visible
from nimble_viz.report.data import ReportData

__all__ = ["EXIT_CODES", "GateData", "Outcome", "Rules", "Verdict", "judge"]

Outcome = Literal["pass", "fail", "inconclusive"]

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "inconclusive": 3}
"""What the command line returns; 2 is left to bad usage: nothing was decided."""

_MARKS: dict[Outcome, str] = {"pass": "✅", "fail": "❌", "inconclusive": "❔"}
_BADNESS: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")
_TO_DO = (
    "to do: give three or more reports a side, measure on a quieter machine, or judge counts alone: --max-calls, "
    "--max-syncs and --max-host-syncs, without --baseline"
)
_NAMED = 3
"""Places named by a count that is too high."""
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-!|&~])")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a report has to keep to; None asks for nothing.

    Args:
        min_speedup: least speed of the chosen run over that named by ``over``.
        over: the run that min_speedup is about: ``eager``, ``single``, a peer.
        max_syncs: most waits between streams in the chosen plan, as emitted where the captured graph was read.
        max_host_syncs: most times that the eager run, or one iteration of profiled code, makes the host wait for the
            device: reads of values, operators whose size depends on data, blocking copies, synchronisations.
        max_calls: most calls that reach the device.
        max_bytes: most device memory that the chosen engine holds.
        max_slowdown: with a baseline, the most that the chosen run may take of what the baseline's took. It fails only
            if it also lost against eager, measured beside it: a machine that is slower today decides nothing.

    Of several reports each has to keep to all, but for max_slowdown, which is about them together.

    Raises:
        InputError: a bound that is negative or no number.
    """

    min_speedup: float | None = None
    over: str = "eager"
    max_syncs: int | None = None
    max_host_syncs: int | None = None
    max_calls: int | None = None
    max_bytes: int | None = None
    max_slowdown: float = ACROSS

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if isinstance(bound, int | float) and not 0 <= bound < math.inf:
                raise InputError(f"{field.name} is {bound}", fix="give a number from 0 on")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule says.

    Args:
        rule: its name, ``"min_speedup"``.
        outcome: what was decided.
        text: why, one sentence.
        limit: the bound; None where there is none, likewise
        value: what was found, and
        low: its interval; equal to ``value`` for counts.
        high: likewise; infinite if too few samples were taken.
    """

    rule: str
    outcome: Outcome
    text: str
    limit: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class GateData:
    """All verdicts on one report.

    Args:
        model: its model.
        context: dtype, batch and device.
        verdicts: of each rule that was asked for, and of those that always hold.
        notes: what the reader should know.
    """

    model: str
    context: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """``"fail"`` if any rule failed, else ``"inconclusive"`` if any was not decided."""
        return max((one.outcome for one in self.verdicts), key=_BADNESS.index, default="pass")

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 inconclusive."""
        return EXIT_CODES[self.outcome]

    def to_json(self) -> str:
        """Return the verdicts as JSON; numbers that are not finite are null."""
        data = {
            "nimble_gate": 1,
            "model": self.model,
            "context": self.context,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "verdicts": json_value(self.verdicts),
            "notes": list(self.notes),
        }
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return the verdicts as a Markdown table, for the summary of a CI job."""
        lines = [
            f"### {_MARKS[self.outcome]} nimble\\_viz gate: {self.outcome}",
            "",
            _markdown(f"{self.model}, {self.context}"),
            "",
            "| rule | outcome | why |",
            "| --- | --- | --- |",
            *(f"| {_markdown(one.rule)} | {_MARKS[one.outcome]} {one.outcome} | {_markdown(one.text)} |"
              for one in self.verdicts),
            *(line for note in self.notes for line in ("", _markdown(note))),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def to_junit(self) -> str:
        """Return the verdicts as JUnit XML, one test for each rule; an inconclusive one counts as skipped."""
        counts = {outcome: sum(one.outcome == outcome for one in self.verdicts) for outcome in EXIT_CODES}
        tests, failures, skipped = len(self.verdicts), counts["fail"], counts["inconclusive"]
        totals = {"tests": str(tests), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
        root = ElementTree.Element("testsuites", totals)
        suite = ElementTree.SubElement(root, "testsuite", {"name": "nimble_viz gate", **totals})
        for one in self.verdicts:
            case = ElementTree.SubElement(suite, "testcase", {"classname": visible(self.model), "name": one.rule})
            if one.outcome == "pass":
                ElementTree.SubElement(case, "system-out").text = visible(one.text)
            else:
                kind = "failure" if one.outcome == "fail" else "skipped"
                ElementTree.SubElement(case, kind, {"message": f"{one.outcome}: {visible(one.text)}"})
        ElementTree.indent(root)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def judge(
    reports: Sequence[ReportData],
    rules: Rules | None = None,
    *,
    baseline: Sequence[ReportData] = (),
    any_environment: bool = False,
) -> GateData:
    """Judge ``reports`` by ``rules``.

    Two rules always hold: the run was measured to the end, and its outputs are eager's (the latter not for a profile
    of unmodified code, where nothing runs in eager's place).

    Args:
        reports: what to judge; several are of the same model in several processes (``processes``).
        rules: None asks for nothing more.
        baseline: earlier reports of the same model: the chosen run must not be slower than ``rules.max_slowdown``
            allows, and no count (calls, waits, host synchronisations) may be higher than in the first of them.
        any_environment: compare even if the baseline was measured elsewhere.

    Raises:
        InputError: the baseline is of another model, dtype, batch or (without ``any_environment``) environment.
    """
    rules, report = rules or Rules(), reports[0]
    notes = dict.fromkeys(note for one in baseline for note in _comparable(report, one, any_environment))
    found = _worst(said for one in reports for said in (*_always(one), *_absolute(one, rules)))
    if baseline:
        found.append(_slowdown(reports, baseline, rules.max_slowdown))
        found += _worst(said for one in reports for said in _counts(one, baseline[0]))
    open_speed = any(one.rule == "max_slowdown" and one.outcome == "inconclusive" and one.value for one in found)
    return GateData(report.model, context(report), tuple(found), (*notes, *[_TO_DO] * open_speed))


def _worst(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Keep one verdict of each rule, the worst that some report got, in the order of the rules."""
    found: dict[str, Verdict] = {}
    for one in verdicts:
        known = found.setdefault(one.rule, one)
        if _BADNESS.index(one.outcome) > _BADNESS.index(known.outcome):
            found[one.rule] = one
    return list(found.values())


def _comparable(report: ReportData, baseline: ReportData, any_environment: bool) -> tuple[str, ...]:
    """Return notes about the baseline; raise InputError if it says nothing about ``report``."""

    def subject(one: ReportData) -> tuple[str, str]:
        return one.model, f"{one.dtype}, batch {one.batch}, {'training' if trains(one) else 'inference'}"

    if subject(report) != subject(baseline):
        raise InputError(
            f"the baseline is about {', '.join(subject(baseline))}, the report about {', '.join(subject(report))}",
            fix="take a baseline of the same model, dtype and batch, and of training for training",
        )
    changes = environment_changes(baseline.environment, report.environment)
    words = "; ".join(f"{one.name} {_said(one.old)}, now {_said(one.new)}" for one in changes)
    if changes and not any_environment:
        raise InputError(
            "the baseline was measured in another environment",
            where=words,
            fix="measure the baseline again here, or pass --any-environment (any_environment=True)",
        )
    return (f"the baseline was measured in another environment: {words}",) if changes else ()


def _said(value: str | int | None) -> str:
    return "nothing" if value in (None, "") else str(value)


# Rules that always hold.


def _always(report: ReportData) -> Iterator[Verdict]:
    """Judge whether all was measured, and whether outputs are eager's; a profile has none to judge."""
    if report.complete:
        yield Verdict("complete", "pass", "everything was measured")
    else:
        yield Verdict("complete", "inconclusive", "the run was interrupted")
    wrong = [label_run(report, check.name) for check in report.checks if check.differs]
    check = next((check for check in report.checks if check.name == report.chosen), None)
    if report.sampling:
        return
    if wrong:
        yield Verdict("equal_outputs", "fail", f"outputs of {', '.join(wrong)} differ from eager's")
    elif check is None or not check.passed:
        why = check.reason if check else "not checked"
        yield Verdict("equal_outputs", "inconclusive", f"the chosen run's outputs are not shown to be eager's: {why}")
    else:
        text = f"outputs of {label_run(report, check.name)} are eager's: error {check.error:.1e}"
        yield Verdict("equal_outputs", "pass", text, check.tolerance, check.error, check.error, check.error)


# Rules that were asked for.


def _absolute(report: ReportData, rules: Rules) -> Iterator[Verdict]:
    if rules.min_speedup is not None:
        yield _speedup(report, rules.min_speedup, rules.over)
    held = dict(report.memory.engines).get(report.chosen) or None  # 0 is unknown
    if rules.max_host_syncs is not None:
        yield _host_syncs(report, "max_host_syncs", rules.max_host_syncs, "allowed")
    for rule, found, limit, unit in (
        ("max_syncs", _waits(report, report.chosen), rules.max_syncs, "waits between streams"),
        ("max_calls", len(report.program.calls), rules.max_calls, "calls"),
        ("max_bytes", held, rules.max_bytes, "bytes"),
    ):
        if limit is not None:
            yield _count(rule, found, limit, unit, "allowed")


def _speedup(report: ReportData, least: float, over: str) -> Verdict:
    missing = report.chosen if report.measurement(report.chosen) is None else over
    found = report.ratio(report.chosen, over) if report.measurement(missing) else None
    if found is None:
        return Verdict("min_speedup", "inconclusive", f"{missing or 'a chosen plan'} was not measured", least)
    outcome: Outcome = "pass" if found.low >= least else "fail" if found.high < least else "inconclusive"
    names = f"{label_run(report, found.name)} over {label_run(report, found.baseline)}{unshown(report, found.baseline)}"
    text = f"{names}: {_interval(found.value, found.low, found.high)}, at least {format_ratio(least)} asked for"
    return Verdict("min_speedup", outcome, text, least, found.value, found.low, found.high)


def _count(rule: str, found: int | None, limit: int, unit: str, word: str) -> Verdict:
    if found is None:
        return Verdict(rule, "inconclusive", f"{unit}: not in this report", limit)
    show = format_bytes if unit == "bytes" else format_count
    text = f"{unit}: {show(found)}, {word} {show(limit)}"
    return Verdict(rule, "pass" if found <= limit else "fail", text, limit, found, found, found)


def _host_syncs(report: ReportData, rule: str, limit: int, word: str) -> Verdict:
    of = "one iteration" if report.sampling else "the eager run"
    found = _count(rule, host_sync_count(report), limit, f"host synchronisations and blocking copies of {of}", word)
    if found.outcome != "fail" or report.overhead is None:
        return found
    most = sorted(report.overhead.host_syncs, key=lambda sync: (-sync.count, -sync.total_ns, sync.kind, sync.source))
    where = (f"{sync.kind}{f' at {sync.source}' if sync.source else ''}, {sync.count}" for sync in most[:_NAMED])
    return replace(found, text=f"{found.text}: {'; '.join(where)}{'; …' if len(most) > _NAMED else ''}")


def _waits(report: ReportData, policy: str) -> int | None:
    plan = report.schedule(policy)
    if plan is None:
        return None
    return plan.counts.planned if plan.counts.emitted is None else plan.counts.emitted


# Against a baseline.


def _slowdown(reports: Sequence[ReportData], baseline: Sequence[ReportData], most: float) -> Verdict:
    was, now = _taken(baseline), _taken(reports)
    if not was or not now:
        missing = "the report's" if was else "the baseline's"
        return Verdict("max_slowdown", "inconclusive", f"{missing} chosen run was not measured", most)
    found = processes(was, now)  # speed of the old over the new: how much longer the new one takes
    # A profile has nothing beside it.
    before, after = (None, None) if reports[0].sampling else (beside_eager(baseline, ""), beside_eager(reports, ""))
    # Over eager in the same rounds, so that a slower machine cancels.
    beside = before.low / after.high if before and after and after.high else math.inf
    outcome: Outcome = "pass" if found.high <= most else "inconclusive"
    why = ""
    if found.low > most:
        outcome = "fail" if beside > most else "inconclusive"
        if beside <= most:
            eager = processes(_taken(baseline, "eager"), _taken(reports, "eager"))
            slower = "is" if eager.verdict == "faster" else "may be"
            why = f"; eager {slower} slower too, so that this may be the machine"
    names = f"{label_run(reports[0], now[0].name)} against the baseline's {label_run(baseline[0], was[0].name)}"
    times = f"{_interval(found.value, found.low, found.high)} its time, at most {format_ratio(most)} allowed"
    return Verdict("max_slowdown", outcome, f"{names}: {times}{why}", most, found.value, found.low, found.high)


def _taken(reports: Sequence[ReportData], run: str = "") -> list[Measurement]:
    """Return the measured runs to judge: the chosen ones; of a profile of unmodified code, that code."""
    names = [(one, run or ("eager" if one.sampling else one.chosen)) for one in reports]
    return [taken for one, name in names if (taken := one.measurement(name))]


def _counts(report: ReportData, baseline: ReportData) -> Iterator[Verdict]:
    word = "in the baseline"
    if report.program.fuse == baseline.program.fuse:
        yield _count("baseline_calls", len(report.program.calls), len(baseline.program.calls), "calls", word)
    else:
        yield _count("baseline_calls", len(report.eager_calls), len(baseline.eager_calls), "eager calls", word)
    waits = _waits(baseline, baseline.chosen)
    if waits is not None:
        found = _waits(report, baseline.chosen)
        unit = f"waits between streams of {label_plan(baseline.chosen)}"
        yield _count("baseline_syncs", found, waits, unit, word)
    syncs = host_sync_count(baseline)
    if syncs is not None:
        yield _host_syncs(report, "baseline_host_syncs", syncs, word)


# As text.


def _interval(value: float, low: float, high: float) -> str:
    known = low > 0 and math.isfinite(high)
    return f"{format_ratio(value)} {interval_text(low, high)}" if known else "undecided (too few samples)"


def _markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", visible(text))
