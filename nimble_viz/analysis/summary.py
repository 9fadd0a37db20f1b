"""The summary of a report: the verdict in one sentence, and the tables behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.costs import limit_ns
from nimble_core.ir.measurement import SAME, Measurement, Ratio, not_slower
from nimble_core.ir.schedule import Schedule
from nimble_core.utils.units import format_count, format_ns, format_percent, format_ratio
from nimble_viz.analysis.advice import advice_data, best_run
from nimble_viz.analysis.candidates import candidates
from nimble_viz.analysis.concurrency import graph_width, observed, what_if
from nimble_viz.analysis.disturbance import disturbances, why_undecided
from nimble_viz.analysis.labels import (
    about,
    context,
    error_text,
    label_run,
    one_stream,
    planned,
    plural,
    ratio_cell,
    ratio_sentence,
    ratio_words,
    trains,
)
from nimble_viz.analysis.limit import distance, distance_doubt, limit
from nimble_viz.analysis.live_memory import memory
from nimble_viz.analysis.overhead import computing
from nimble_viz.analysis.phases import phase_syncs, phases, profiled, profiled_verdict
from nimble_viz.analysis.provenance import provenance
from nimble_viz.analysis.syncs import promise
from nimble_viz.report.data import EAGER_ALONE, PeerResult, ReportData

__all__ = ["best_peers", "context", "headline", "label_run", "peers", "planned", "summary", "unshown", "verdict"]

_OVERLAP_NS = 1000.0
_COMPUTING = 10
"""Of a kernel that is launched ahead, what can be done before the one that it waits for has ended: up to 0.8 µs were
seen on an H200."""


def verdict(report: ReportData) -> str:
    """Return ``headline`` as one string."""
    found = headline(report)
    return found["lead"] + found["rest"]


def headline(report: ReportData) -> dict[str, str]:
    """Say in one sentence how the chosen replay compares, with baseline, dtype, batch, device and doubts.

    ``"nimble replay is 2.31x faster than eager (2.29x to 2.34x; float16, batch 1, NVIDIA H200), 1.42x faster than
    one-stream replay (1.41x to 1.44x), at 1.08x ± 3% of the critical path; outputs equal eager's within tolerance."``
    With peers, also how it compares with the fastest of them. It is about ``report.chosen`` if that was measured, else
    about the fastest replay. A replay with wrong outputs is named first, and wins nothing. What is undecided comes with
    the reason.
    Of a plan it says that nothing was run, of a profile what an iteration is bound by.

    Returns:
        ``lead``, which alone may be set in bold; ``rest``, what follows it; ``verdict``, that of the ratio in ``lead``,
        empty if there is none.
    """
    if planned(report):
        return {"lead": _outlook(report), "rest": "", "verdict": ""}
    if report.sampling is not None:
        return {"lead": profiled_verdict(report), "rest": "", "verdict": ""}
    name = best_run(report)
    over = report.ratio(name) if name else None
    found = rest = ""
    if over is None or not report.program.calls:
        why = "the model made no call that reaches the device" if not report.program.calls else "no replay was measured"
        lead = f"No comparison with eager ({context(report)}): {why}"
    else:
        found = over.verdict
        lead = ratio_sentence(label_run(report, name), over, "eager", context(report))
        rest = "".join(f", {clause}" for clause in _clauses(report, name)) + _reason(report, over)
    wrong = [label_run(report, check.name) for check in report.checks if check.differs]
    if wrong:
        rest, found = f"; {lead}{rest}", ""
        lead = f"The outputs of {', '.join(wrong)} differ from eager's, and their times do not count"
    doubts = "".join(f"; {doubt}" for doubt in _doubts(report))
    return {"lead": lead, "rest": f"{rest}{doubts}.", "verdict": found}


def _others(report: ReportData, name: str) -> Iterator[tuple[Ratio, str]]:
    """Yield what a replay is compared with besides eager, and what to say after that."""
    single = _over_one_stream(report, name)
    if single:
        yield single, ""
    fastest = best_peers(report)
    peer = report.ratio(name, fastest[0]) if fastest else None
    if peer:
        which = "the fastest peer" if len(fastest) < 2 else "one of the fastest peers"
        yield peer, (f", {which}" if len(report.peers) > 1 else "") + unshown(report, peer.baseline)


def _clauses(report: ReportData, name: str) -> Iterator[str]:
    for ratio, more in _others(report, name):
        yield ratio_words(ratio, label_run(report, ratio.baseline)) + more
    bound = limit(report, name)
    if bound and not _beaten(report, name, bound["ns"]):  # else costs are wrong: a warning says so
        yield f"at {bound['over']} of the {bound['short']}"


def _reason(report: ReportData, over: Ratio) -> str:
    """Say why nothing could be decided; or on the host, that the gain is only fewer threads."""
    if not over.decided:
        return f"; undecided: {why_undecided(report, over)}"
    alone = report.measurement(EAGER_ALONE) and report.ratio(EAGER_ALONE)
    beside = report.ratio(over.name, EAGER_ALONE) if alone else None
    if not (alone and beside) or (over.verdict, alone.verdict) != ("faster", "faster") or beside.verdict == "faster":
        return ""
    how = {"no difference": "is as fast", "slower": "is faster"}.get(beside.verdict, "may be as fast")
    only = "may be" if beside.verdict == "undecided" else "is"
    return f"; eager with one thread {how} (torch.set_num_threads(1)): the gain {only} only fewer threads"


def summary(report: ReportData) -> dict[str, Any]:
    """Return the tables of the summary; what is shown is text, times that are drawn come in nanoseconds too."""
    best, head = best_run(report), headline(report)
    return {
        "model": report.model,
        "verdict": head["lead"] + head["rest"],
        "headline": head,
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
        "what_if": what_if(report),
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


def _outlook(report: ReportData) -> str:
    """Say the verdict on a plan."""
    plan, calls = report.schedule(report.chosen), format_count(len(report.program.calls))
    if plan is None:
        return f"plan: nothing was run, and no streams were chosen for {calls} calls ({context(report)})."
    streams = plural(plan.streams, "stream")
    return (
        f"plan: nothing was run; {label_run(report, plan.policy)} puts {calls} calls on {streams} with "
        f"{format_count(plan.counts.planned)} synchronisations, {format_count(plan.counts.full)} if every hazard were "
        f"waited for ({context(report)})."
    )


def _doubts(report: ReportData) -> list[str]:
    doubts = []
    if not report.complete:
        doubts.append("interrupted: this is what was measured until then")
    if not report.program.calls:  # nothing was compared that could be doubted
        return doubts
    void = [label_run(report, check.name) for check in report.checks if check.void]
    if void:
        doubts.append(f"equality with eager NOT shown for {', '.join(void)}")
    elif report.checks and not any(check.differs for check in report.checks):
        what = "loss, outputs and gradients" if trains(report) else "outputs"
        doubts.append(f"{what} equal eager's within tolerance")
    elif not report.checks:
        doubts.append("outputs were not compared")
    return doubts


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
    single = _over_one_stream(report, taken.name) if compared and not peer and taken.name != EAGER_ALONE else None
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


def _over_one_stream(report: ReportData, name: str) -> Ratio | None:
    """Compare with one stream; None for a plan that has one itself, which differs from it by noise alone."""
    base, plan = one_stream(name), report.schedule(name)
    itself = name == base or (plan is not None and plan.streams == 1)
    return report.ratio(name, base) if not itself and report.measurement(base) else None


def _plan(report: ReportData, plan: Schedule) -> dict[str, Any]:
    return {
        "policy": plan.policy,
        "label": label_run(report, plan.policy),
        "chosen": plan.policy == report.chosen,
        "streams": plan.streams,
        **asdict(plan.counts),
        "promise": promise(plan),
        "observed": observed(report, plan.policy),
        "added_order": len(plan.added_order),
        "phases": phase_syncs(report, plan),
        "promises": _promises(plan.maximum_concurrency, plan.minimum_syncs),
    }


def _promises(concurrency: bool, syncs: bool) -> str:
    parts = ["independent calls never share a stream"] * concurrency + ["fewest synchronisations"] * syncs
    return "; ".join(parts) or "none"


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
    if measured:
        facts.insert(6, ("Concurrency there is", format_ratio(report.costs.total_ns / report.critical_path_ns)))
        bound = limit_ns(report.costs, report.critical_path_ns)
        by = "SM time of all calls over SMs" if bound > report.critical_path_ns else "the critical path"
        if report.costs.demand:
            facts.insert(7, ("Limit: the longer of critical path and shared work", f"{format_ns(bound)}, {by}"))
    origin = provenance(report)
    return facts[:1] + (origin["facts"] if origin else []) + facts[1:]


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


def _beaten(report: ReportData, run: str, bound_ns: float) -> bool:
    """Tell whether a replay beat this bound by more than both vary by and launching ahead explains."""
    taken, plan = report.measurement(run), report.schedule(run)
    if taken is None or plan is None:
        return False
    most_ns = taken.median_ns * SAME * (1 + distance_doubt(report, run))
    return most_ns < bound_ns - _OVERLAP_NS * (plan.counts.ahead or 0)


def _warnings(report: ReportData) -> list[str]:
    # Said below, with the run's label.
    known = {f"{check.name}: {check.reason}" for check in report.checks}
    known |= {f"timeline of {line.run} is unreliable: {line.note}" for line in report.timelines}
    found = [warning for warning in report.warnings if warning not in known]
    found += [f"while measuring: {text}" for text in disturbances(report)]
    best = best_run(report)
    for ratio, _ in _others(report, best) if best else ():
        if not ratio.decided:
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
        if _beaten(report, taken.name, report.critical_path_ns)
    ]
    found += report.program.notes
    return list(dict.fromkeys(found))


# Peers.


def peers(report: ReportData, ours: str) -> list[dict[str, Any]]:
    """Describe each peer: the fastest first, then those whose outputs differ, then absent ones."""
    return sorted(
        (_peer_row(report, peer, ours) for peer in report.peers), key=lambda row: (row["rank"], row["median_ns"])
    )


def best_peers(report: ReportData) -> list[str]:
    """Name the fastest peer whose outputs are not wrong, and those that are not decidedly slower."""
    right = (peer.name for peer in report.peers if not (peer.check and peer.check.differs))
    return not_slower({name: taken for name in right if (taken := report.measurement(name))})


def unshown(report: ReportData, name: str) -> str:
    """Return what to add to the name of a peer whose outputs were not shown to be eager's; else empty."""
    doubtful = any(peer.name == name and not (peer.check and peer.check.passed) for peer in report.peers)
    return ", whose outputs were not shown to be eager's" if doubtful else ""


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
