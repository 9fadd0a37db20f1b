"""The summary of a report: its first screen, and the tables behind it; and a brief one for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.costs import limit_ns
from nimble_core.ir.measurement import Ratio
from nimble_core.ir.schedule import Schedule
from nimble_core.utils.units import format_count, format_ns, format_percent
from nimble_viz.analysis.advice import advice, advice_data, best_run
from nimble_viz.analysis.candidates import candidates
from nimble_viz.analysis.compared import beaten, disturbances, over_one_stream, over_peer, time_doubt, why_undecided
from nimble_viz.analysis.labels import (
    INTERVAL,
    context,
    error_text,
    label_run,
    planned,
    plural,
    ratio_sentence,
    shortened,
)
from nimble_viz.analysis.limit import distance_text, graph_width, observed
from nimble_viz.analysis.live_memory import memory
from nimble_viz.analysis.overhead import computing, grouped
from nimble_viz.analysis.phases import phases, profiled, spent
from nimble_viz.analysis.provenance import provenance
from nimble_viz.analysis.syncs import COUNTS, promise
from nimble_viz.analysis.tables import BAR, Cell, bar, cell, number, ratio_cell, row, table, words
from nimble_viz.analysis.tiles import tiles, verdict
from nimble_viz.report.data import EAGER_ALONE, PeerResult, ReportData

__all__ = ["brief", "peers", "summary"]

_COMPUTING = 10
_SCHEMA = 1
_ROWS = 5
_RUNS = 12
_CHARACTERS = 200


def summary(report: ReportData) -> dict[str, Any]:
    """Return the tables of the summary; what is shown is text, times that are drawn come in nanoseconds too."""
    best = best_run(report)
    return {
        "model": report.model,
        "tiles": tiles(report),
        "context": context(report),
        "host": report.environment.device != "cuda",
        "complete": report.complete,
        "profiled": profiled(report),
        "computing": _computing(report),
        "speed": _speed(report),
        "peers": peers(report, best),
        "phases": phases(report),
        "advice": advice_data(report),
        "provenance": provenance(report),
        "checks": _checks(report),
        "preparation": _preparation(report),
        "candidates": candidates(report),
        "plans": [_plan(report, plan) for plan in report.schedules],
        "synchronisations": _synchronisations(report),
        "facts": _facts(report),
        "environment": _environment(report),
        "memory": memory(report),
        "warnings": _warnings(report),
    }


def _computing(report: ReportData) -> list[dict[str, Any]]:
    """Describe tables of what computes longest in a profile, by operator and by module; none of other reports."""
    if report.sampling is None or report.overhead is None:
        return []
    time = "GPU time" if report.environment.device == "cuda" else "Computing"
    columns = [BAR, number("Calls"), number(time), number("Share"), number("Host overhead"), words("Longest reads")]
    tables = []
    for by, found in (("operator", computing(report, "operator")), ("module", computing(report, "module"))):
        most = max((one["work"] for one in found), default=0.0) or 1.0
        rows = [
            row(
                one["name"], bar(one["work"] / most), format_count(one["calls"]), format_ns(one["work"]),
                format_percent(one["share"]), format_ns(one["overhead"]), one["sizes"],
            )
            for one in found[:_COMPUTING]
        ]  # fmt: skip
        more, ns = len(found) - _COMPUTING, sum(one["work"] for one in found[_COMPUTING:])
        rest = [f"and {plural(more, by)} more, {format_ns(ns)} together"] * (more > 0)
        tables.append(table("What computes", [words(by.capitalize()), *columns], rows, below=rest))
    return [one for one in tables if one]


def _checks(report: ReportData) -> dict[str, Any] | None:
    rows = []
    for check in report.checks:
        said = "equal" if check.passed else "DIFFERS" if check.differs else "NOT SHOWN"
        errors = map(error_text, (check.error, check.tolerance, check.input_effect))
        verdict = cell(said, check.reason, "good" if check.passed else "bad")
        rows.append(row(label_run(report, check.name), verdict, *errors))
    return table(
        "Equality with eager, on fresh inputs",
        [words("Replay"), words("Verdict"), number("Error"), number("Tolerance"), number("Sensitivity")],
        rows,
        about="Error: the worst relative one over the outputs. Sensitivity: how far eager's own outputs differ between "
        "two inputs.",
        below=[f"{label_run(report, one.name)}: {_reference(one)}" for one in report.checks if _reference(one)],
    )


def _preparation(report: ReportData) -> dict[str, Any] | None:
    most = max((step.seconds for step in report.preparation), default=0.0) or 1.0
    total = format_ns(sum(step.seconds for step in report.preparation) * 1e9)
    rows = [row(step.name, bar(step.seconds / most), format_ns(step.seconds * 1e9)) for step in report.preparation]
    return table(f"Preparation ({total})", [words("Step"), BAR, number("Time")], rows)


def _reference(check: EqualityCheck) -> str:
    """Say what the error is measured against, where that is not eager itself."""
    if check.reference == "eager":
        return ""
    return (
        f"error against the model in {check.reference}, where eager's own is {error_text(check.eager_error)}; "
        f"against eager {error_text(check.relative_error)}"
    )


def _speed(report: ReportData) -> dict[str, Any] | None:
    if report.sampling is not None:
        return None
    slowest = max((taken.median_ns for taken in report.measurements), default=0.0) or 1.0
    peers = {one.name: one for one in report.peers}
    rows, below = [], []
    for taken in report.measurements:
        peer = peers.get(taken.name)
        wrong = peer is not None and peer.check is not None and peer.check.differs
        compared = taken.name != "eager" and bool(report.program.calls)
        alone = compared and peer is None and taken.name != EAGER_ALONE
        over = report.ratio(taken.name) if compared and not wrong else None
        streams = over_one_stream(report, taken.name) if alone else None
        found = (time_doubt(one, taken, report.measurement(one.baseline)) for one in (over, streams) if one)
        below += [f"{label_run(report, taken.name)}: {changed}" for changed in dict.fromkeys(found) if changed]
        tags = [("chosen", "good")] * (taken.name == report.chosen) + [("peer", "")] * (peer is not None)
        tags += [("outputs differ", "bad")] * wrong + [("unstable", "bad")] * (not taken.stable)
        kept = len(taken.samples_ns)
        samples = f"{format_count(kept)} of " * (taken.dropped > 0) + plural(kept + taken.dropped, "sample")
        spread = f"spread {format_percent(taken.spread)}, {samples}"
        rows.append(
            row(
                cell(label_run(report, taken.name), spread, tags=tags),
                bar(taken.median_ns / slowest, "remainder" if peer else ""),
                format_ns(taken.median_ns),
                ratio_cell(over),
                ratio_cell(streams),
                void=wrong,
            )
        )
    warmup = report.measurements[0].warmup if report.measurements else 0
    dropped = any(taken.dropped for taken in report.measurements)
    return table(
        f"Speed ({context(report)})",
        [
            words("Run"), BAR, number("Median"), number("Over eager"), number("Over one stream"),
        ],
        rows,
        about=f"Medians of samples taken in turn, after {warmup} warm-up calls; {INTERVAL}. Over one stream: over a "
        "replay of the same kernels on one stream."
        + " Samples that other programs interrupted more than usual are dropped." * dropped,
        below=below,
    )  # fmt: skip


def _plan(report: ReportData, plan: Schedule) -> dict[str, Any]:
    return {
        "policy": plan.policy,
        "label": label_run(report, plan.policy),
        "streams": plan.streams,
        **asdict(plan.counts),
        "promise": promise(plan),
    }


def _synchronisations(report: ReportData) -> dict[str, Any] | None:
    rows, below = [], list[Cell]()
    unread = "" if planned(report) else "not read"
    for plan in report.schedules:
        label, seen, told = label_run(report, plan.policy), observed(report, plan.policy), promise(plan)
        counts = [getattr(plan.counts, key) for key, _, _ in COUNTS]
        doubt = [("unreliable", "bad")] * bool(seen and not seen["reliable"])
        rows.append(
            row(
                cell(label, tags=[("chosen", "good")] * (plan.policy == report.chosen)),
                format_count(plan.streams),
                cell(f"{seen['most']} at most", f"{seen['mean']} on average", tags=doubt) if seen else "",
                *(unread if found is None else format_count(found) for found in counts),
            )
        )
        if told and (plan.streams > 1 or not told["kept"]):
            below.append(cell(f"{label}: {told['text']}", mark="" if told["kept"] else "bad"))
        if plan.added_order:
            below.append(f"{label}: {format_count(len(plan.added_order))} pairs of calls got an added ordering")
        promises = ["independent calls never share a stream"] * plan.maximum_concurrency
        promises += ["fewest synchronisations"] * plan.minimum_syncs
        if promises:
            below.append(f"{label} promises: {'; '.join(promises)}")
    flight = f"{'Kernels' if report.environment.device == 'cuda' else 'Calls'} in flight"
    return table(
        "Streams and synchronisations",
        [words("Plan"), number("Streams"), number(flight), *(number(name) for _, name, _ in COUNTS)],
        rows,
        about=f"Width of the DAG: {graph_width(report.graph)[1]}. So many calls at most need not wait for each other; "
        "no schedule has more calls in flight. Waits between streams are counted on the full DAG, on its MEG, in the "
        "plan, and in the graph.",
        below=below,
    )


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
    far = {label_run(report, one.name): distance_text(report, one.name) for one in report.measurements}
    if reached := [f"{label} {text}" for label, text in far.items() if text]:
        facts.append(("Distance to the limit", ", ".join(reached)))
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


def peers(report: ReportData, ours: str) -> dict[str, Any] | None:
    """Describe a table of peers: the fastest first, then those whose outputs differ, then absent ones."""

    def rank(peer: PeerResult) -> tuple[int, float]:
        taken = report.measurement(peer.name)
        return (2, 0.0) if taken is None else (int(_wrong(peer)), taken.median_ns)

    return table(
        f"{label_run(report, ours) if ours else 'Nothing of ours'} against peers",
        [words("Peer"), number("Median"), number("Prepared in"), words("Outcome")],
        [_peer_row(report, peer, ours) for peer in sorted(report.peers, key=rank)],
        about="Other ways to run the model, timed in turn with ours; in brackets the 99.5% interval, which alone "
        "decides. Prepared in: from the model to its first finished result.",
    )


def _wrong(peer: PeerResult) -> bool:
    return peer.check is not None and peer.check.differs


def _peer_row(report: ReportData, peer: PeerResult, ours: str) -> dict[str, Any]:
    taken, wrong = report.measurement(peer.name), _wrong(peer)
    over = report.ratio(ours, peer.name) if taken and ours else None
    outcome = _outcome(peer, over, measured=taken is not None)
    mark = {"slower": "bad", "undecided": "open"}.get(over.verdict, "") if over and not wrong else ""
    notes = [f"outputs {_outputs(peer)}"] * (taken is not None) + [peer.note] * (peer.note not in ("", outcome))
    notes += filter(None, [time_doubt(over, report.measurement(ours), taken)])
    return row(
        cell(peer.name, tags=[("unstable", "bad")] * (taken is not None and not taken.stable)),
        format_ns(taken.median_ns) if taken else "",
        format_ns(peer.prepare_s * 1e9) if peer.prepare_s else "",
        cell(outcome, "; ".join(notes), "bad" if wrong else mark),
        void=wrong,
    )


def _outputs(peer: PeerResult) -> str:
    if peer.check is None:
        return "not compared"
    error = error_text(peer.check.error)
    return f"equal ({error})" if peer.check.passed else f"DIFFER ({error})" if peer.check.differs else "not shown"


def _outcome(peer: PeerResult, over: Ratio | None, *, measured: bool) -> str:
    if not measured:
        return peer.note or "not measured"
    if _wrong(peer):
        return "its outputs differ from eager's: its time does not count"
    if over is None:
        return "nothing of ours to compare with"
    return ratio_sentence("ours", over, "it")


# For programs.


def brief(report: ReportData) -> dict[str, Any]:
    """Return what a reader needs who sees nothing else, as JSON can hold it; times in µs, shares from 0 to 1.

    At most 12 kB. ``docs/report-format.md`` describes each key.
    """
    found = spent(report)
    return {
        "schema": _SCHEMA,
        "model": _cut(report.model),
        "device": _cut(report.environment.device_name),
        "complete": report.complete,
        "verdict": verdict(report),
        "bound": found["bound"] if found else None,
        "spent": {row["name"]: _us(row["ns"]) for row in found["rows"]} if found else None,
        "chosen": report.chosen,
        "runs": [_brief_run(report, one.name) for one in report.measurements[:_RUNS]],
        "next": [
            {"do": one.what, "run": one.run, "at_most_us": _us(one.gain_ns), "basis": one.basis, "why": _cut(one.why)}
            for one in advice(report).changes[:_ROWS]
        ],
        "computes": {"operators": _brief_rows(report, "operator"), "modules": _brief_rows(report, "module")},
        "overhead": _brief_overhead(report),
        "waits": _brief_waits(report),
        "equal": [{"run": one.name, "passed": one.passed, "reason": _cut(one.reason)} for one in report.checks[:_RUNS]],
        "warnings": [_cut(one) for one in report.warnings[:_ROWS]],
        "torch": report.environment.torch,
    }


def _brief_run(report: ReportData, name: str) -> dict[str, Any]:
    taken = report.measurement(name)
    assert taken is not None
    over = report.ratio(name) if name != "eager" else None
    figures = {"ratio": over.value, "low": over.low, "high": over.high} if over else {}
    return {
        "name": name,
        "what": label_run(report, name),
        "median_us": _us(taken.median_ns),
        "spread": round(taken.spread, 4),
        "stable": taken.stable,
        "peer": any(peer.name == name for peer in report.peers),
        "over_eager": over and {key: _finite(value) for key, value in figures.items()} | {"verdict": over.verdict},
    }


def _brief_rows(report: ReportData, by: Literal["operator", "module"]) -> list[dict[str, Any]]:
    return [
        {"name": _cut(row["name"]), "calls": row["calls"], "us": _us(row["work"]), "share": round(row["share"], 4)}
        for row in computing(report, by)[:_ROWS]
    ]


def _brief_overhead(report: ReportData) -> dict[str, Any] | None:
    profile = report.overhead
    if profile is None:
        return None
    return {
        "us": _us(profile.overhead_ns),
        "share": round(profile.overhead_ns / profile.profiled_ns, 4) if profile.profiled_ns else None,
        "device_idle": round(profile.device_idle_share, 4),
        "operators": [
            {"name": _cut(row["name"]), "calls": row["calls"], "us": _us(row["overhead"])}
            for row in grouped(report, "operator")[:_ROWS]
        ],
    }


def _brief_waits(report: ReportData) -> list[dict[str, Any]]:
    found = sorted(report.overhead.host_syncs, key=lambda one: -one.total_ns) if report.overhead else []
    return [
        {"kind": one.kind, "count": one.count, "us": _us(one.total_ns), "where": _cut(one.source)}
        for one in found[:_ROWS]
    ]


def _us(ns: float) -> float:
    return round(ns / 1e3, 3)


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return round(value, 4) if math.isfinite(value) else None


def _cut(text: str) -> str:
    return shortened(text, _CHARACTERS)
