"""The plans that were tried before one was chosen, and why the others were not."""

from __future__ import annotations

import math
from typing import Any

from nimble_core.ir.candidates import Candidate
from nimble_core.ir.measurement import Measurement, Ratio, across, ratio
from nimble_core.utils.units import format_bytes, format_ns
from nimble_viz.analysis.compared import time_doubt
from nimble_viz.analysis.labels import error_text, label_plan, plural, ratio_words
from nimble_viz.analysis.tables import cell, number, ratio_cell, row, table, words
from nimble_viz.report.data import ReportData

__all__ = ["candidates"]


def candidates(report: ReportData) -> dict[str, Any] | None:
    """Describe a table of the chosen plan, then the others by median, and say why some were not captured.

    All are compared with the one-stream replay, of eager's kernels if that was measured. None where there was no
    choice.
    """
    found = report.candidates
    if len(found) < 2:
        return None
    tried = sorted(
        (one for one in found if not _never_captured(one)),
        key=lambda one: (not one.chosen, one.measurement.median_ns if one.measurement else math.inf),
    )
    rest = sorted((one for one in found if _never_captured(one)), key=lambda one: one.simulated_ns)
    single = _single(report)
    fused = any(one.fuse != "none" for one in found)
    over = "Over eager's one stream" if fused and single and single.fuse == "none" else "Over one stream"
    return table(
        "Plans that were tried",
        [
            words("Plan"), number("Median"), number(over, page=True), number("Prepared in"), number("Break-even"),
            number("Simulated", page=True), number("Memory", page=True),
            words("Outputs", page=True), words("Outcome"),
        ],
        [_row(report, one, single) for one in tried],
        about="Captured while preparing, compared with eager, and timed in turn. Prepared in: making the kernels and "
        "capturing; break-even: after so many calls all that preparing with this plan takes is won back over eager. "
        "A plan whose outputs differ cannot be chosen.",
        below=[
            _folded([one for one in rest if one.note == note]) for note in dict.fromkeys(one.note for one in rest)
        ],
    )  # fmt: skip


def _single(report: ReportData) -> Candidate | None:
    """Find the measured one-stream candidate, of eager's kernels if there is one."""
    ones = [one for one in report.candidates if one.measurement and one.name.rpartition(", ")[2] == "single"]
    return min(ones, key=lambda one: one.fuse != "none", default=None)


def _never_captured(one: Candidate) -> bool:
    """Tell whether a plan was left aside by choice; one that failed is shown by itself."""
    tried = one.chosen or one.measurement is not None or one.check is not None or one.capture_s > 0
    return not tried and one.note.startswith("not captured")


def _row(report: ReportData, one: Candidate, single: Candidate | None) -> dict[str, Any]:
    taken, check = one.measurement, one.check
    wrong = check is not None and check.differs
    base = single.measurement if single and single.name != one.name and not wrong else None
    over = ratio(taken, base) if taken and base else None
    cost_s = one.fuse_s + one.capture_s
    # To choose is to time candidates, which a report does for long, and who follows its plan does not.
    whole_s = sum(step.seconds for step in report.preparation if step.name != "choose")
    size = f"{plural(one.streams, 'stream')}, {plural(one.syncs, 'sync')}" if one.streams else ""
    tags = [("chosen", "good")] * one.chosen + [("unstable", "bad")] * (taken is not None and not taken.stable)
    outputs = "not compared" if check is None else "differ" if wrong else "equal" if check.passed else "not shown"
    return row(
        cell(label_plan(one.name), size, tags=tags + [("outputs differ", "bad")] * wrong),
        format_ns(taken.median_ns) if taken else "",
        ratio_cell(over),
        format_ns(cost_s * 1e9) if cost_s else "",
        "" if wrong else _pays(_over_eager(report, one), max(cost_s, whole_s), report.measurement("eager")),
        format_ns(one.simulated_ns) if one.simulated_ns else "",
        format_bytes(one.nbytes) if one.nbytes else "",
        cell(outputs, f"error {error_text(check.error)}" if check else "", "good" * (outputs == "equal")),
        cell(_outcome(report, one), time_doubt(over, taken, base), "bad" * wrong),
        void=wrong,
    )


def _over_eager(report: ReportData, one: Candidate) -> Ratio | None:
    eager = report.measurement("eager")
    if report.measurement(one.name) or not (one.measurement and eager):
        return report.ratio(one.name)
    return across(one.measurement, eager)


def _pays(over: Ratio | None, cost_s: float, baseline: Measurement | None) -> str:
    """Say when a plan breaks even: ``"1,234 calls"``, ``"never"``, …; empty where either was not measured."""
    if over is None or baseline is None:
        return ""
    if over.verdict != "faster":
        return "never" if over.decided else "undecided"
    gain_ns = baseline.median_ns * (1 - 1 / over.value)
    calls = math.ceil(max(cost_s, 0.0) * 1e9 / gain_ns)
    return plural(calls, "call") if calls else "at once"


def _outcome(report: ReportData, one: Candidate) -> str:
    """Return ``"chosen"``, or why the plan was not."""
    if one.chosen:
        return "chosen"
    if one.check is not None and one.check.differs:
        return "outputs differ from eager's"
    if one.note:
        return one.note
    # The comparison measures the finalists again, and chooses by that; else what tuning measured counts.
    taken, best = report.measurement(one.name), report.measurement(report.chosen)
    again = " when measured again"
    if taken is None or best is None:
        again = ""
        chosen = next((other for other in report.candidates if other.chosen), None)
        taken, best = one.measurement, chosen.measurement if chosen else None
    if one.measurement is None:
        return "not measured"
    if taken is None or best is None:
        return "not chosen"
    return f"{ratio_words(ratio(taken, best), 'the chosen plan')}{again}"


def _folded(members: list[Candidate]) -> str:
    times = [one.simulated_ns for one in members if one.simulated_ns]
    low, high = (format_ns(min(times)), format_ns(max(times))) if times else ("", "")
    span = f" ({low if low == high else f'{low} to {high}'})" if times else ""
    return f"{plural(len(members), 'plan')} more, {members[0].note}{span}"
