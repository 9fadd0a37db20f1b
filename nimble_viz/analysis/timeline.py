"""Gantt lanes of the eager run and of each replay, for one common axis, and what they show in figures.

A lane is as long as the run was under the profiler. No speed-up is read off it: that is what measurements without a
profiler are for, so every run states both lengths, and is marked where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.utils.units import format_count, format_ns, format_ratio
from nimble_viz.analysis.gaps import Gap, longest_gaps, lost, replay_gaps, stream_times
from nimble_viz.analysis.intervals import covered
from nimble_viz.analysis.labels import about, doubt_of, label_run, planned, share_rows
from nimble_viz.analysis.limit import in_flight
from nimble_viz.analysis.overhead import IDLE
from nimble_viz.analysis.phases import span_phases
from nimble_viz.report.data import ReportData

__all__ = ["DISTORTION_BOUND", "axis_note", "device_idle", "distorted", "distortion", "shown_timeline", "timelines"]

DISTORTION_BOUND = 1.2
"""A profiled run so many times longer or shorter than the unprofiled one, beyond what that varies by, is distorted."""

_LONGEST_GAPS = 8
_AS_IT_IS = ("source", "clock", "length_ns", "profiled_ns", "unprofiled_ns", "reliable", "note")


def timelines(report: ReportData) -> list[dict[str, Any]]:
    """Describe each timeline, eager first; spans and gaps are columns, whole ns from that run's first start.

    A replay that failed its self-check has no gaps: where kernels are missing, nothing can be said about the time
    between them.
    """
    return [shown_timeline(report, line) for line in sorted(report.timelines, key=lambda line: line.run != "eager")]


def shown_timeline(report: ReportData, line: Timeline) -> dict[str, Any]:
    """Describe one timeline."""
    length, found = _drawn(line), replay_gaps(report, line)
    own: list[list[Span]] = [[] for _ in line.lanes]
    for span in line.spans:
        own[span.lane].append(span)
    return {
        "run": line.run,
        "label": label_run(report, line.run),
        **{name: getattr(line, name) for name in _AS_IT_IS},
        "idle": device_idle(report, line),
        "distorted": distorted(report, line),
        "distortion": _distortion_words(report, line),
        "lengths": _lengths(report, line),
        "marks": _marks(report, line),
        "facts": _facts(report, line, found),
        "longest": longest_gaps(report, line, found, _LONGEST_GAPS),
        "lanes": [
            {"name": lane.name, "kind": lane.kind, "idle": _idle(length, inside) if _on_device(lane) else None}
            for lane, inside in zip(line.lanes, own, strict=True)
        ],
        "gaps": _gap_columns(found, line.spans),
        "columns": _span_columns(report, line),
    }


def _span_columns(report: ReportData, line: Timeline) -> dict[str, list[Any]]:
    """Spans as columns; whole nanoseconds from the first start."""
    spans = line.spans
    zero = min((span.start_ns for span in spans), default=0.0)
    return {
        "lane": [span.lane for span in spans],
        "start": [round(span.start_ns - zero) for span in spans],
        "length": [round(span.end_ns - zero) - round(span.start_ns - zero) for span in spans],
        "call": [-1 if span.call is None else span.call for span in spans],
        "name": [span.name for span in spans],
        "phase": span_phases(report, line),
        "stream": list(line.streams),
    }


def axis_note(report: ReportData) -> str:
    """Say what may be compared along the axis: clocks, and what is simulated; empty without a timeline."""
    measured = [line for line in report.timelines if line.source == "measured"]
    if not report.timelines:
        return ""
    said = []
    if measured:
        on_gpu = any(lane.kind in ("gpu", "stream") for line in measured for lane in line.lanes)
        clocks = "the GPU's clock, through CUPTI or torch.profiler" if on_gpu else "the host's clock"
        said.append(f"{'Kernels of all runs' if on_gpu else 'All runs'} are timed by {clocks}")
    annotated = [label_run(report, line.run) for line in measured if line.clock.startswith("Nsight Systems")]
    if annotated:
        said.append(f"{', '.join(annotated)} in a run of its own, by Nsight Systems")
    simulated = [label_run(report, line.run) for line in report.timelines if line.source == "simulated"]
    if simulated:
        said.append(f"SIMULATED, not measured: {', '.join(simulated)}")
    speed = "" if planned(report) else "; lanes are as long as under the profiler: speed-ups are measured without it"
    return f"{'; '.join(said)}{speed}"


def distortion(line: Timeline) -> float:
    """Return how many times longer the profiled run was than the unprofiled one; 0 if either is unknown."""
    return _length(line) / line.unprofiled_ns if line.unprofiled_ns else 0.0


def distorted(report: ReportData, line: Timeline) -> bool:
    """Tell whether the profiled run is no measure of the unprofiled one, beyond what the latter varies by."""
    factor, most = distortion(line), DISTORTION_BOUND * (1 + doubt_of(report.measurement(line.run)))
    return bool(factor) and not (factor * most >= 1 and factor <= most)  # a damaged file may give 0


def device_idle(report: ReportData, line: Timeline) -> float:
    """Return the share of a run's length during which no stream of the device did anything.

    Of a replay from its first start to its last end; of the profiled eager run ``OverheadProfile.device_idle_share``,
    as only the profile knows what is the operators' own work on the host.
    """
    if line.run == "eager" and report.overhead is not None:
        return report.overhead.device_idle_share
    return _idle(_drawn(line), (span for span in line.spans if _on_device(line.lanes[span.lane])))


def _on_device(lane: Lane) -> bool:
    """Tell whether a lane shows what the device does, not the host."""
    return lane.kind != "host"


def _length(line: Timeline) -> float:
    return line.profiled_ns or line.length_ns


def _drawn(line: Timeline) -> float:
    """Return the length that idle shares refer to."""
    return _length(line) if line.run == "eager" else line.length_ns


def _idle(length: float, spans: Iterable[Span]) -> float:
    """Return the share of ``length`` in which none of the spans ran."""
    busy = covered((span.start_ns, span.end_ns) for span in spans)
    return round(max(0.0, 1 - busy / length), 4) if length else 1.0


def _lengths(report: ReportData, line: Timeline) -> str:
    """Say both lengths of a run."""
    taken = "simulated" if line.source == "simulated" else "profiled"
    profiled = f"{format_ns(_length(line))} {taken}"
    if not line.unprofiled_ns:
        return f"{profiled}, unprofiled length unknown"
    factor = about(format_ratio(distortion(line)), doubt_of(report.measurement(line.run)))
    return f"{profiled}, {format_ns(line.unprofiled_ns)} unprofiled ({factor})"


def _marks(report: ReportData, line: Timeline) -> list[str]:
    marks = []
    if not line.reliable:
        marks.append("UNRELIABLE: " + (line.note or "the self-check failed"))
    if line.source == "simulated":
        marks.append("SIMULATED, not measured")
    if distorted(report, line):
        marks.append(f"DISTORTED: {_distortion_words(report, line)}")
    return marks


def _distortion_words(report: ReportData, line: Timeline) -> str:
    """Say how the profiled run's length differs, and whether the calls as drawn do; empty if not distorted."""
    if not distorted(report, line):
        return ""
    factor = about(format_ratio(distortion(line)), doubt_of(report.measurement(line.run)))
    words = f"the profiled run is {factor} of the unprofiled one"
    if line.run != "eager" and line.profiled_ns > line.unprofiled_ns >= line.length_ns:
        words += ", because launching it took longer: its calls, as drawn, do not"
    return words


