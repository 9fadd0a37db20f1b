"""What changed between two reports, and whether one is good enough: as values that show themselves as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from nimble_core.ir.program import Call
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_bytes, format_count, format_ns
from nimble_viz.analysis.diff import Change, DifferenceData, SpeedChange, differences, environment_changes, subjects
from nimble_viz.analysis.gate import GateData, Outcome, Rules, judge
from nimble_viz.analysis.labels import (
    INTERVAL,
    label_call,
    label_plan,
    plural,
    ratio_figures,
    ratio_sentence,
    source_of,
)
from nimble_viz.render.layout import bullet, indented, make_table, note, pairs, plain, sections, words
from nimble_viz.report.data import ReportData

__all__ = ["Difference", "Gate", "Reports", "diff", "gate", "headline"]

_TOP = 10
_COLOURS: dict[str, str] = {"faster": "green", "slower": "red", "pass": "green", "fail": "bold red"}
_UNDECIDED = "dim"
_SECTIONS = {
    "facts": "What was measured",
    "plans": "Streams and synchronisations",
    "host_syncs": "Host synchronisations of the eager run",
    "memory": "Memory",
    "checks": "Equality with eager",
    "environment": "Environment",
}


class _Shown(ABC):
    """Shows itself as text, in a terminal and in a notebook."""

    __slots__ = ()

    @classmethod
    def of(cls, data: Any) -> Self:
        """Make the same values show themselves."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(data)})

    def to_text(self, width: int | None = None) -> str:
        """Return plain text, ``width`` columns wide (60 to 200; None: the terminal's)."""
        return plain(self, width)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.to_text(100)}

    @abstractmethod
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield its parts, from top to bottom."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(_Shown, DifferenceData):
    """What changed from one report to another: its fields are those of ``DifferenceData``."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        verdict = self.chosen.verdict if self.chosen and not self.subjects else ""
        style = "" if verdict == "undecided" else f"bold {_COLOURS.get(verdict, 'yellow')}"
        yield words(f"nimble_viz diff: {self.model}", "bold")
        yield words(headline(self), style)
        yield from sections(_sections(self))


@dataclass(frozen=True, slots=True)
class Gate(_Shown, GateData):
    """All verdicts on one report: its fields are those of ``GateData``."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        rows = [
            (one.rule, words(_shown(one.outcome), _COLOURS.get(one.outcome, "yellow")), one.text)
            for one in self.verdicts
        ]
        yield words(f"nimble_viz gate: {self.model} ({self.context})", "bold")
        yield words(_shown(self.outcome), f"bold {_COLOURS.get(self.outcome, 'yellow')}")
        yield words("")
        yield indented(make_table((("rule", ""), ("outcome", ""), ("why", "")), rows))
        yield from (indented(bullet(one)) for one in self.notes)


Reports = ReportData | Sequence[ReportData]
"""One, or several of the same model, each measured in a process of its own."""


def diff(old: Reports, new: Reports) -> Difference:
    """Compare ``old`` with ``new`` (``differences``); three reports a side tell smaller differences.

    Raises:
        InputError: no report, something else, or reports of one side that are of different models or environments.
    """
    return Difference.of(differences(_several(old), _several(new)))


def gate(
    report: Reports, rules: Rules | None = None, *, baseline: Reports | None = None, any_environment: bool = False
) -> Gate:
    """Judge ``report`` by ``rules``; see ``judge``, which says what is asked and what is raised."""
    against = () if baseline is None else _several(baseline, any_environment)
    judged = _several(report, any_environment)
    return Gate.of(judge(judged, rules, baseline=against, any_environment=any_environment))


def _several(given: Reports, any_environment: bool = False) -> Sequence[ReportData]:
    found = list(given) if isinstance(given, Sequence) else [given]
    wrong = [type(one).__name__ for one in found if not isinstance(one, ReportData)]
    if wrong or not found:
        raise InputError(f"expected a Report, given {(*wrong, 'none')[0]}", fix="nimble_viz.load(path) reads one")
    if mixed := next(filter(None, (subjects(found[0], one) for one in found)), ""):
        raise InputError(f"reports of one side differ: {mixed}", fix="several reports of a side repeat one measurement")
    changed = [one for other in found[1:] for one in environment_changes(found[0].environment, other.environment)]
    if changed and not any_environment:
        raise InputError(
            f"reports of one side are of different environments: {changed[0].name} {changed[0].old}, {changed[0].new}",
            fix="measure all reports of a side in one environment",
        )
    return found


# As text.


def headline(found: DifferenceData) -> str:
    """Say in one sentence how the chosen runs compare, and what else changed.

    ``"The prepared run is 1.21x slower than the old one (1.19x to 1.24x); 2 calls added, 1 call on another
    stream."`` That the two are of different models, dtypes or batches comes first.
    """
    counts = [
        (len(found.added), "call", "added"),
        (len(found.removed), "call", "removed"),
        (len(found.moved), "call", "on another stream"),
        (len(found.recosted), "call", "of another cost"),
        (len(found.environment), "difference", "of environment"),
        (sum(len(some) for name, some in found.changes.items() if name != "environment"), "other fact", "changed"),
    ]
    parts = [f"{plural(count, noun)} {what}" for count, noun, what in counts if count]
    why = f"No times are compared ({found.unlike})" if found.unlike else "No prepared run was measured"
    speed = _chosen_words(found.chosen) if found.chosen else why
    subjects = f"{found.subjects[0].upper()}{found.subjects[1:]}; " if found.subjects else ""
    return f"{subjects}{speed}; {', '.join(parts) if parts else 'nothing else changed'}."


