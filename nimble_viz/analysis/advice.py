"""What an iteration is made of, and what would help next: each change with its gain and what that gain rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nimble_core.ir.costs import limit_ns
from nimble_core.utils.units import format_ns, format_percent
from nimble_viz.analysis.labels import (
    about,
    doubt_of,
    explained,
    label_run,
    planned,
    plural,
    ratio_words,
    share_rows,
    split_plan,
    trains,
)
from nimble_viz.analysis.limit import Breakdown, breakdown
from nimble_viz.analysis.provenance import is_layout_copy
from nimble_viz.analysis.tables import BAR, bar, cell, number, row, table, words
from nimble_viz.analysis.work import call_work
from nimble_viz.report.data import EAGER_ALONE, ReportData

__all__ = ["PREPARE", "Advice", "Basis", "Change", "Split", "advice", "advice_data", "best_run"]

Basis = Literal["measured", "bound"]
"""Measured in the same rounds, or the most that it can be, were its cause gone."""

PREPARE = "from nimble_core import Nimble\nnet = "
"""How code to paste begins that prepares a model."""

_EAGER = {"eager": "stay with eager", EAGER_ALONE: "stay with eager, on one thread (torch.set_num_threads(1))"}
_COPIES = frozenset({"copy_", "clone", "_to_copy", "_foreach_copy_", "memcpy"})
_LEAST = 0.01
"""Changes that gain less than this share are not worth a line."""
_MEMORY_BOUND = 2.0
"""Operations for each byte below which a call only waits for memory, on any device there is."""


@dataclass(frozen=True, slots=True)
class Split:
    """An iteration, taken apart: name, nanoseconds and meaning of the parts of the watched run."""

    run: str
    rows: tuple[tuple[str, float, str], ...]
    note: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do next, and what it gains off ``of_ns``, which ``run`` takes now; as measured, or at most.

    ``code`` does it, where that can be written down for any model.
    """

    what: str
    run: str
    gain_ns: float
    of_ns: float
    basis: Basis
    why: str
    per_sample: bool = False
    code: str = ""

    @property
    def share(self) -> float:
        """Of what the run takes now."""
        return self.gain_ns / self.of_ns if self.of_ns else 0.0

    @property
    def gain(self) -> str:
        """In words: ``"at most 41.0 µs of 120 µs (34.2%, bound)"``."""
        return f"{self.saves[:-1]}, {self.basis})"

    @property
    def saves(self) -> str:
        """The same without its basis: ``"at most 41.0 µs of 120 µs (34.2%)"``."""
        about = {"measured": "", "bound": "at most "}[self.basis]
        whole = f"{format_ns(self.of_ns)}{' for each sample' if self.per_sample else ''}"
        return f"{about}{format_ns(self.gain_ns)} of {whole} ({format_percent(self.share)})"


@dataclass(frozen=True, slots=True)
class Advice:
    """What the watched replay is made of, and changes; larger batches come last."""

    replay: Split | None
    changes: tuple[Change, ...]

    @property
    def first(self) -> Change | None:
        """The one change that promises most."""
        return next((one for one in self.changes if not one.per_sample), None)


def best_run(report: ReportData) -> str:
    """Name the replay that a report is about: the chosen one, else the fastest; ``""`` if none."""
    wrong = {check.name for check in report.checks if check.differs}
    if report.measurement(report.chosen) and report.chosen not in wrong:
        return report.chosen
    replays = [taken for taken in report.measurements if report.schedule(taken.name) and taken.name not in wrong]
    return min(replays, key=lambda taken: taken.median_ns).name if replays else ""


def advice(report: ReportData) -> Advice:
    """Say where the time of ``report`` goes and what would help next. O(calls + edges + spans)."""
    if planned(report):
        return Advice(None, ())
    run = best_run(report)
    found = _watched(report, run)
    changes = list(_of_replay(report, run, found) if run else _of_eager(report))
    worth = [one for one in changes if one.share >= _LEAST]
    return Advice(
        _replay(report, run, found) if found else None,
        tuple(sorted(worth, key=lambda one: (one.per_sample, -one.gain_ns))),
    )


def advice_data(report: ReportData) -> dict[str, Any] | None:
    """Return ``advice`` as plain data: ``changes``, and what the replay's time is made of; None of nothing to say."""
    found = advice(report)
    split = found.replay
    if not (split or found.changes):
        return None
    parts = share_rows(split.rows) if split else []
    total = sum(part["ns"] for part in parts) or 1.0
    name = label_run(report, split.run) if split else ""
    rows = [
        row(cell(part["name"], part["meaning"]), bar(part["ns"] / total), part["text"], part["share"]) for part in parts
    ]
    return {
        "changes": [{"what": one.what, "gain": one.gain, "why": one.why} for one in found.changes],
        "replay": table(
            name, [words(name), BAR, number("Time"), number("Share")], rows,
            below=[split.note] if split else (),
        ),
    }  # fmt: skip


