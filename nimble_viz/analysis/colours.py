"""What the colour of the graph can stand for: streams, exposed overhead, time, phases; and the figures of each call."""

from __future__ import annotations

from collections import Counter

from nimble_viz.analysis.labels import plural, trains
from nimble_viz.report.data import ReportData

__all__ = ["colours", "exposed"]


def colours(report: ReportData) -> list[dict[str, str]]:
    """List what calls can be coloured by, in the order in which it is offered.

    A row has ``key`` (``"stream"``, ``"exposed"``, ``"time"`` or ``"phase"``), ``name``, ``meaning``, ``unknown`` (what
    to say of calls without a value; empty where each has one) and ``why`` (a few words where no call has one or all
    have the same, so that there is nothing to see; else empty).
    """
    serial = report.environment.device != "cuda"
    found = exposed(report)
    missing = sum(value < 0 for value in found)
    of_eager = "" if report.eager is None else "; of the eager calls that a call stands for"
    rows = [
        ("stream", "Stream", "the stream that the schedule puts each call on", "", ""),
        (
            "exposed",
            "Exposed overhead",
            f"overhead of profiled eager during which the device was idle{of_eager}",
            f"{plural(missing, 'call')} not among those of profiled eager" if missing else "",
            "" if missing < len(found) else "not in the profile" if report.overhead else "eager was not profiled",
        ),
        (
            "time",
            "Time" if serial else "GPU time",
            "each call alone, with nothing beside it",
            "",
            "not measured" if report.costs.source == "uniform" else "",
        ),
        ("phase", "Phase", "the part of a training step", "", "" if trains(report) else "all calls are forward"),
    ]
    return [dict(zip(("key", "name", "meaning", "unknown", "why"), row, strict=True)) for row in rows]


def exposed(report: ReportData) -> list[int]:
    """Return the exposed overhead of each call in profiled eager, whole ns; -1 where it is not known.

    A call that stands for eager calls has theirs together. An eager call that several stand for is shared out among
    them equally, so that no sum over calls counts it twice. O(calls + eager calls).
    """
    found, together = (report.overhead.calls, report.overhead.shared) if report.overhead else ((), ())
    known: dict[int, float] = {row.call: row.exposed_ns for row in found if row.call not in together}
    if report.eager is None:
        return [round(known.get(call.index, -1)) for call in report.program.calls]
    own = [dict.fromkeys(call.eager) for call in report.program.calls]
    shared: Counter[int] = Counter(index for indices in own for index in indices)
    profiled = [[index for index in indices if index in known] for indices in own]
    return [round(sum(known[k] / shared[k] for k in indices)) if indices else -1 for indices in profiled]
