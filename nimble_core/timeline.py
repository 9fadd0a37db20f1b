"""Timelines: what ran where and when, measured or simulated, eager or replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Lane", "Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: a host thread, a GPU stream of an eager run, a stream or worker of a replay."""

    name: str
    kind: Literal["host", "gpu", "stream", "worker"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Args:
        lane: index into ``Timeline.lanes``.
        start_ns: nanoseconds since the start of the timeline.
        end_ns: likewise; never before ``start_ns``.
        call: index of the call it belongs to, None if none.
        name: kernel or operator.
    """

    lane: int
    start_ns: float
    end_ns: float
    call: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one run.

    Args:
        run: ``"eager"`` or the name of the schedule that was replayed.
        source: ``"measured"`` or ``"simulated"``.
        clock: how times were taken, in words (``"CUPTI activity"``, ``"host clock"``, ``"torch.profiler"``).
        lanes: the rows.
        spans: sorted by start.
        profiled_ns: wall time of the profiled run; 0 if unknown.
        unprofiled_ns: median wall time of the same run without a profiler; 0 if unknown.
        reliable: False if the self-check (kernels seen = nodes expected) failed.
        note: what the reader should know.
    """

    run: str
    source: Literal["measured", "simulated"]
    clock: str
    lanes: tuple[Lane, ...]
    spans: tuple[Span, ...]
    profiled_ns: float = 0.0
    unprofiled_ns: float = 0.0
    reliable: bool = True
    note: str = ""

    @property
    def length_ns(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_ns for span in self.spans) - min(span.start_ns for span in self.spans)
