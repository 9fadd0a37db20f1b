"""What a verdict is made of: the runs that are compared, and what to doubt."""

from __future__ import annotations

from nimble_core.ir.measurement import SAME, Ratio, not_slower
from nimble_core.utils.units import format_count
from nimble_viz.analysis.labels import (
    explained,
    label_run,
    one_stream,
    trains,
)
from nimble_viz.analysis.limit import distance_doubt
from nimble_viz.report.data import EAGER_ALONE, ReportData

__all__ = [
    "beaten", "best_peers", "doubts", "only_threads", "outlook", "over_one_stream", "over_peer",
    "unshown", "wrong_runs",
]  # fmt: skip

_OVERLAP_NS = 1000.0
"""Of a kernel that is launched ahead, what can be done before the one that it waits for has ended: up to 0.8 µs were
seen on an H200."""


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