def _shown(outcome: Outcome) -> str:
    return outcome.upper() if outcome == "fail" else outcome


def _chosen_words(one: SpeedChange) -> str:
    if one.ratio is None:
        return f"The prepared run was measured in {'the new' if one.old_ns is None else 'the old'} report only"
    return ratio_sentence("The prepared run", one.ratio, "the old one")


def _sections(found: DifferenceData) -> Iterator[tuple[str, list[RenderableType]]]:
    if found.speeds:
        yield "Speed", _speeds(found)
    for title, calls in (("Calls added", found.added), ("Calls removed", found.removed)):
        if calls:
            yield f"{title} ({format_count(len(calls))})", _listed([_place(call) for call in calls])
    if found.moved:
        lines = [f"{_place(one.new)}: {_stream(one.old_stream)} -> {_stream(one.new_stream)}" for one in found.moved]
        meaning = note("streams that share most calls count as one, and are numbered as in the old plan")
        yield f"Calls on another stream ({format_count(len(lines))})", [*_listed(lines), meaning]
    if found.recosted:
        yield f"Calls of another cost ({format_count(len(found.recosted))})", _costs(found)
    for key, changes in found.changes.items():
        if changes:
            shown = (format_bytes, "unknown") if key == "memory" else (format_count, "none")
            yield _SECTIONS[key], [pairs((one.name, _change(one, *shown)) for one in changes)]
    notes = [one for one in found.notes if one != found.subjects]
    if notes:
        yield "Not compared", [bullet(one) for one in notes]


def _speeds(found: DifferenceData) -> list[RenderableType]:
    rows: list[list[str | RenderableType]] = []
    for one in found.speeds:
        colour = _UNDECIDED if one.verdict == "undecided" else _COLOURS.get(one.verdict, "")
        times = ["-" if ns is None else format_ns(ns) for ns in (one.old_ns, one.new_ns)]
        label = words(f"{label_plan(one.name)}\n{one.verdict}", colour, lines=True)
        ratio = words("\n".join(ratio_figures(one.ratio)) if one.ratio else "", colour, lines=True)
        rows.append([label, *times, ratio, _over_eager(one)])
    heads = (("run", ""), ("old", "r"), ("new", "r"), ("new over old", "r"), ("over eager", "r"))
    same = next((one.ratio.same for one in found.speeds if one.ratio), 1.0)
    notes = (
        f"speed, {INTERVAL}; between processes from {same - 1:.0%} on",
        "over eager: old, then new, each measured in turn with its own eager run",
    )
    return [make_table(heads, rows), *map(note, notes)]


def _over_eager(one: SpeedChange) -> Text:
    """Show both ratios, each muted where it is undecided."""
    pair = (one.old_over_eager, one.new_over_eager)
    shown = words("")
    for found in pair if any(pair) else ():
        style = _UNDECIDED if found and not found.decided else ""
        shown.append(f"{chr(10) if shown else ''}{' '.join(ratio_figures(found)) if found else '-'}", style)
    return shown


def _costs(found: DifferenceData) -> list[RenderableType]:
    rows: list[list[str | RenderableType]] = []
    for one in found.recosted[:_TOP]:
        change = f"{(one.new_ns / one.old_ns - 1):+.0%}" if one.old_ns else "-"
        times = [
            f"{format_ns(ns)}\n{format_ns(spread)}"
            for ns, spread in ((one.old_ns, one.old_spread_ns), (one.new_ns, one.new_spread_ns))
        ]
        colour = "red" if one.new_ns > one.old_ns else "green"
        rows.append([_place(one.new), *(words(time, lines=True) for time in times), words(change, colour)])
    total = sum(one.new_ns - one.old_ns for one in found.recosted)
    legend = "isolated costs; below each its interquartile range"
    notes = [_more(len(found.recosted)), legend, f"together {'+' if total > 0 else ''}{format_ns(total)}"]
    heads = (("call", ""), ("old", "r"), ("new", "r"), ("change", "r"))
    return [make_table(heads, rows), *map(note, filter(None, notes))]


def _listed(lines: Sequence[str]) -> list[RenderableType]:
    more = _more(len(lines))
    return [*(bullet(line) for line in lines[:_TOP]), *([note(more)] if more else [])]


def _more(count: int) -> str:
    return f"and {format_count(count - _TOP)} more" if count > _TOP else ""


def _place(call: Call) -> str:
    where = f" in {call.module}" if call.module else ""
    source = source_of(call)
    return f"{label_call(call)}{where}{f' ({source})' if source else ''}, call {format_count(call.index)}"


def _stream(stream: int | None) -> str:
    return "a new one" if stream is None else str(stream)


def _change(one: Change, shown: Callable[[int], str], missing: str) -> str:
    values = (shown(value) if isinstance(value, int) else value or missing for value in (one.old, one.new))
    return " -> ".join(values)
