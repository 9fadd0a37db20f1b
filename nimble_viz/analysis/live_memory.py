"""Memory: what the device held, engine by engine; and live bytes call by call, and which results hold their peak.

Live bytes are counted from the calls alone, in the order of issue: what a run needs, not what it takes. Python keeps
what a variable still names, and a replay on several streams shares bytes only where calls are ordered.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate
from typing import Any

from nimble_core.ir.program import Program, Storage
from nimble_core.utils.units import format_bytes, format_percent, format_ratio
from nimble_viz.analysis.labels import label_call, label_run, trains
from nimble_viz.analysis.provenance import modules_of
from nimble_viz.analysis.tables import cell, number, row, table, words
from nimble_viz.report.data import ReportData

__all__ = ["HOLDERS", "live_bytes", "live_memory", "memory"]

HOLDERS = 24
"""Results that are listed by name among those that hold a peak."""

_FIXED = {
    "parameter": "Parameters", "buffer": "Buffers", "gradient": "Kept gradients", "state": "Optimizer state",
    "input": "Inputs", "constant": "Constants",
}  # fmt: skip


def live_memory(report: ReportData) -> dict[str, Any] | None:
    """Describe live memory in eager's order of calls and in the chosen plan's; None where it is not known.

    A run's ``columns`` are by position: ``call``, ``live`` (bytes while it runs), ``makes`` (bytes it makes) and
    ``held`` (for how many calls more something that it makes is alive). ``marks`` are sizes to draw beside it,
    ``holders`` the largest results that are alive at the peak. ``alike``: both runs are the same. ``fixed``: what is
    there before the first call and after the last.
    """
    if not any(storage.role == "intermediate" and storage.nbytes for storage in report.program.storages):
        return None
    plan = report.schedule(report.chosen)
    eager = report.eager or report.program
    known = {one.name: one for one in report.memory.planned}
    held = dict(report.memory.engines)
    on_host = report.environment.device != "cuda"
    marks = []
    if report.memory.eager_peak and not on_host:
        above = "model and optimizer state" if trains(report) else "the model"
        marks.append((f"measured peak above {above}", report.memory.eager_peak))
    first = _run(report, eager, range(len(eager.calls)), "eager", "Eager", marks)
    runs = [first]
    alike = False
    if plan is not None:
        planned = known.get(plan.policy)
        marks = [("arena of what was planned", planned.arena)] if planned else []
        if held.get(plan.policy):
            marks.append(("held by the engine", held[plan.policy]))
        second = _run(report, report.program, plan.order, plan.policy, label_run(report, plan.policy), marks)
        alike = second["columns"] == first["columns"]
        runs.append(second)
    return {
        "runs": runs,
        "alike": alike,
        "fixed": _fixed(report.program),
        "note": "Counted from the calls: a result lives from the call that makes it to the last that uses it, outputs "
        "to the end. The model's own tensors, inputs and workspaces of libraries are not in the curve; Python may keep "
        "results longer, and streams share bytes only where calls are ordered.",
    }


def live_bytes(program: Program, order: Sequence[int]) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Compute the bytes of results alive while each call runs, and where each storage lives.

    Returns:
        The bytes, and for each intermediate storage the positions of the first and the last call that touches it (an
        output's last is the end). O(accesses).
    """
    spans: dict[int, tuple[int, int]] = {}
    for position, call in enumerate(order):
        for access in program.calls[call].accesses:
            storage = access.ref.storage
            if program.storages[storage].role == "intermediate":
                spans[storage] = (spans.get(storage, (position, 0))[0], position)
    for ref in program.outputs:
        if ref.storage in spans:
            spans[ref.storage] = (spans[ref.storage][0], len(order) - 1)
    change = [0] * (len(order) + 1)
    for storage, (first, last) in spans.items():
        change[first] += program.storages[storage].nbytes
        change[last + 1] -= program.storages[storage].nbytes
    return list(accumulate(change[:-1])), spans


def _run(
    report: ReportData, program: Program, order: Sequence[int], name: str, label: str, marks: list[tuple[str, int]]
) -> dict[str, Any]:
    live, spans = live_bytes(program, order)
    size = len(order)
    makes, held = [0] * size, [0] * size
    for storage, (first, last) in spans.items():
        makes[first] += program.storages[storage].nbytes
        held[first] = max(held[first], last - first)
    peak = max(live, default=0)
    at = live.index(peak) if live else 0
    alive = [storage for storage, (first, last) in spans.items() if first <= at <= last]
    alive = [storage for storage in alive if program.storages[storage].nbytes]
    alive.sort(key=lambda storage: (-program.storages[storage].nbytes, spans[storage][0]))
    holders = [_holder(program, order, storage, spans[storage], peak) for storage in alive[:HOLDERS]]
    rest = alive[HOLDERS:]
    total = sum(makes)
    planned = next((one for one in report.memory.planned if one.name == name), None)
    facts = [("All results together, none reused", format_bytes(total))]
    if planned:
        outside = total - planned.unshared
        if outside > 0:
            facts.append(("Of that not in the arena (outputs, what the device placed)", format_bytes(outside)))
        facts.append(("Largest workspace of a library", format_bytes(planned.workspaces)))
    where = f"call {order[at]} {label_call(program.calls[order[at]])}" if live else "no call"
    return {
        "run": name,
        "label": label,
        "eager": program is report.eager,
        "peak": peak,
        "peak_text": format_bytes(peak),
        "peak_at": at,
        "where": where,
        "total": total,
        "facts": facts,
        "marks": marks,
        "columns": {"call": list(order), "live": live, "makes": makes, "held": held},
        "holders": holders,
        "more": len(rest),
        "more_bytes": sum(program.storages[storage].nbytes for storage in rest),
    }


