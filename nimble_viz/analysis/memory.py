"""What the device held: eager's peak beside each engine's arena, workspaces and total.

Eager's peak is what one run allocates at most beside what is there before it: model, inputs, optimizer state. An engine
holds as much for as long as it lives, with inputs of its own; of a training step both hold gradients as well. On the
host eager's peak is how much the process grew, where memory that was freed before is used again: no measure for an
engine.
"""

from __future__ import annotations

from typing import Any

from nimble_core.utils.units import format_bytes, format_percent, format_ratio
from nimble_viz.analysis.labels import label_run, trains
from nimble_viz.report.data import ReportData

__all__ = ["memory"]


def memory(report: ReportData) -> dict[str, Any] | None:
    """``facts`` (pairs) and ``engines`` (a row each where memory was planned); None if nothing is known."""
    known = report.memory
    planned = {one.name: one for one in known.planned}
    held = dict(known.engines)
    on_host = report.environment.device != "cuda"
    above = "model and optimizer state" if trains(report) else "the model"
    facts = [("Growth of the process in an eager run" if on_host else f"Eager's peak above {above}", known.eager_peak)]
    if not planned:
        facts += [(f"Held by {label_run(report, name)}", nbytes) for name, nbytes in known.engines]
    facts.append(("Peak of the whole comparison", known.compare_peak))
    rows = []
    for name in dict.fromkeys([*held, *planned]) if planned else ():
        plan = planned.get(name)
        rows.append(
            {
                "label": label_run(report, name),
                "chosen": name == report.chosen,
                "arena": format_bytes(plan.arena) if plan else "",
                "unshared": format_bytes(plan.unshared) if plan else "",
                "saved": _saved(plan.saved, plan.unshared) if plan else "",
                "workspaces": format_bytes(plan.workspaces) if plan else "",
                "held": format_bytes(held[name]) if held.get(name) else "",
                "against": "" if on_host else _against(held.get(name, 0), known.eager_peak),
            }
        )
    shown = [(name, format_bytes(nbytes)) for name, nbytes in facts if nbytes]
    return {"facts": shown, "engines": rows} if shown or rows else None


def _against(held: int, peak: int) -> str:
    return format_ratio(held / peak) if held and peak else ""


def _saved(nbytes: int, of: int) -> str:
    return f"{format_bytes(nbytes)} ({format_percent(nbytes / of)})" if nbytes > 0 else "nothing"
