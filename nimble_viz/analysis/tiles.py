"""The first screen: how fast now and what it waits for, how fast prepared, what to do next, and one picture."""

from __future__ import annotations

from typing import Any, Literal

from nimble_core.utils.units import format_ns, format_percent
from nimble_viz.analysis.advice import PREPARE, Change, advice, best_run, inputs_of
from nimble_viz.analysis.compared import doubts, only_threads, outlook, over_peer, time_doubt, why_undecided, wrong_runs
from nimble_viz.analysis.labels import (
    context,
    explained,
    label_run,
    planned,
    ratio_parts,
    ratio_sentence,
    ratio_words,
    trains,
)
from nimble_viz.analysis.overhead import computing
from nimble_viz.analysis.phases import spent
from nimble_viz.report.data import ReportData

__all__ = ["tiles", "verdict"]

_ORDER = ("host", "device", "input")
_STEP = ", target=y, loss_fn=loss_fn, optimizer=optimizer, training=True"
_WHAT_COMPARE_SAYS = (
    "compare runs the code as it is and prepared, in turn, checks that outputs are equal, and says which is faster, "
    "with an interval"
)
_WHAT_COMPARE_SAYS_OF_IT = "compare, given the original model, says what that gains and checks that outputs are equal"
_PREPARED = "Nothing to prepare: nimble_core replays it already; host time is copies, launches and code around it."
_CREDIBLE = 0.9
"""A bound above this share of the time is no news, and not said."""
_COMPILED = 'options=Options(fuse="inductor")'
_WILD = 0.5
"""Spread of iterations above which no advice is taken from a profile."""
_DIAGNOSE = "from nimble_viz import diagnose\nprint(diagnose(model, {}))"
_AGAIN = "options=Options(budget_s=120)"


def tiles(report: ReportData) -> dict[str, Any]:
    """Return the three tiles and the picture below them, as text and nanoseconds.

    ``now`` and ``prepared`` have a ``figure``, and ``lines`` that explain it, ``now`` also the ``rows`` of what the
    time is spent on, and whether it is ``stable``; ``prepared`` the ``verdict`` and its ``interval``, and ``good``:
    nothing is doubtful. ``next`` is one sentence in ``figure``, with its ``lines``. ``code`` is to paste, or empty.
    ``picture`` holds the runs on one time axis: how long each is without a profiler, and by what its profiled
    spans are to be multiplied.
    """
    return {"now": _now(report), "prepared": _prepared(report), "next": _next(report), "picture": _picture(report)}


def verdict(report: ReportData) -> str:
    """Say in one sentence what the first two tiles say, with dtype, batch and device."""
    found, name = tiles(report), best_run(report)
    now, lines = found["now"], found["prepared"]["lines"]
    over = report.ratio(name) if name else None
    if report.sampling is not None:
        shares = ", ".join(f"{row['name']} {row['share']} ({row['text']})" for row in now["rows"])
        said = [f"{now['of']} takes {now['figure']}", f"{now['bound']}: {shares}", *now["lines"]]
    elif over is not None and report.program.calls:
        subject = f"the prepared {'step' if trains(report) else 'model'}"
        said = [*lines]
        said.insert(bool(wrong_runs(report)), ratio_sentence(subject, over, "eager", context(report)))
    else:
        said = [*lines, context(report)]
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}."


def _now(report: ReportData) -> dict[str, Any]:
    taken, profile, found = report.measurement("eager"), report.overhead, spent(report)
    lines = []
    if taken is not None:
        figure = format_ns(taken.median_ns)
    elif profile is not None:
        figure = format_ns(profile.profiled_ns)
        lines.append("under the profiler, which slows it; not timed without")
    else:
        figure = "not run" if planned(report) else "not measured"
    if found is None and not planned(report):
        lines.append("what it waits for is not known: eager was not profiled")
    if taken is not None and not taken.stable:
        lines.append(f"unstable: samples vary by {format_percent(taken.spread)}")
    lines += _longest(report) if report.sampling is not None else []
    syncs = sum(sync.count for sync in profile.host_syncs) if profile else 0
    if syncs and report.environment.device == "cuda":
        lines.append(f"the host waits for the device {'once' if syncs == 1 else f'{syncs:,} times'} in it")
    what = report.sampling.iteration if report.sampling else f"one {'training step' if trains(report) else 'call'}"
    on_host = report.environment.device != "cuda"
    rows = {row["name"]: row for row in found["rows"]} if found else {}
    names = {"device": "computing"} if on_host else {}
    return {
        "figure": figure,
        "ns": taken.median_ns if taken else profile.profiled_ns if profile else 0.0,
        "of": what if report.sampling else f"eager, {what}",
        "bound": found["verdict"] if found else "",
        "rows": [{**rows[key], "key": key, "name": names.get(key, key)} for key in _ORDER if key in rows],
        "basis": found["basis"] if found else "",
        "lines": lines,
        "stable": taken is None or taken.stable,
        "code": "",
    }