def _holder(program: Program, order: Sequence[int], storage: int, span: tuple[int, int], peak: int) -> dict[str, Any]:
    """Describe a result that is alive at the peak; ``span``: positions of the first and the last call to touch it."""
    first, last = span
    nbytes = program.storages[storage].nbytes
    maker, user = program.calls[order[first]], program.calls[order[last]]
    module = modules_of(maker)
    place = f"{label_call(maker)}{f' in {module}' if module else ''}"
    output = any(ref.storage == storage for ref in program.outputs)
    until = "kept to the end, an output" if output else f"last used by {order[last]} {label_call(user)}"
    return {
        "call": order[first],
        "last_call": order[last],
        "bytes": nbytes,
        "size": format_bytes(nbytes),
        "share": format_percent(nbytes / peak),
        "first": first,
        "last": last,
        "output": output,
        "phase": maker.phase,
        "text": f"made by {order[first]} {place}, {until}",
    }


def _fixed(program: Program) -> list[tuple[str, str]]:
    """Sum what is there before the first call and after the last."""
    sums = dict.fromkeys(_FIXED.values(), 0)
    parameters = {storage.name for storage in program.storages if storage.role == "parameter"}
    for storage in program.storages:
        if storage.role in _FIXED:
            sums[_FIXED[_kind(storage, parameters)]] += storage.nbytes
    return [(name, format_bytes(nbytes)) for name, nbytes in sums.items() if nbytes]


def _kind(storage: Storage, parameters: Set[str]) -> str:
    """Return the key in ``_FIXED`` of a storage; a step's ``"<parameter> <key>"`` holds gradients or state."""
    name, _, key = storage.name.rpartition(" ")
    if storage.role != "buffer" or name not in parameters:
        return storage.role
    return "gradient" if key == "gradient" else "state"


def memory(report: ReportData) -> dict[str, Any] | None:
    """Return ``facts`` (pairs) and ``engines`` (a table where memory was planned); None if nothing is known.

    Eager's peak is what one run allocates at most beside what is there before it: model, inputs, optimizer state. An
    engine holds as much for as long as it lives, with inputs of its own; of a training step both hold gradients as
    well. On the host eager's peak is how much the process grew, where memory that was freed before is used again: no
    measure for an engine.
    """
    known = report.memory
    planned = {one.name: one for one in known.planned}
    held = dict(known.engines)
    on_host = report.environment.device != "cuda"
    above = "model and optimizer state" if trains(report) else "the model"
    facts = [("Growth of the process in an eager run" if on_host else f"Eager's peak above {above}", known.eager_peak)]
    if not planned:
        facts += [(f"Held by {label_run(report, name)}", nbytes) for name, nbytes in known.engines]
    facts.append(("Peak of the whole comparison", known.compare_peak))
    peak = 0 if on_host else known.eager_peak
    rows = []
    for name in dict.fromkeys([*held, *planned]) if planned else ():
        plan = planned.get(name)
        rows.append(
            row(
                cell(label_run(report, name), tags=[("chosen", "good")] * (name == report.chosen)),
                format_bytes(plan.arena) if plan else "",
                format_bytes(plan.unshared) if plan else "",
                _saved(plan.saved, plan.unshared) if plan else "",
                format_bytes(plan.workspaces) if plan else "",
                format_bytes(held[name]) if held.get(name) else "",
                format_ratio(held.get(name, 0) / peak) if peak and held.get(name) else "",
            )
        )
    engines = table(
        "Engines",
        [
            words("Engine"), number("Arena"), number("Without reuse", page=True), number("Saved by reuse"),
            number("Workspaces"), number("Held"), number("Of eager's peak"),
        ],
        rows,
        about="Arena: results of all calls and large workspaces of libraries, on all streams. Held: arena, input "
        "buffers, and what was not planned."
        + " Of eager's peak: what is held, as a multiple of it; an engine holds it between runs as well." * bool(peak),
    )  # fmt: skip
    shown = [(name, format_bytes(nbytes)) for name, nbytes in facts if nbytes]
    return {"facts": shown, "engines": engines} if shown or engines else None


def _saved(nbytes: int, of: int) -> str:
    return f"{format_bytes(nbytes)} ({format_percent(nbytes / of)})" if nbytes > 0 else "nothing"