def _watched(report: ReportData, run: str) -> Breakdown | None:
    plan, line, taken = report.schedule(run), report.timeline(run), report.measurement(run)
    if plan is None or line is None or taken is None or line.source != "measured" or not report.costs.total_ns:
        return None
    return breakdown(report.graph, plan, report.costs, line, taken.median_ns, doubt_of(taken))


def _replay(report: ReportData, run: str, found: Breakdown) -> Split:
    plan, taken, line = report.schedule(run), report.measurement(run), report.timeline(run)
    assert plan is not None
    assert taken is not None
    assert line is not None
    copies = _copies_ns(report, found)
    slower = "calls take longer than when each was timed by itself"
    one = plan.streams == 1
    parts = [
        (
            "calls",
            found.alone - copies + min(found.contention, 0.0),
            "calls of the chain that ran longest, each as long as by itself",
        ),
        ("copies", copies, "calls of that chain that only copy"),
        (
            "slowdown" if one else "contention",
            max(found.contention, 0.0),
            slower if one else f"{slower}: others run beside",
        ),
        ("gaps", found.gaps, "the device idles between neighbours on a stream"),
        ("waits", found.waits, "the device idles until another stream is done"),
        ("outside", found.launch, "before the first call and after the last: launch of the whole, inputs, outputs"),
    ]
    chain = plural(len(found.calls), "call")
    note = f"along the chain that ran longest in the watched replay, {chain}, measured by {line.clock}"
    if found.calls != report.critical_path:
        note += f"; the critical path, {plural(len(report.critical_path), 'call')}, is the longest by isolated times"
    note += f"; unwatched it takes {about(format_ns(taken.median_ns), doubt_of(taken))}"
    return Split(run, tuple(part for part in parts if part[1]), note)


def _on_host(report: ReportData) -> bool:
    return report.environment.device != "cuda"


def _copies_ns(report: ReportData, found: Breakdown) -> float:
    calls, ns = report.program.calls, report.costs.ns
    return sum(ns[call] for call in found.calls if calls[call].label in _COPIES or is_layout_copy(calls[call]))


# What would help next.


def _of_eager(report: ReportData) -> Iterator[Change]:
    """Suggest changes to a run without a replay: unmodified code, or a model that could not be captured."""
    profile, timed = report.overhead, report.measurement("eager")
    if profile is None or not profile.profiled_ns:
        return
    now = timed.median_ns if timed else profile.unprofiled_ns or profile.profiled_ns
    scale = min(1.0, now / profile.profiled_ns)
    host = _on_host(report)
    basis = "seen under the profiler" + (", scaled to a run without" if scale < 1 else "")

    def change(what: str, ns: float, why: str, code: str) -> Change:
        return Change(what, "eager", min(ns * scale, now), now, "bound", f"{why}, {basis}", code=code)

    exposed = sum(row.exposed_ns for row in profile.calls)
    trained = any(one.phase == "backward" for one in profile.phases)
    if not (report.sampling and report.sampling.replayed):
        yield change(
            "prepare the model with Nimble, so that calls are replayed",
            exposed,
            "overhead while the device is idle",
            f"{PREPARE}Nimble(model).prepare({inputs_of(report)}{', training=True' * trained})",
        )
    loader = report.sampling.loader_ns / scale if report.sampling and report.sampling.loader_ns >= 0 else 0.0
    yield change(
        "load data ahead (more workers, pinned memory)",
        loader or profile.loader_ns,
        "waits for the loader",
        "from torch.utils.data import DataLoader\nloader = DataLoader(dataset, 32, num_workers=4, pin_memory=True)",
    )
    idle = profile.profiled_ns - profile.device_busy_ns
    waits = sum(one.total_ns for one in profile.host_syncs)
    if waits and not host:
        most = max(profile.host_syncs, key=lambda one: one.total_ns)
        at = f" ({most.kind} at {most.source})" if most.source else f" ({most.kind})"
        yield change(
            f"do not make the host wait in the iteration{at}",
            min(waits, idle),
            "waits, as far as the device idles",
            "losses.append(loss.detach())  # in the loop\nprint(torch.stack(losses).mean().item())  # after it",
        )


