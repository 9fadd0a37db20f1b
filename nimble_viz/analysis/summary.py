"""The summary of a report: its first screen, and the tables behind it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.costs import limit_ns
from nimble_core.ir.measurement import Measurement, Ratio
from nimble_core.ir.schedule import Schedule
from nimble_core.utils.units import format_count, format_ns, format_percent, format_ratio
from nimble_viz.analysis.advice import advice_data, best_run
from nimble_viz.analysis.candidates import candidates
from nimble_viz.analysis.compared import beaten, over_one_stream, over_peer
from nimble_viz.analysis.concurrency import graph_width, observed
from nimble_viz.analysis.disturbance import disturbances, why_undecided
from nimble_viz.analysis.labels import (
    about,
    context,
    error_text,
    label_run,
    planned,
    plural,
    ratio_cell,
    ratio_sentence,
)
from nimble_viz.analysis.limit import distance, distance_doubt, limit
from nimble_viz.analysis.live_memory import memory
from nimble_viz.analysis.overhead import computing
from nimble_viz.analysis.phases import phases, profiled
from nimble_viz.analysis.provenance import provenance
from nimble_viz.analysis.syncs import promise
from nimble_viz.analysis.tiles import tiles
from nimble_viz.report.data import EAGER_ALONE, PeerResult, ReportData

__all__ = ["peers", "summary"]

_COMPUTING = 10


def summary(report: ReportData) -> dict[str, Any]:
    """Return the tables of the summary; what is shown is text, times that are drawn come in nanoseconds too."""
    best = best_run(report)
    return {
        "model": report.model,
        "tiles": tiles(report),
        "context": context(report),
        "host": report.environment.device != "cuda",
        "complete": report.complete,
        "planned": planned(report),
        "profiled": profiled(report),
        "computing": _computing(report),
        "chosen": report.chosen,
        "speed": [_speed(report, taken) for taken in report.measurements],
        "peers": peers(report, best),
        "phases": phases(report),
        "best": label_run(report, best) if best else "",
        "limit": limit(report, best) if best else None,
        "advice": advice_data(report),
        "provenance": provenance(report),
        "checks": [
            {
                "run": label_run(report, check.name),
                "error": error_text(check.error),
                "tolerance": error_text(check.tolerance),
                "effect": error_text(check.input_effect),
                "passed": check.passed,
                "differs": check.differs,
                "reason": check.reason,
                "reference": _reference(check),
            }
            for check in report.checks
        ],
        "preparation": [
            {"name": step.name, "ns": step.seconds * 1e9, "text": format_ns(step.seconds * 1e9)}
            for step in report.preparation
        ],
        "preparation_total": format_ns(sum(step.seconds for step in report.preparation) * 1e9),
        "candidates": candidates(report),
        "plans": [_plan(report, plan) for plan in report.schedules],
        "width": graph_width(report.graph)[1],
        "facts": _facts(report),
        "environment": _environment(report),
        "memory": memory(report),
        "warnings": _warnings(report),
    }


def _computing(report: ReportData) -> dict[str, Any] | None:
    """Tables of what computes longest in a profile, by operator and by module; None of other reports."""
    if report.sampling is None or report.overhead is None:
        return None
    tables = []
    for by, rows in (("operator", computing(report, "operator")), ("module", computing(report, "module"))):
        shown = [
            {
                "name": row["name"],
                "calls": row["calls"],
                "ns": row["work"],
                "time": format_ns(row["work"]),
                "share": format_percent(row["share"]),
                "overhead": format_ns(row["overhead"]),
                "sizes": row["sizes"],
            }
            for row in rows[:_COMPUTING]
        ]
        more, ns = len(rows) - _COMPUTING, sum(row["work"] for row in rows[_COMPUTING:])
        rest = f"and {plural(more, by)} more, {format_ns(ns)} together" if more > 0 else ""
        tables.append({"by": by, "rows": shown, "rest": rest})
    return {"time": "GPU time" if report.environment.device == "cuda" else "computing", "tables": tables}


def _reference(check: EqualityCheck) -> str:
    """Say what the error is measured against, where that is not eager itself."""
    if check.reference == "eager":
        return ""
    return (
        f"error against the model in {check.reference}, where eager's own is {error_text(check.eager_error)}; "
        f"against eager {error_text(check.relative_error)}"
    )


def _speed(report: ReportData, taken: Measurement) -> dict[str, Any]:
    peer = next((one for one in report.peers if one.name == taken.name), None)
    wrong = peer is not None and peer.check is not None and peer.check.differs
    compared = taken.name != "eager" and bool(report.program.calls)
    single = over_one_stream(report, taken.name) if compared and not peer and taken.name != EAGER_ALONE else None
    far = distance(report, taken.name)
    return {
        "name": taken.name,
        "label": label_run(report, taken.name),
        "chosen": taken.name == report.chosen,
        "median_ns": taken.median_ns,
        "median": format_ns(taken.median_ns),
        "spread": format_percent(taken.spread),
        "drift": f"{taken.drift:+.1%}",
        "samples": len(taken.samples_ns),
        "dropped": taken.dropped,
        "warmup": taken.warmup,
        "stable": taken.stable,
        "warnings": list(taken.warnings),
        "eager": ratio_cell(report, report.ratio(taken.name)) if compared and not wrong else None,
        "single": ratio_cell(report, single),
        "distance": "" if far is None else about(format_ratio(far), distance_doubt(report, taken.name)),
        "peer": peer is not None,
        "wrong": wrong,
    }


def _plan(report: ReportData, plan: Schedule) -> dict[str, Any]:
    promises = ["independent calls never share a stream"] * plan.maximum_concurrency
    promises += ["fewest synchronisations"] * plan.minimum_syncs
    return {
        "policy": plan.policy,
        "label": label_run(report, plan.policy),
        "chosen": plan.policy == report.chosen,
        "streams": plan.streams,
        **asdict(plan.counts),
        "promise": promise(plan),
        "observed": observed(report, plan.policy),
        "added_order": len(plan.added_order),
        "promises": "; ".join(promises) or "none",
    }


def _facts(report: ReportData) -> list[tuple[str, str]]:
    calls = len(report.program.calls)
    if report.sampling is not None:
        return [("Calls of an iteration", format_count(calls))]
    measured = report.critical_path_ns > 0
    path = f"{format_count(len(report.critical_path))} calls"
    facts = [
        ("Calls that reach the device", format_count(calls)),
        ("Host steps dropped (views, empty, no-op copies)", format_count(report.program.host_steps)),
        ("Hazard edges, full DAG", format_count(len(report.graph.edges))),
        ("Edges of the minimum equivalent graph (MEG)", format_count(len(report.graph.meg))),
        ("Sum of isolated calls", format_ns(report.costs.total_ns) if measured else "not measured"),
        ("Critical path", f"{format_ns(report.critical_path_ns)} over {path}, by isolated times" if measured else path),
        ("Costs from", report.costs.source),
    ]
    if measured and report.costs.demand:
        bound = limit_ns(report.costs, report.critical_path_ns)
        by = "SM time of all calls over SMs" if bound > report.critical_path_ns else "the critical path"
        facts.insert(6, ("Limit: the longer of critical path and shared work", f"{format_ns(bound)}, {by}"))
    origin = provenance(report)
    return facts[:1] + (origin or []) + facts[1:]


def _environment(report: ReportData) -> list[tuple[str, str]]:
    where = report.environment
    cast = report.dtype.partition(" under ")[2].removesuffix(" autocast")  # of the step, not around the comparison
    rows = [
        ("Device", _device(report)),
        ("Host CPU", where.host_cpu),
        ("Cores / torch threads", f"{where.cores} / {where.threads}" if where.cores else ""),
        ("torch", where.torch),
        ("CUDA", where.cuda),
        ("Driver", where.driver),
        ("Python", where.python),
        ("System", where.system),
        ("SM clock before and after", " → ".join(f"{mhz} MHz" for mhz in where.sm_clock_mhz)),
        (
            "Throttling",
            ", ".join(where.throttling)
            or ("none reported" if where.device == "cuda" and where.torch and not planned(report) else ""),
        ),
        ("Other processes on the GPU", "" if where.other_processes is None else str(where.other_processes)),
        ("Load of the host, 1 minute", f"{where.load:.2f}" if where.load >= 0 else ""),
        ("Other programs running", f"{where.others:.2f} threads, on average" if where.others >= 0 else ""),
        *((name, cast if cast and name == "autocast" else value) for name, value in where.settings),
        ("Date (UTC)", where.date),
    ]
    return [(name, value) for name, value in rows if value]


def _device(report: ReportData) -> str:
    name = report.environment.device_name
    if planned(report) or report.environment.device == "cuda":
        return name
    if report.sampling is not None:
        return f"{name} (no GPU)" if name else "the host, no GPU"
    return f"{name} (host replay, no GPU)"


def _warnings(report: ReportData) -> list[str]:
    # Said below, with the run's label.
    known = {f"{check.name}: {check.reason}" for check in report.checks}
    known |= {f"timeline of {line.run} is unreliable: {line.note}" for line in report.timelines}
    found = [warning for warning in report.warnings if warning not in known]
    found += [f"while measuring: {text}" for text in disturbances(report)]
    best = best_run(report)
    peer = over_peer(report, best)
    for ratio in (over_one_stream(report, best) if best else None, peer and peer[0]):
        if ratio and not ratio.decided:
            names = label_run(report, best), label_run(report, ratio.baseline)
            found.append(f"{names[0]} is undecided against {names[1]}: {why_undecided(report, ratio)}")
    found += [f"{label_run(report, taken.name)}: {text}" for taken in report.measurements for text in taken.warnings]
    found += [f"{label_run(report, check.name)}: {check.reason}" for check in report.checks if check.reason]
    if report.overhead:
        found += report.overhead.warnings
    for line in report.timelines:
        if not line.reliable:
            found.append(f"timeline of {label_run(report, line.run)} is unreliable: {line.note or 'self-check failed'}")
    if not report.costs.reliable:
        found.append(f"costs are unreliable: {report.costs.seen} kernels seen, {report.costs.expected} expected")
    found += [
        f"{label_run(report, taken.name)} took less than the critical path: the calls' isolated costs are too high"
        for taken in report.measurements
        if beaten(report, taken.name, report.critical_path_ns)
    ]
    found += report.program.notes
    return list(dict.fromkeys(found))


# Peers.


def peers(report: ReportData, ours: str) -> list[dict[str, Any]]:
    """Describe each peer: the fastest first, then those whose outputs differ, then absent ones."""
    return sorted(
        (_peer_row(report, peer, ours) for peer in report.peers), key=lambda row: (row["rank"], row["median_ns"])
    )


def _peer_row(report: ReportData, peer: PeerResult, ours: str) -> dict[str, Any]:
    taken = report.measurement(peer.name)
    wrong = peer.check is not None and peer.check.differs
    over = report.ratio(ours, peer.name) if taken and ours else None
    return {
        "name": peer.name,
        "median": format_ns(taken.median_ns) if taken else "",
        "median_ns": taken.median_ns if taken else 0.0,
        "stable": taken is None or taken.stable,
        "ratio": None if wrong else ratio_cell(report, over),
        "prepare": format_ns(peer.prepare_s * 1e9) if peer.prepare_s else "",
        "outputs": _outputs(peer),
        "equal": peer.check is not None and peer.check.passed,
        "wrong": wrong,
        "outcome": _outcome(peer, over, measured=taken is not None),
        "note": peer.note,
        "rank": 2 if taken is None else int(wrong),
    }


def _outputs(peer: PeerResult) -> str:
    if peer.check is None:
        return "not compared"
    error = error_text(peer.check.error)
    return f"equal ({error})" if peer.check.passed else f"DIFFER ({error})" if peer.check.differs else "not shown"


def _outcome(peer: PeerResult, over: Ratio | None, *, measured: bool) -> str:
    if not measured:
        return peer.note or "not measured"
    if peer.check is not None and peer.check.differs:
        return "its outputs differ from eager's: its time does not count"
    if over is None:
        return "nothing of ours to compare with"
    return ratio_sentence("ours", over, "it")