def _longest(report: ReportData) -> list[str]:
    """Name the operators and the modules that compute longest, with their shares of all computing."""
    found = []
    by: Literal["operator", "module"]
    for what, by in (("most computing", "operator"), ("by module", "module")):
        rows = ", ".join(f"{row['name']} {format_percent(row['share'])}" for row in computing(report, by)[:2])
        found += [f"{what}: {rows}"] if rows else []
    return found


def _prepared(report: ReportData) -> dict[str, Any]:
    tile: dict[str, Any] = {"figure": "not measured", "verdict": "", "interval": "", "good": False, "of": "", "ns": 0.0}
    name = best_run(report)
    over, taken = (report.ratio(name), report.measurement(name)) if name else (None, None)
    eager = report.measurement("eager")
    if planned(report) or report.sampling is not None:
        said = outlook(report) if planned(report) else _WHAT_COMPARE_SAYS
        if report.sampling and report.sampling.replayed:
            tile["figure"], said = "replayed by nimble_core already", _WHAT_COMPARE_SAYS_OF_IT
        return {**tile, "lines": [said], "code": "" if planned(report) else _compare(report)}
    if not report.program.calls:
        return {**tile, "lines": ["the model made no call that reaches the device"], "code": ""}
    wrong = ", ".join(label_run(report, one) for one in wrong_runs(report))
    lines = [f"outputs of {wrong} differ from eager's: those times do not count"] if wrong else []
    if over is None or taken is None or eager is None:
        return {**tile, "lines": [*lines, "no replay was measured", *doubts(report)], "code": ""}
    figure, interval = ratio_parts(over)
    changed = time_doubt(over, taken, eager)
    undecided = "" if over.decided else why_undecided(report, over)
    lines += filter(None, (changed, undecided, only_threads(report, over)))
    peer, code = over_peer(report, name), ""
    if peer:
        lines.append(ratio_words(peer[0]) + peer[1])
    elif report.peers:
        lines.append(f"no peer to compare with: {report.peers[0].name}, {report.peers[0].note or 'outputs differ'}")
    else:
        peer_name = "compile:reduce-overhead" if report.environment.device == "cuda" else "compile"
        code = _compare(report, f'against="{peer_name}"')
    host = "" if report.environment.device == "cuda" else "host replay, no GPU: "
    joined = "instead of" if over.verdict == "faster" else "beside"
    return {
        "figure": figure,
        "verdict": over.verdict,
        "interval": interval,
        "good": report.complete and bool(report.checks) and all(check.passed for check in report.checks),
        "of": "" if changed else f"{format_ns(taken.median_ns)} {joined} {format_ns(eager.median_ns)}",
        "ns": 0.0 if changed else taken.median_ns,
        "lines": [
            *lines,
            *doubts(report),
            host + explained(report, name),
            *(["not compared with torch.compile"] * bool(code)),
        ],
        "code": code,
    }


