"""Which schedules to capture: those of every policy, simulated, the most promising first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nimble_core.autotune.capture_pipeline import schedule_by
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.simulator import simulate
from nimble_core.tracing.recorded import Recorded

__all__ = ["Planned", "asked_plan", "best_kernels_first", "searched_plans", "simulated_ns", "variant_name"]

_POLICIES = ("contention", "nimble", "critical_path", "opara", "torchsched")
"""In the order of promise where simulation cannot tell: it knows neither launch priorities nor issue order."""
_CAPS = (2, 3, 4, 6, 8)
_CAPTURED = {"cuda": 3}
"""Candidates beside one stream that ``tune="fast"`` captures: the first two policies above and the most promising of
the others; only the most promising one where not listed."""
_HOPELESS = 1.25
"""Kernels whose best simulated plan takes this much longer than that of others are tried on one stream only."""
_TAKEN = ("single", "eager", "whole", "none", "library", "inductor")
"""Names in reports that a policy of the user's cannot have."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule that may be captured.

    Args:
        kind: whose kernels.
        schedule: named after the candidate.
        simulated_ns: what the simulation expects of a replay; 0 if it was not simulated.
        note: why it is not captured; empty if it is.
    """

    kind: str
    schedule: Schedule
    simulated_ns: float = 0.0
    note: str = ""


def variant_name(kind: str, policy: str) -> str:
    """Return the name of a candidate: its policy, after the kind of kernels unless they are eager's."""
    return policy if kind == "none" else f"{kind}, {policy}"


def simulated_ns(device: Device, recorded: Recorded, schedule: Schedule, costs: Costs | None) -> float:
    """Return what a replay is expected to take; 0 without costs."""
    return simulate(recorded.graph, schedule, costs, device.model).length_ns if costs else 0.0


def asked_plan(kind: str, recorded: Recorded, policy: object, costs: Costs | None, cap: int | None) -> Planned:
    """Plan by the one policy that was asked for, by name or as a function."""
    schedule = schedule_by(recorded, policy, costs, cap)
    if schedule.policy in _TAKEN and schedule.policy != policy:
        schedule = replace(schedule, policy=f"{schedule.policy} of your own")
    return Planned(kind, replace(schedule, policy=variant_name(kind, schedule.policy)))


def searched_plans(
    device: Device, kind: str, recorded: Recorded, options: Options, costs: Costs | None, single: Schedule
) -> list[Planned]:
    """Plan by every policy; return the plans that differ, the most promising first.

    Args:
        device: where.
        kind: of the kernels.
        recorded: what runs them.
        options: max_streams, tune. With ``tune="full"`` several caps on streams are tried too, and all is captured.
        costs: isolated time of each call.
        single: the plan on one stream, which is a candidate already.
    """
    full, cap = options.tune == "full", device.stream_cap(options.max_streams)
    wanted: list[tuple[str, int | None]] = [(policy, cap) for policy in _POLICIES]
    if full:
        wanted += [(policy, fewer) for policy in _POLICIES for fewer in _CAPS if cap is None or fewer < cap]
    seen, found = {_essence(single)}, list[Planned]()
    for policy, most in wanted:
        schedule = schedule_by(recorded, policy, costs, most)
        if _essence(schedule) in seen:
            continue
        seen.add(_essence(schedule))
        name = variant_name(kind, policy if most == cap else f"{policy}, {most} streams")
        expected = simulated_ns(device, recorded, schedule, costs)
        found.append(Planned(kind, replace(schedule, policy=name), expected))
    kept = len(found) if full else _CAPTURED.get(device.kind, 1)
    certain = [variant_name(kind, policy) for policy in _POLICIES[: kept - 1]]
    found.sort(key=lambda one: (one.schedule.policy not in certain, one.simulated_ns))
    left_out = [replace(one, note="not captured: simulated slower") for one in found[kept:]]
    return [*found[:kept], *left_out]


def best_kernels_first(plans: list[Planned], singles_ns: Mapping[str, float], *, full: bool) -> list[Planned]:
    """Return plans by what the best of their kernels is expected to take; those of hopeless kernels with a note.

    Args:
        plans: to capture.
        singles_ns: what one stream of each kind of kernels is expected to take, where that is known.
        full: no kernels are hopeless.
    """
    best = {kind: singles_ns.get(kind, float("inf")) for kind in {one.kind for one in plans}}
    for one in plans:
        best[one.kind] = min(best[one.kind], one.simulated_ns)
    limit = _HOPELESS * min(best.values(), default=0.0)
    return [
        one if full or best[one.kind] <= limit else replace(one, note="not captured: other kernels are faster")
        for one in sorted(plans, key=lambda one: best[one.kind])
    ]


def _essence(schedule: Schedule) -> tuple[object, ...]:
    """Return what two schedules have to share to be the same plan; priority counts where calls differ in it."""
    priority = schedule.priority if len(set(schedule.priority)) > 1 else ()
    return schedule.stream, schedule.order, schedule.syncs, priority
