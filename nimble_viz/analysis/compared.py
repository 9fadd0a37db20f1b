"""What a verdict is made of: the runs that are compared, what to doubt, and what disturbed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nimble_core.algorithms.median_interval import FEWEST
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import DRIFT_BOUND, ENOUGH, SAME, Measurement, Ratio, not_slower
from nimble_core.utils.units import format_count
from nimble_viz.analysis.labels import explained, label_run, one_stream, plural, trains
from nimble_viz.analysis.limit import distance_doubt
from nimble_viz.report.data import EAGER_ALONE, ReportData

__all__ = [
    "beaten", "best_peers", "disturbances", "doubts", "only_threads", "outlook", "over_one_stream", "over_peer",
    "time_doubt", "unshown", "why_undecided", "wrong_runs",
]  # fmt: skip

_OVERLAP_NS = 1000.0
"""Of a kernel that is launched ahead, what can be done before the one that it waits for has ended: up to 0.8 µs were
seen on an H200."""

_DROPPED_ABOVE = 0.1
_CLOCK_BOUND = 0.03
_QUIET = "close other programs or run again"
_UNFIT = "the machine changed its speed while measuring: the ratio is of neighbouring samples, medians do not fit it"

_Cause = tuple[str, str]
"""What it was, and what to do about it."""


def wrong_runs(report: ReportData) -> list[str]:
    """Name the replays whose outputs differ from eager's."""
    return [check.name for check in report.checks if check.differs]


def over_peer(report: ReportData, name: str) -> tuple[Ratio, str] | None:
    """Compare a replay with the fastest peer, and say which that is; None without any."""
    fastest = best_peers(report)
    ratio = report.ratio(name, fastest[0]) if fastest and name else None
    if ratio is None:
        return None
    which = "the fastest peer" if len(fastest) < 2 else "one of the fastest peers"
    return ratio, (f", {which}" if len(report.peers) > 1 else "") + unshown(report, ratio.baseline)


def only_threads(report: ReportData, over: Ratio) -> str:
    """Say of a gain on the host that eager on one thread has it too; empty where it has not."""
    alone = report.measurement(EAGER_ALONE) and report.ratio(EAGER_ALONE)
    beside = report.ratio(over.name, EAGER_ALONE) if alone else None
    if not (alone and beside) or (over.verdict, alone.verdict) != ("faster", "faster") or beside.verdict == "faster":
        return ""
    how = {"no difference": "is as fast", "slower": "is faster"}.get(beside.verdict, "may be as fast")
    only = "may be" if beside.verdict == "undecided" else "is"
    return f"eager with one thread {how} (torch.set_num_threads(1)): the gain {only} only fewer threads"


def time_doubt(over: Ratio | None, taken: Measurement | None, base: Measurement | None) -> str:
    """Say that the medians of two runs do not fit their ratio, whose samples are of the same rounds; else empty.

    Both medians are to be shown only where this is empty, or beside what it says.
    """
    if not (over and taken and base):
        return ""
    low_ns, high_ns = taken.median_ns * over.low / over.same, taken.median_ns * over.high * over.same
    return "" if low_ns <= base.median_ns <= high_ns else _UNFIT


def outlook(report: ReportData) -> str:
    """Say what a plan is."""
    plan, calls = report.schedule(report.chosen), format_count(len(report.program.calls))
    if plan is None:
        return f"plan: nothing was run, and no streams were chosen for {calls} calls"
    counts = plan.counts
    return (
        f"plan: nothing was run; {explained(report, plan.policy)}, with {format_count(counts.planned)} "
        f"synchronisations, {format_count(counts.full)} if every hazard were waited for"
    )


def doubts(report: ReportData) -> list[str]:
    """Say what was found of the outputs, and that a report is not complete."""
    found = []
    if not report.complete:
        found.append("interrupted: this is what was measured until then")
    if not report.program.calls:  # nothing was compared that could be doubted
        return found
    void = [label_run(report, check.name) for check in report.checks if check.void]
    if void:
        found.append(f"equality with eager NOT shown for {', '.join(void)}")
    elif report.checks and not any(check.differs for check in report.checks):
        what = "loss, outputs and gradients" if trains(report) else "outputs"
        found.append(f"{what} equal eager's within tolerance")
    elif not report.checks:
        found.append("outputs were not compared")
    return found


def over_one_stream(report: ReportData, name: str) -> Ratio | None:
    """Compare with one stream; None for a plan that has one itself, which differs from it by noise alone."""
    base, plan = one_stream(name), report.schedule(name)
    itself = name == base or (plan is not None and plan.streams == 1)
    return report.ratio(name, base) if not itself and report.measurement(base) else None


def beaten(report: ReportData, run: str, bound_ns: float) -> bool:
    """Tell whether a replay beat this bound by more than both vary by and launching ahead explains."""
    taken, plan = report.measurement(run), report.schedule(run)
    if taken is None or plan is None:
        return False
    most_ns = taken.median_ns * SAME * (1 + distance_doubt(report, run))
    return most_ns < bound_ns - _OVERLAP_NS * (plan.counts.ahead or 0)


def best_peers(report: ReportData) -> list[str]:
    """Name the fastest peer whose outputs are not wrong, and those that are not decidedly slower."""
    right = (peer.name for peer in report.peers if not (peer.check and peer.check.differs))
    return not_slower({name: taken for name in right if (taken := report.measurement(name))})


def unshown(report: ReportData, name: str) -> str:
    """Return what to add to the name of a peer whose outputs were not shown to be eager's; else empty."""
    doubtful = any(peer.name == name and not (peer.check and peer.check.passed) for peer in report.peers)
    return ", whose outputs were not shown to be eager's" if doubtful else ""


# What disturbed a measurement, and what to do about it: load, interruptions, drift, clocks, others on the GPU.


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
