"""What had to wait for what: synchronisations of each plan, and of the host in eager."""

from __future__ import annotations

from typing import Any

from nimble_core.ir.schedule import Schedule
from nimble_core.utils.units import format_count, format_ns
from nimble_viz.analysis.labels import plural
from nimble_viz.report.data import ReportData

__all__ = ["COUNTS", "ENDS", "hint", "host_syncs", "promise"]

COUNTS = (
    ("full", "Full DAG", "hazard edges whose ends are on different streams: what waiting on every hazard costs"),
    ("meg", "MEG", "edges of the minimum equivalent graph whose ends are on different streams"),
    ("planned", "Planned", "waits in the schedule"),
    ("emitted", "Emitted", "cross-stream edges read back from the captured graph"),
)
"""The four counts of synchronisations: key, name, definition. Fork and join of the capture stream are apart."""

ENDS = (
    ("forks", "Fork", "nodes that wait for no call: the streams that start at once, the capture stream included"),
    ("joins", "Join", "nodes that nothing waits for: the streams that the end of the graph joins"),
    ("inside", "Inside calls", "edges between nodes of one call: what the call itself orders"),
    ("ahead", "Launched ahead", "kernels launched while what they wait for still runs; each waits by itself"),
)
"""What else the captured graph holds, counted apart: key, name, definition."""

_READS = ("item", "local_scalar", "is_nonzero")
_HINTS = (
    (("print(",), "printing a tensor waits and reads it value by value: print less often, or after the loop"),
    (_READS, "keep the value on the device, or read it once after the loop"),
    (("memcpy", "copy", "to(", ".cpu"), "use pinned memory and non_blocking=True, or move the copy out of the model"),
    (("devicesynchronize",), "waits for every stream: wait on an event of the stream that matters instead"),
    (("streamsynchronize", "eventsynchronize"), "a value was needed on the host: see what reads it on this line"),
    (("nonzero", "unique", "masked_select"), "its shape depends on data: use a fixed-size variant (torch.where)"),
)


def promise(plan: Schedule) -> dict[str, Any] | None:
    """Say whether the captured graph holds the promised waits, else the planned ones; None if it was not read."""
    emitted = plan.counts.emitted
    if emitted is None:
        return None
    if plan.minimum_syncs:
        due = plan.meg_edges - plan.matched
        sum_ = f"|E'| - |M| = {format_count(plan.meg_edges)} - {format_count(plan.matched)} = {format_count(due)}"
        words = "promised", f"promised: {sum_}"
    else:
        due = plan.counts.planned
        words = "planned", f"planned: {format_count(due)}"
    if emitted == due:
        return {"kept": True, "text": f"emitted as {words[1]}"}
    more = f"{plural(abs(emitted - due), 'wait')} {'more' if emitted > due else 'fewer'} than {words[0]}"
    return {"kept": False, "text": f"emitted {format_count(emitted)}, {more} ({words[1].partition(': ')[2]})"}


def hint(kind: str, phase: str = "") -> str:
    """Say what to do about a host synchronisation of this kind, in this phase of a training step."""
    lowered = kind.lower()
    if phase == "optimizer" and any(word in lowered for word in _READS):
        return "the optimizer reads its own state: fused=True, where it has that, or capturable=True"
    for words, advice in _HINTS:
        if any(word in lowered for word in words):
            return advice
    return "see what on this line needs a value on the host"


def host_syncs(report: ReportData) -> list[dict[str, Any]] | None:
    """Host synchronisations of the eager run, longest first; None if eager was not profiled."""
    if report.overhead is None:
        return None
    rows = sorted(report.overhead.host_syncs, key=lambda sync: (-sync.total_ns, sync.source, sync.kind, sync.phase))
    return [
        {
            "kind": sync.kind,
            "count": sync.count,
            "total": format_ns(sync.total_ns),
            "source": sync.source,
            "phase": sync.phase,
            "hint": hint(sync.kind, sync.phase),
        }
        for sync in rows
    ]
