"""What changed between two reports, and whether one is good enough: as values that show themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType

from nimble_core.utils.errors import InputError
from nimble_viz.analysis.diff import DifferenceData, differences, environment_changes, subjects
from nimble_viz.analysis.gate import GateData, Rules, judge
from nimble_viz.render.layout import plain
from nimble_viz.render.verdict_text import difference_text, gate_text
from nimble_viz.report.data import ReportData

__all__ = ["Difference", "Gate", "Reports", "diff", "gate"]


class _Shown:
    """Shows itself as text, in a terminal and in a notebook."""

    __slots__ = ()

    @classmethod
    def of(cls, data: Any) -> Self:
        """Make the same values show themselves."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(data)})

    def to_text(self, width: int | None = None) -> str:
        """Return plain text, ``width`` columns wide (60 to 200; None: the terminal's)."""
        return plain(_text(self), width)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.to_text(100)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield _text(self)


@dataclass(frozen=True, slots=True, repr=False)
class Difference(_Shown, DifferenceData):
    """What changed from one report to another: its fields are those of ``DifferenceData``."""


@dataclass(frozen=True, slots=True)
class Gate(_Shown, GateData):
    """All verdicts on one report: its fields are those of ``GateData``."""


def _text(shown: object) -> RenderableType:
    if isinstance(shown, DifferenceData):
        return difference_text(shown)
    assert isinstance(shown, GateData)
    return gate_text(shown)


Reports = ReportData | Sequence[ReportData]
"""One, or several of the same model, each measured in a process of its own."""


def diff(old: Reports, new: Reports) -> Difference:
    """Compare ``old`` with ``new`` (``differences``); three reports a side tell smaller differences.

    Raises:
        InputError: no report, something else, or reports of one side that are of different models or environments.
    """
    return Difference.of(differences(_several(old), _several(new)))


def gate(
    report: Reports,
    rules: Rules | None = None,
    *,
    baseline: Reports | None = None,
    any_environment: bool = False,
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
