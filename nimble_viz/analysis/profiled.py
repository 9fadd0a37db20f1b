"""Code that nobody wrapped: what its iterations are bound by, and what such a report cannot show."""

from __future__ import annotations

from typing import Any

from nimble_core.utils.units import format_ns, format_percent
from nimble_viz.analysis.labels import about, doubt_of, plural
from nimble_viz.report.data import ReportData

__all__ = ["ABSENT", "BOUNDS", "profiled", "profiled_verdict"]

BOUNDS = {
    "input": ("input-bound", "waiting for the data loader or copying inputs, the device idle meanwhile"),
    "device": ("device-bound", "the device at work"),
    "host": ("host-bound", "the device idle while the host runs Python, dispatches and launches"),
}
"""What an iteration can be bound by: key, verdict, meaning."""

ABSENT = (
    ("Streams, plans and the operator DAG", "a profile sees operators go by, not the tensors that make them wait"),
    ("Replays, their speed and equality with eager", "nothing was captured: compare(model, inputs) does that"),
    ("Costs, critical path and limit", "calls were not timed one by one"),
)
"""Views that need an engine, and why a profile has none of them."""


def profiled(report: ReportData) -> dict[str, Any] | None:
    """Say what an iteration is spent on and bound by, and what is absent; None if this is no profile.

    Shares are of an iteration without the profiler where such were timed, else of the profiled one. Of the former the
    loader's wait was timed; a GPU's work is what the profiler saw, and the rest is the host's; without a GPU the rest
    is split as under the profiler.
    """
    taken = report.sampling
    if taken is None:
        return None
    ns, basis = _spent(report)
    total = sum(ns.values()) or 1.0
    most = max(ns, key=lambda key: ns[key])
    host = report.environment.device != "cuda"
    rows = [
        {
            "name": key,
            "ns": ns[key],
            "text": format_ns(ns[key]),
            "share": format_percent(ns[key] / total),
            "meaning": _meaning(key, host),
        }
        for key in BOUNDS
    ]
    facts = [
        ("What was profiled", taken.subject),
        ("One iteration is", taken.iteration),
        ("Iterations that went by", f"{taken.seen:,}" if taken.seen else "unknown"),
        ("Timed without the profiler", f"{taken.timed:,}" if taken.timed else "none"),
        ("Profiled", f"{taken.profiled:,}, the one of median length is shown"),
    ]
    timed = report.measurement("eager")
    if timed:
        facts.append(("Without the profiler", f"{format_ns(timed.median_ns)}, spread {format_percent(timed.spread)}"))
    if taken.loader_ns >= 0:
        facts.append(("Wait for the data loader, without the profiler", format_ns(taken.loader_ns)))
    return {
        "bound": most,
        "verdict": _name(most, host),
        "basis": basis,
        "rows": rows,
        "facts": facts,
        "absent": [{"what": what, "why": why} for what, why in ABSENT],
    }


def profiled_verdict(report: ReportData) -> str:
    """Say in one sentence how long an iteration takes and what it is bound by."""
    found, taken = profiled(report), report.sampling
    if found is None or taken is None:
        return ""
    profile, timed = report.overhead, report.measurement("eager")
    if timed:
        length = about(format_ns(timed.median_ns), doubt_of(timed))
        length += f" (median of {plural(taken.timed, 'iteration')}, without the profiler)"
    else:
        length = f"{format_ns(profile.profiled_ns if profile else 0.0)} under the profiler"
    shares = {row["name"]: f"{row['share']} ({row['text']})" for row in found["rows"]}
    work = "the device at work" if report.environment.device == "cuda" else "computing"
    what = {"input": "input", "device": work, "host": "the host's own"}
    order = sorted(shares, key=lambda name: name != found["bound"])
    spent = ", ".join(f"{shares[name]} {what[name]}" for name in order)
    doubts = [f"unstable ({warning})" for warning in (timed.warnings[:1] if timed else ())]
    syncs = sum(sync.count for sync in profile.host_syncs) if profile else 0
    if syncs and report.environment.device == "cuda":
        doubts.append(f"the host is made to wait {'once' if syncs == 1 else f'{syncs:,} times'} an iteration")
    return "; ".join([f"{taken.iteration} takes {length}", f"{found['verdict']}: {spent}", *doubts]) + "."


def _spent(report: ReportData) -> tuple[dict[str, float], str]:
    taken, timed = report.sampling, report.measurement("eager")
    assert taken is not None
    bound = taken.bound
    if timed is None or timed.median_ns <= 0:
        return {"input": bound.input_ns, "device": bound.device_ns, "host": bound.host_ns}, "of the profiled iteration"
    total, loader = timed.median_ns, bound.input_ns
    if taken.loader_ns >= 0 and report.overhead is not None:
        waited = sum(one.host_ns for one in report.overhead.phases if one.phase == "loader")
        loader = taken.loader_ns + max(0.0, bound.input_ns - waited)
    fed = min(loader, total)
    busy = min(bound.device_ns, total - fed)
    if report.environment.device != "cuda":  # the profiler slows what it sees there, and operators are part of it
        busy = (total - fed) * bound.device_ns / ((bound.device_ns + bound.host_ns) or 1.0)
    return {"input": fed, "device": busy, "host": total - fed - busy}, "of an iteration without the profiler"


def _name(key: str, host: bool) -> str:
    return "compute-bound" if host and key == "device" else BOUNDS[key][0]


def _meaning(key: str, host: bool) -> str:
    if host and key == "device":
        return "the operators' own computing, estimated"
    if host and key == "host":
        return "Python, dispatch and allocation"
    return BOUNDS[key][1]