def _of_replay(report: ReportData, run: str, found: Breakdown | None) -> Iterator[Change]:
    taken, plan = report.measurement(run), report.schedule(run)
    assert taken is not None
    now = taken.median_ns
    yield from _faster_runs(report, run, now)
    if plan is None or found is None:
        return

    def bound(what: str, ns: float, why: str) -> Change:
        return Change(what, run, min(ns, now), now, "bound", why)

    limit = limit_ns(report.costs, report.critical_path_ns)
    if plan.streams > 1:
        avoidable = min(found.contention, now - limit)
        yield bound("put fewer or other calls side by side", avoidable, "calls beside others take longer than alone")
    yield bound(
        "let calls that wait for no one overtake (more streams, another policy)",
        min(found.alone - limit, now - limit),
        "the chain that ran is longer than the limit of any schedule",
    )
    yield bound("fewer and larger kernels, fewer waits", found.gaps + found.waits, "the device idles between calls")
    if not _on_host(report):  # the host's replays have no buffers of their own to write to and to read
        yield bound(
            "write inputs in place and read outputs where they are",
            found.launch,
            "time before the first and after the last call",
        )
    yield bound(
        "do without copies and changes of layout", _copies_ns(report, found), "copies on the chain that ran longest"
    )
    yield from _other_kernels(report, found, bound)
    if report.costs.demand:
        unfilled = sum(report.costs.ns[call] * (1 - report.costs.demand[call]) for call in found.calls)
        why = "calls of the chain that ran longest leave this much of the GPU empty"
        yield Change("a larger batch", run, min(unfilled, now), now, "bound", why, per_sample=True)


def _faster_runs(report: ReportData, run: str, now: float) -> Iterator[Change]:
    """Suggest runs of the same rounds that have eager's outputs and are decidedly faster."""
    checks = {check.name: check for check in report.checks}
    checks |= {peer.name: peer.check for peer in report.peers if peer.check}
    for other in report.measurements:
        over = report.ratio(other.name, run)
        check = checks.get(other.name)
        right = other.name in _EAGER or (check is not None and check.passed)
        if other.name != run and right and over and over.verdict == "faster":
            what = _EAGER.get(other.name, f"run {explained(report, other.name) or other.name} instead")
            why = f"{ratio_words(over, 'the chosen plan')} in the same rounds"
            code = _code_of(report, other.name)
            yield Change(what, run, now * (1 - 1 / over.value), now, "measured", why, code=code)


def inputs_of(report: ReportData, *, compared: bool = False) -> str:
    """Write the inputs of a call, or of a comparison, to be pasted: ``x``, or what stands for several."""
    given = report.given or ("*args" if len(report.program.inputs) > 1 and not trains(report) else "x")
    return given.replace("**kwargs", "kwargs=kwargs") if compared else given


def _code_of(report: ReportData, name: str) -> str:
    """Write how to run as this run of a report did; empty if nothing is to be done, or it is not a line."""
    if name == EAGER_ALONE:
        return "torch.set_num_threads(1)"
    if report.schedule(name):
        fuse, policy = split_plan(name)
        options, given = f"fuse={fuse!r}, policy={policy.partition(',')[0]!r}", ", training=True" * trains(report)
        made = f"net = Nimble(model, Options({options})).prepare({inputs_of(report)}{given})"
        return f"from nimble_core import Nimble, Options\n{made}"
    kind, _, mode = name.removesuffix("+freezing").partition(":")
    return f"model = torch.compile(model{f', mode={mode!r}' if mode else ''})" * (kind == "compile")


def _other_kernels(
    report: ReportData, found: Breakdown, bound: Callable[[str, float, str], Change]
) -> Iterator[Change]:
    """Suggest to compute memory-bound calls of the chain that ran longest inside their neighbours' kernels."""
    if report.work is None:
        return
    ns, rows = report.costs.ns, call_work(report)
    light = [
        call
        for call in found.calls
        if (flops := rows[call].flops) is not None and flops < _MEMORY_BOUND * rows[call].nbytes
    ]
    if light and len(light) == len(found.calls):
        light.remove(max(light, key=lambda call: ns[call]))  # somebody's kernel it has to be
    compiled = "inductor" if report.program.device == "cpu" else "auto"  # which tries no compiler on the host
    if report.program.fuse == "none" and not any(one.fuse != "none" and one.measurement for one in report.candidates):
        yield bound(
            f"compute {plural(len(light), 'light call')} inside {'its' if len(light) == 1 else 'their'} neighbours' "
            f"kernels (fuse={compiled!r})",
            sum(ns[call] for call in light),
            f"calls of the chain that ran longest with less than {_MEMORY_BOUND:g} operations for each byte",
        )
