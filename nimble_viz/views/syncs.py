"""What had to wait for what: synchronisations of each plan, and of the host in eager."""

from __future__ import annotations

from typing import Any

from nimble_core.units import format_ns
from nimble_viz.report import Report

__all__ = ["COUNTS", "hint", "host_syncs"]

COUNTS = (
    ("full", "Full DAG", "hazard edges whose ends are on different streams: what waiting on every hazard costs"),
    ("meg", "MEG", "edges of the minimum equivalent graph whose ends are on different streams"),
    ("planned", "Planned", "waits in the schedule"),
    ("emitted", "Emitted", "cross-stream edges read back from the captured graph"),
)
"""The four counts of synchronisations: key, name, definition. Fork and join of the capture stream are apart."""

_HINTS = (
    (("item", "local_scalar", "_is_nonzero"), "keep the value on the device, or read it once after the loop"),
    (("memcpy", "copy", "to(", ".cpu"), "use pinned memory and non_blocking=True, or move the copy out of the model"),
    (("devicesynchronize",), "waits for every stream: wait on an event of the stream that matters instead"),
    (("streamsynchronize", "eventsynchronize"), "a value was needed on the host: see what reads it on this line"),
    (("nonzero", "unique", "masked_select"), "its shape depends on data: use a fixed-size variant (torch.where)"),
)


def hint(kind: str) -> str:
    """What to do about a host synchronisation of this kind."""
    lowered = kind.lower()
    for words, advice in _HINTS:
        if any(word in lowered for word in words):
            return advice
    return "see what on this line needs a value on the host"


def host_syncs(report: Report) -> list[dict[str, Any]] | None:
    """Host synchronisations of the eager run, longest first; None if eager was not profiled."""
    if report.overhead is None:
        return None
    rows = sorted(report.overhead.host_syncs, key=lambda sync: (-sync.total_ns, sync.source, sync.kind))
    return [
        {
            "kind": sync.kind,
            "count": sync.count,
            "total": format_ns(sync.total_ns),
            "source": sync.source,
            "hint": hint(sync.kind),
        }
        for sync in rows
    ]