def _facts(report: ReportData, line: Timeline, found: list[Gap]) -> list[tuple[str, str]]:
    facts = []
    if line.check is not None:
        by = f", told by {line.check.by}" if line.check.by else ""
        seen, expected = format_count(line.check.seen), format_count(line.check.expected)
        facts.append(("Self-check", f"{seen} kernels seen, {expected} nodes expected{by}"))
    if line.run != "eager" and not line.reliable:
        facts.append(("Gaps, calls in flight", "not derived: kernels are missing"))
        return facts
    on_device = any(_on_device(lane) for lane in line.lanes)
    if on_device and line.spans:
        most, mean = in_flight(line)
        facts.append(("In flight", f"{most} at most, {mean:.2f} on average"))
    spent = ", ".join(f"{row['name']} {row['share']}" for row in _lost(report, line, found))
    if spent:
        facts.append(("Time of the device" if line.run == "eager" else "Time of its streams", spent))
    return facts


def _lost(report: ReportData, line: Timeline, found: list[Gap]) -> list[dict[str, Any]]:
    """Say what the device's time went to: of a replay by stream, of an eager run by the profile of its overhead."""
    if line.run != "eager":
        plan = report.schedule(line.run)
        return lost(stream_times(found, line)) if plan is not None and line.reliable else []
    profile = report.overhead
    if profile is None or profile.idle is None:
        return []
    idle = [(name.partition(",")[0], getattr(profile.idle, key), meaning) for key, name, meaning in IDLE]
    return share_rows([("busy", profile.device_busy_ns, "a kernel was running"), *idle])


def _gap_columns(found: list[Gap], spans: Sequence[Span]) -> dict[str, list[int]]:
    """Return gaps before calls as columns; what is neither ``launch`` nor ``wait`` of one: nothing was ready."""
    place = {(span.lane, span.start_ns, span.call): at for at, span in reversed(list(enumerate(spans)))}
    shown = [gap for gap in found if gap.call is not None]
    return {
        "span": [place[gap.lane, gap.end_ns, gap.call] for gap in shown],
        "awaited": [-1 if gap.awaited is None else gap.awaited for gap in shown],
        "launch": [round(gap.launch_ns) for gap in shown],
        "wait": [round(gap.wait_ns) for gap in shown],
    }
