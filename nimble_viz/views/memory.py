"""What the device held: eager's peak beside each engine's arena, workspaces and total."""

from __future__ import annotations

from typing import Any

from nimble_core.units import format_bytes, format_percent, format_ratio
from nimble_viz.report import Report
from nimble_viz.views.labels import label_run

__all__ = ["memory"]


def memory(report: Report) -> dict[str, Any] | None:
    """``facts`` (pairs) and ``engines`` (a row each where memory was planned); None if nothing is known."""
    known = report.memory
    planned = {one.name: one for one in known.planned}
    held = dict(known.engines)
    facts = [("Eager peak above the model", known.eager_peak)]
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
                "against": format_ratio(held[name] / known.eager_peak) if held.get(name) and known.eager_peak else "",
            }
        )
    shown = [(name, format_bytes(nbytes)) for name, nbytes in facts if nbytes]
    return {"facts": shown, "engines": rows} if shown or rows else None


def _saved(nbytes: int, of: int) -> str:
    return f"{format_bytes(nbytes)} ({format_percent(nbytes / of)})" if nbytes > 0 else "nothing"
