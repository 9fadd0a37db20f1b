"""An earlier report beside a later one: its replay on the same axis, and what got slower since."""

from __future__ import annotations

from typing import Any

from nimble_core.utils.units import format_ns, format_ratio
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.call_matching import match_calls
from nimble_viz.analysis.diff import differences
from nimble_viz.analysis.labels import label_call, ratio_words
from nimble_viz.analysis.timeline import shown_timeline
from nimble_viz.report.data import ReportData

__all__ = ["beside"]

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
