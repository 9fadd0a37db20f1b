"""Timelines: what ran where and when, measured or simulated, eager or replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nimble_core.ir.costs import Costs

__all__ = ["Lane", "Observation", "SelfCheck", "Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: a host thread, a GPU stream of an eager run, a stream of a replay (host: worker)."""

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
class SelfCheck:
    """Whether every node of a captured graph was seen in every watched replay, and how they were told.

    Args:
        expected: nodes that a replay runs.
        seen: of them seen in every replay.
        by: ``"graph node id"``, or empty if nothing was seen.
        unexpected: kernels and copies that no node explains, over all replays.
    """

    expected: int
    seen: int
    by: Literal["graph node id", ""] = ""
    unexpected: int = 0

    @property
    def passed(self) -> bool:
        """Whether kernels seen and nodes expected are the same."""
        return 0 < self.expected == self.seen and not self.unexpected


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
        streams: the device's own number of the stream on which it ran each span; empty if unknown. The lanes of a
            replay are the planned streams: a driver may spread them over its streams as it likes.
        check: what ``reliable`` rests on; None where every span was timed by ourselves.
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
    streams: tuple[int, ...] = ()
    check: SelfCheck | None = None

    @property
    def length_ns(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_ns for span in self.spans) - min(span.start_ns for span in self.spans)


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of the replays of one executable: when each call ran, and what each costs."""

    timeline: Timeline
    costs: Costs