def _next(report: ReportData) -> dict[str, Any]:
    """Say the one thing to do next: measure what is not known, mend what is wrong, then use what is faster."""
    found, name = advice(report), best_run(report)
    first, measured = found.first, next((one for one in found.changes if one.basis == "measured"), None)
    over = report.ratio(name) if name else None
    if planned(report):
        return _step("Measure it: nothing was run yet.", _compare(report))
    if report.sampling is not None:
        return _of_profile(report, first)
    if not report.program.calls:
        return _step("Nothing: the model makes no call that a device runs.", "")
    if over is None:
        what = "Find what keeps the model from being prepared" if not wrong_runs(report) else "Find what differs"
        given = inputs_of(report, compared=True)
        return _step(f"{what}: diagnose names each line and its remedy.", _DIAGNOSE.format(given))
    if not report.complete:
        return _step("Measure again to the end: this run was interrupted.", _compare(report))
    check = next((one for one in report.checks if one.name == name), None)
    if check is None or not check.passed:
        why = f": {check.reason}" if check and check.reason else ""
        return _step(f"Compare outputs on inputs like yours before using it{why}.", _compare(report))
    if not over.decided:
        return _step(f"Measure again: {why_undecided(report, over)}.", _compare(report, _AGAIN))
    if measured is not None:
        return _step(_sentence(measured), measured.code, measured.why)
    then = f"After that: {first.what}" if first else ""
    then += f", {first.saves}" if first and first.share < _CREDIBLE else ""
    if over.verdict == "faster":
        how = "prepare the step once, then call it" if trains(report) else "prepare once, then call it like the model"
        return _step(f"Use it: {how}.", _use(report), then)
    if report.program.fuse == "none":
        return _step("Try compiled kernels: to replay eager's gains nothing here.", _compare(report, _COMPILED), then)
    return _step("Stay with eager: preparing gains nothing here.", 'print(report.pane("overhead"))', then)


def _of_profile(report: ReportData, first: Change | None) -> dict[str, Any]:
    taken = report.measurement("eager")
    if taken is not None and not taken.stable and taken.spread > _WILD:
        what = f"iterations vary by {format_percent(taken.spread)}"
        return _step(f"Profile again on a quiet machine: {what}, so neither length nor shares are certain.", "")
    if first is not None:
        return _step(_sentence(first), first.code, first.why)
    if report.sampling and report.sampling.replayed:
        return _step(_PREPARED, "")
    longest = computing(report, "operator")[:1] if report.overhead else []
    most = f", {longest[0]['name']} longest: {format_percent(longest[0]['share'])}" if longest else ""
    return _step(
        f"Make kernels faster, if need be: it computes most of the time{most}.", "model = torch.compile(model)"
    )


def _sentence(change: Change) -> str:
    return f"{change.what[:1].upper()}{change.what[1:]}: it saves {change.saves}."


def _step(sentence: str, code: str, more: str = "") -> dict[str, Any]:
    return {"figure": sentence, "lines": [more] if more else [], "code": code}


def _compare(report: ReportData, more: str = "") -> str:
    phases = report.overhead.phases if report.overhead else ()
    step = _STEP if trains(report) or any(one.phase == "backward" for one in phases) else ""
    given = inputs_of(report, compared=True) + step
    imports = "Options, compare" if "Options" in more else "compare"
    return f"from nimble_viz import {imports}\nreport = compare(model, {given}{more and ', '}{more})"


def _use(report: ReportData) -> str:
    if not trains(report):
        return f"{PREPARE}Nimble(model).prepare({inputs_of(report)}, plan=report.plan)"
    if not any(call.phase == "optimizer" for call in report.program.calls):
        return f"{PREPARE}Nimble(model).prepare({inputs_of(report)}, training=True)"
    made = "step = TrainStep(model, loss_fn, optimizer)\nstep.prepare(x, y, plan=report.plan)"
    return f"from nimble_core import TrainStep\n{made}"


def _picture(report: ReportData) -> dict[str, Any]:
    lines = [line for line in report.timelines if line.run != "eager"]
    replay = report.timeline(best_run(report) or report.chosen) or next(iter(lines), None)
    runs = []
    for line in (report.timeline("eager"), replay):
        if line is None:
            continue
        taken, drawn = report.measurement(line.run), line.length_ns
        if line.run == "eager":
            drawn = max(line.profiled_ns, drawn)
        ns = taken.median_ns if taken else drawn
        scale = ns / drawn if drawn else 1.0
        simulated = "" if line.source == "measured" else " (SIMULATED)"
        runs.append(
            {
                "run": line.run,
                "label": "eager" if line.run == "eager" else f"prepared{simulated}",
                "ns": ns,
                "text": format_ns(ns),
                "scale": scale if line.run == "eager" else min(1.0, scale),
            }
        )
    measured = [report.measurement(str(run["run"])) for run in reversed(runs)]
    timed = all(measured)
    note = "lengths without the profiler, contents as profiled" if timed else "as profiled"
    if len(runs) > 1 and timed and (changed := time_doubt(report.ratio(str(runs[1]["run"])), *measured)):
        note += f"; {changed}"
    return {"runs": runs, "note": note if runs else "No timeline was taken: neither eager nor a replay was traced."}
