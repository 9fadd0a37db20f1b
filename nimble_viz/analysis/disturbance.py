"""What disturbed a measurement, and what to do about it: load, interruptions, drift, clocks, others on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nimble_core.algorithms.median_interval import FEWEST
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import DRIFT_BOUND, ENOUGH, Measurement, Ratio
from nimble_viz.analysis.labels import label_run, plural
from nimble_viz.report.data import ReportData

__all__ = ["disturbances", "why_undecided"]

_DROPPED_ABOVE = 0.1
_CLOCK_BOUND = 0.03
_QUIET = "close other programs or run again"

_Cause = tuple[str, str]
"""What it was, and what to do about it."""


def disturbances(report: ReportData) -> tuple[str, ...]:
    """List what disturbed the machine while ``report`` was measured; a run's own warnings say drift and spread."""
    found = (*_of_machine(report.environment), *_dropped(report.measurements)) if report.measurements else ()
    return tuple(what for what, _ in found)


def why_undecided(report: ReportData, ratio: Ratio) -> str:
    """Say why ``ratio`` is undecided, and what to do: ``"load 14 on 2 cores; run again"``."""
    runs = [taken for name in (ratio.name, ratio.baseline) if (taken := report.measurement(name))]
    few = list(_few_rounds(report, runs))
    found = few if few and _rounds(runs) < FEWEST else []
    found += [*_of_machine(report.environment), *_dropped(runs), *_drifting(report, runs), *few]
    if ratio.high < ratio.low * ratio.same**2:
        found.append((f"the difference is near {ratio.same - 1:.0%}, from where on it counts", "run again"))
    most = max((run.spread for run in runs), default=0.0)
    found.append((f"times vary by {most:.0%}", "run again on a quieter machine"))
    return "; ".join(found[0])


def _of_machine(where: Environment) -> Iterator[_Cause]:
    if where.throttling:
        yield f"the GPU was throttled ({', '.join(where.throttling)})", "let it cool down and run again"
    if len(where.sm_clock_mhz) == 2 and max(where.sm_clock_mhz) > (1 + _CLOCK_BOUND) * min(where.sm_clock_mhz):
        before, after = where.sm_clock_mhz
        yield f"the GPU's clock went from {before} to {after} MHz", "fix it (nvidia-smi -lgc) or run again"
    if where.other_processes:
        yield f"processes of others on the GPU: {where.other_processes}", "run again when it is free"
    # A load average holds this process, too: what it ran before, on all its threads.
    others = where.others if where.others >= 0 else where.load - where.threads
    if where.cores and others >= where.cores / 2:
        load = where.others if where.others >= 0 else where.load
        yield f"load {f'{load:.2g}' if load < 10 else round(load)} on {plural(where.cores, 'core')}", _QUIET


def _dropped(runs: Sequence[Measurement]) -> Iterator[_Cause]:
    most = max((run.dropped / (run.dropped + len(run.samples_ns)) for run in runs if run.dropped), default=0.0)
    if most > _DROPPED_ABOVE:
        yield f"up to {most:.0%} of a run's samples were interrupted and dropped", _QUIET


def _drifting(report: ReportData, runs: Sequence[Measurement]) -> Iterator[_Cause]:
    """Find runs that drift apart by more than their samples scatter; where both get slower, that cancels."""
    drifts = [run.drift for run in runs] or [0.0]
    if max(drifts) - min(drifts) > max(DRIFT_BOUND, *(run.spread for run in runs)):
        most = max(runs, key=lambda run: abs(run.drift))
        yield f"{label_run(report, most.name)} drifted by {most.drift:+.0%}", "run again"


def _few_rounds(report: ReportData, runs: Sequence[Measurement]) -> Iterator[_Cause]:
    rounds = _rounds(runs)
    if rounds < ENOUGH:
        how, remedy = ("fitted in the time", "raise budget_s") if report.complete else ("were measured", "run again")
        yield f"only {plural(rounds, 'round')} {how}", remedy


def _rounds(runs: Sequence[Measurement]) -> int:
    """Count the rounds that hold a sample of each run."""
    taken = [set(run.rounds or range(len(run.samples_ns))) for run in runs]
    return len(set.intersection(*taken)) if taken else 0
