"""Schedules that nobody captured, simulated, and compared with others that are simulated alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex

from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_count, format_ns, format_ratio
from nimble_viz.analysis.labels import label_run, plural
from nimble_viz.analysis.timeline import timelines
from nimble_viz.report.data import ReportData

__all__ = ["Simulated", "no_simulation", "simulate_plan"]

MOST_CALLS = 5_000
"""Larger graphs are not simulated: an answer should come at once."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule that was not captured, and how long it would take by the simulation.

    Its times are about one another: they are simulated, all by the same model of a GPU, and no measurement.

    Args:
        policy: what made the schedule.
        streams: how many it uses.
        syncs: waits across streams.
        length_ns: how long it takes.
        single_ns: how long the same calls take on one stream.
        chosen: label of the schedule that the report is about; empty without one.
        chosen_ns: how long that one takes.
        run: its timeline, as the viewer draws it.
        plan: its streams and waits, likewise.
    """

    policy: str
    streams: int
    syncs: int
    length_ns: float
    single_ns: float
    chosen: str
    chosen_ns: float
    run: dict[str, Any]
    plan: dict[str, Any]

    @property
    def over_single(self) -> float:
        """How many times as fast it is as one stream."""
        return self.single_ns / self.length_ns

    @property
    def over_chosen(self) -> float | None:
        """How many times as fast it is as the schedule that the report is about; None without one."""
        return self.chosen_ns / self.length_ns if self.chosen else None

    def __str__(self) -> str:
        said = [f"{format_ratio(self.over_single)} one stream ({format_ns(self.single_ns)})"]
        if self.over_chosen is not None:
            said.append(f"{format_ratio(self.over_chosen)} {self.chosen} ({format_ns(self.chosen_ns)})")
        return (
            f"SIMULATED, not measured: {format_ns(self.length_ns)} with {self.policy} on "
            f"{plural(self.streams, 'stream')}, {plural(self.syncs, 'synchronisation')}; as fast as others "
            f"simulated alike: {', '.join(said)}"
        )


def no_simulation(report: ReportData) -> str:
    """Say why nothing can be simulated; empty if it can."""
    if report.sampling is not None:
        return "this is a profile of code as it is: which call needs which is not known"
    if not report.graph.size:
        return "the model made no call that reaches the device"
    if report.costs.source == "uniform" or not report.costs.total_ns:
        return "the calls' times were not measured"
    if report.environment.device != "cuda":
        return "how calls on this host slow each other down is not known; the simulation's model is that of a GPU"
    if report.graph.size > MOST_CALLS:
        return f"more than {format_count(MOST_CALLS)} calls"
    return ""


def simulate_plan(report: ReportData, policy: str, streams: int) -> Simulated:
    """Simulate what ``policy`` plans on at most ``streams`` streams.

    Raises:
        InputError: no such policy, no number of streams, or a report that says too little to simulate anything.
    """
    if policy not in POLICIES:
        raise InputError(f"there is no policy {policy!r} to simulate", fix=f"one of {', '.join(POLICIES)}")
    if not isinstance(streams, SupportsIndex) or index(streams) < 1:
        raise InputError(f"streams={streams!r} is no number of streams", fix="a whole number, 1 or more")
    if why := no_simulation(report):
        raise InputError(f"nothing can be simulated: {why}", fix="compare(model, inputs) on a GPU, and keep the report")
    plan = POLICIES[policy](report.graph, report.costs, max_streams=index(streams))
    single = POLICIES["single"](report.graph, report.costs, max_streams=1)
    chosen = report.schedule(report.chosen) if report.chosen else None
    line = simulate(report.graph, plan, report.costs, H200, names=[call.label for call in report.program.calls])
    name = f"what if: {policy}, {plural(plan.streams, 'stream')}"
    (shown,) = timelines(replace(report, schedules=(replace(plan, policy=name),), timelines=(replace(line, run=name),)))
    return Simulated(
        policy=policy,
        streams=plan.streams,
        syncs=len(plan.syncs),
        length_ns=line.length_ns,
        single_ns=_length_ns(report, single),
        chosen=label_run(report, chosen.policy) if chosen else "",
        chosen_ns=_length_ns(report, chosen) if chosen else 0.0,
        run=shown | shown["columns"] | {"label": name},
        plan={
            "policy": name,
            "stream": list(plan.stream),
            "producer": [u for u, _ in plan.syncs],
            "consumer": [v for _, v in plan.syncs],
        },
    )


def _length_ns(report: ReportData, plan: Schedule) -> float:
    return simulate(report.graph, plan, report.costs, H200).length_ns
