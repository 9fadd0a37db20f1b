"""Split the host time of an eager iteration over its calls; pure but for ``measure_overhead``, which profiles."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nimble_core.ir.program import Program
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_ns, format_percent
from nimble_viz.analysis.intervals import covers, union
from nimble_viz.collect.host_syncs import blocking_copies, host_syncs
from nimble_viz.collect.iterations import profile_eager
from nimble_viz.collect.matched_trace import Forest, MatchedTrace, eager_timeline
from nimble_viz.report.data import INPUT, STAGES, Bound, CallOverhead, DeviceIdle, OverheadProfile, PhaseOverhead
from nimble_viz.traces.events import PRINT, Trace, is_launch, is_synchronisation

__all__ = ["device_idle", "iteration_bound", "measure_overhead", "overhead_profile"]


MATCHED_BOUND = 0.95
"""Below this share of calls found in the profile the split is marked as doubtful."""

SPREAD_BOUND = 1.5
"""Above this ratio of the longest to the shortest profiled iteration the split is marked as doubtful."""

REMAINDER_BOUND = 0.05
"""Above this unattributed share of the profiled iteration the split is marked as doubtful."""

UNPROFILED_BOUND = 1.1
"""Above this ratio of unprofiled to profiled time something other than the profiler made the difference."""

_ALLOCATING_OPERATORS = ("aten::empty", "aten::new_empty", "aten::resize_")
_NO_WORK = (*_ALLOCATING_OPERATORS, "autograd::", PRINT)
_ALLOCATING_RUNTIME = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap", "cuMemAddressReserve")

_Cause = Literal["python", "dispatch", "allocation", "launch", "tail", "waiting", "loader"]
_PRECEDENCE: tuple[_Cause, ...] = ("loader", "waiting", "launch", "allocation", "dispatch")
_WAITS: tuple[_Cause, ...] = ("loader", "waiting")


def measure_overhead(
    program: Program,
    run: Callable[[], object],
    *,
    device: Literal["cuda", "cpu"],
    unprofiled_ns: float,
    synchronize: Callable[[], object],
) -> tuple[OverheadProfile, Timeline]:
    """Profile ``run``, the eager model that ``program`` was recorded from, and split its host time.

    ``unprofiled_ns`` is the median wall time of ``run(); synchronize()`` without a profiler. ``synchronize`` waits
    until the device is idle, and does nothing on the host. Raises DeviceError if another profiler runs in this process.
    """
    trace = profile_eager(run, device=device, synchronize=synchronize)
    if trace.warnings:
        # The first session of a process can lose kernel events; a second one seldom does.
        again = profile_eager(run, device=device, synchronize=synchronize)
        trace = again if len(again.warnings) < len(trace.warnings) else trace
    matched = MatchedTrace.of(program, trace)
    overhead = overhead_profile(matched, unprofiled_ns)
    return overhead, eager_timeline(matched, overhead)


def overhead_profile(matched: MatchedTrace, unprofiled_ns: float) -> OverheadProfile:
    """Split the profiled iteration's host time over the calls. O(n log n) for n events, see ``align``.

    docs/profiling.md defines the parts. Every nanosecond has one cause, and for each device the rows' overhead (on the
    host: and work) plus ``waiting_ns``, ``loader_ns`` and ``remainder_ns`` is ``profiled_ns``, exactly. Calls of the
    optimizer that were not found share one row: an eager optimizer makes many small calls where a captured one makes a
    few fused ones, so no operator is one of them.

    ``unprofiled_ns`` is the median wall time of an iteration without the profiler, 0 if unknown.
    """
    trace, on_cpu = matched.trace, matched.trace.device == "cpu"
    busy = union([(max(k.start_ns, trace.start_ns), min(k.end_ns, trace.end_ns)) for k in trace.kernels])
    stretches = tuple(_causes(trace, busy, _tails(matched)))
    shared, until = _shared(matched)
    rows = _rows(matched, stretches, shared, until)
    lasted: Counter[str] = Counter()
    for stretch in stretches:
        lasted[stretch.cause] += stretch.end_ns - stretch.start_ns
    on_host = sum(one.overhead_ns + (one.work_ns if on_cpu else 0.0) for one in rows)
    busy_ns = sum(one.work_ns for one in rows) if on_cpu else float(sum(e - s for s, e in busy))
    return OverheadProfile(
        calls=tuple(rows),
        profiled_ns=float(trace.length_ns),
        unprofiled_ns=float(unprofiled_ns),
        remainder_ns=trace.length_ns - lasted["waiting"] - lasted["loader"] - on_host,
        device_busy_ns=busy_ns,
        device_idle_share=1.0 - busy_ns / trace.length_ns if trace.length_ns else 0.0,
        matched=len(matched.matches),
        total=len(matched.program.calls),
        host_syncs=host_syncs(matched),
        source=_source(trace),
        warnings=(*trace.warnings, *_doubts(matched, unprofiled_ns), *_unattributed(matched, stretches, until)),
        phases=tuple(_phases(trace, matched.forest, stretches)),
        waiting_ns=float(lasted["waiting"]),
        loader_ns=float(lasted["loader"]),
        idle=None if on_cpu else device_idle(trace),
        shared=tuple(shared),
    )


def _rows(
    matched: MatchedTrace, stretches: Sequence[_Stretch], shared: Sequence[int], until: int
) -> list[CallOverhead]:
    """Return a row for each matched call, and one for those that share the time up to ``until``."""
    trace, forest, cuts = matched.trace, matched.forest, matched.cuts
    *split, rest = _split(stretches, [*cuts, until])
    gpu_ns = _device_time(matched)

    def row(call: int, parts: Counter[str], work_ns: int) -> CallOverhead:
        return CallOverhead(call=call, **_parts_ns(trace, parts, work_ns))

    rows = [
        row(call, parts, _work(forest, event, trace.floor_ns) if trace.device == "cpu" else gpu_ns[call])
        for (call, event), parts in zip(matched.matches, split, strict=True)
    ]
    if shared:
        work_ns = _work_inside(trace, forest, [(cuts[-1] if cuts else trace.start_ns, until)])
        rows = sorted([*rows, row(shared[0], rest, work_ns)], key=lambda one: one.call)
    return rows


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of host time with one cause, during which the device was busy or was not."""

    start_ns: int
    end_ns: int
    cause: _Cause
    busy: bool


def _shared(matched: MatchedTrace) -> tuple[list[int], int]:
    """Return calls of the optimizer that were not found, and the end of the host time that they share."""
    trace, cuts = matched.trace, matched.cuts
    last = cuts[-1] if cuts else trace.start_ns
    until = min(max((end for name, _, end in trace.phases if name == "optimizer"), default=last), trace.run_end_ns)
    found = matched.found
    missing = [call.index for call in matched.program.calls if call.phase == "optimizer" and call.index not in found]
    return (missing, until) if missing and until > last else ([], last)


def _tails(matched: MatchedTrace) -> Iterator[tuple[int, int]]:
    """Yield each call's span from its last launch, or its operator's end, to the end of its host time."""
    cuts, events = matched.cuts, matched.forest.events
    if matched.trace.device == "cpu":
        yield from ((events[event].end_ns, cut) for (_, event), cut in zip(matched.matches, cuts, strict=True))
        return
    last: dict[int, int] = {}
    for event in matched.trace.runtime:
        if is_launch(event.name):
            position = bisect_right(cuts, event.start_ns)
            last[position] = max(last.get(position, 0), event.end_ns)
    yield from ((end, cuts[position]) for position, end in last.items() if position < len(cuts))


def _causes(trace: Trace, busy: Sequence[tuple[int, int]], tails: Iterable[tuple[int, int]] = ()) -> Iterator[_Stretch]:
    """Cut the iteration into consecutive stretches, in one sweep over the ends of all events."""
    edges: list[tuple[int, int, str]] = []
    for event in trace.operators:
        if event.name == PRINT:
            continue  # it is Python that runs there, but for the operators inside
        cause = "allocation" if event.name.startswith(_ALLOCATING_OPERATORS) else "dispatch"
        edges += [(event.start_ns, 1, cause), (event.end_ns, -1, cause)]
    blocking = blocking_copies(trace)
    for call in trace.runtime:
        runtime_cause = "waiting" if call.correlation in blocking else _runtime_cause(call.name)
        if runtime_cause:
            edges += [(call.start_ns, 1, runtime_cause), (call.end_ns, -1, runtime_cause)]
    edges += [edge for start, end in busy for edge in ((start, 1, "busy"), (end, -1, "busy"))]
    edges += [edge for start, end in tails if end > start for edge in ((start, 1, "after"), (end, -1, "after"))]
    for name, start, end in trace.phases:
        edges += [(start, 1, "loader"), (end, -1, "loader")] if name == "loader" else []
    if trace.device == "cuda":
        edges += [(trace.run_end_ns, 1, "waiting"), (trace.end_ns, -1, "waiting")]
    active: dict[str, int] = defaultdict(int)
    now = trace.start_ns
    for at, change, cause in sorted(edges):
        at = min(max(at, trace.start_ns), trace.end_ns)
        if at > now:
            current: _Cause = next((name for name in _PRECEDENCE if active[name]), "python")
            current = "tail" if current == "dispatch" and active["after"] else current
            yield _Stretch(now, at, current, busy=active["busy"] > 0)
            now = at
        active[cause] += change
    if now < trace.end_ns:
        yield _Stretch(now, trace.end_ns, "python", busy=False)


def _runtime_cause(name: str) -> _Cause | None:
    """Return the cause of a runtime call; None leaves it to what is around it."""
    if is_synchronisation(name):
        return "waiting"
    if is_launch(name):
        return "launch"
    return "allocation" if name.startswith(_ALLOCATING_RUNTIME) else None


def _split(stretches: Iterable[_Stretch], cuts: Sequence[int]) -> list[Counter[str]]:
    """Sum nanoseconds by cause, and ``"exposed"``, between cuts; what lies after the last cut is left out."""
    split: list[Counter[str]] = [Counter() for _ in cuts]
    call = 0
    for stretch in stretches:
        start = stretch.start_ns
        while call < len(cuts) and start < stretch.end_ns:
            end = max(start, min(stretch.end_ns, cuts[call]))
            split[call][stretch.cause] += end - start
            if stretch.cause not in _WAITS and not stretch.busy:
                split[call]["exposed"] += end - start
            start = end
            if cuts[call] <= start:
                call += 1
    return split


def _phases(trace: Trace, forest: Forest, stretches: Sequence[_Stretch]) -> Iterator[PhaseOverhead]:
    """Yield each phase's host time by cause, whatever operator it went to, in the order of a step."""
    split = _split(stretches, [at for _, start, end in trace.phases for at in (start, end)])
    named = {name for name, _, _ in trace.phases}
    for phase in (name for name in STAGES if name in named):  # gradients are zeroed before all else
        at = [position for position, (name, _, _) in enumerate(trace.phases) if name == phase]
        inside = [trace.phases[position][1:] for position in at]
        parts = sum((split[2 * position + 1] for position in at), Counter[str]())
        yield PhaseOverhead(
            phase=phase,
            spans=tuple((float(start - trace.start_ns), float(end - trace.start_ns)) for start, end in inside),
            **_parts_ns(trace, parts, _work_inside(trace, forest, inside)),
        )


def _parts_ns(trace: Trace, parts: Counter[str], work_ns: int) -> dict[str, float]:
    """Return the fields of a row; on a CPU operators work while dispatched, and all overhead is exposed."""
    dispatch_ns, on_cpu = parts["dispatch"], trace.device == "cpu"
    if on_cpu:
        work_ns = min(dispatch_ns, work_ns)
        dispatch_ns -= work_ns
    overhead_ns = parts["python"] + dispatch_ns + parts["allocation"] + parts["launch"] + parts["tail"]
    return {
        "python_ns": float(parts["python"]),
        "dispatch_ns": float(dispatch_ns),
        "allocation_ns": float(parts["allocation"]),
        "launch_ns": float(parts["launch"]),
        "work_ns": float(work_ns),
        "exposed_ns": float(overhead_ns if on_cpu else parts["exposed"]),
        "tail_ns": float(parts["tail"]),
    }


def _work_inside(trace: Trace, forest: Forest, inside: Sequence[tuple[int, int]]) -> int:
    """Sum the work, in nanoseconds, of what began (on CUDA: was launched) in these stretches."""
    if trace.device == "cpu":
        roots = (at for at, parent in enumerate(forest.parents) if parent < 0)
        own = (root for root in roots if covers(inside, forest.events[root].start_ns))
        return sum(_work(forest, root, trace.floor_ns) for root in own)
    launched_at = {event.correlation: event.start_ns for event in trace.runtime}
    launched = (kernel for kernel in trace.kernels if covers(inside, launched_at.get(kernel.correlation, -1)))
    return sum(kernel.end_ns - kernel.start_ns for kernel in launched)


def _work(forest: Forest, event: int, floor_ns: float) -> int:
    """Sum the self time above the floor of an operator and those inside it, ns, without allocations and autograd."""
    own = {i: forest.events[i].end_ns - forest.events[i].start_ns for i in range(event, forest.ends[event])}
    for i in range(event + 1, forest.ends[event]):
        own[forest.parents[i]] -= forest.events[i].end_ns - forest.events[i].start_ns
    return sum(
        max(0, round(ns - floor_ns))
        for i, ns in own.items()
        if "::" in forest.events[i].name and not forest.events[i].name.startswith(_NO_WORK)
    )


def _device_time(matched: MatchedTrace) -> Counter[int]:
    """Sum the durations of each call's device events, by call."""
    total: Counter[int] = Counter()
    for kernel, call in zip(matched.trace.kernels, matched.owners, strict=True):
        if call is not None:
            total[call] += kernel.end_ns - kernel.start_ns
    return total


def _doubts(matched: MatchedTrace, unprofiled_ns: float) -> Iterator[str]:
    trace = matched.trace
    shortest, longest = min(trace.iterations_ns, default=0), max(trace.iterations_ns, default=0)
    if longest > SPREAD_BOUND * shortest:
        yield f"the profiled iterations took {format_ns(shortest)} to {format_ns(longest)}: the machine was not quiet"
    if unprofiled_ns > UNPROFILED_BOUND * trace.length_ns:
        yield (
            f"the profiled iteration ({format_ns(trace.length_ns)}) was faster than those without the profiler "
            f"({format_ns(unprofiled_ns)}): the machine was not quiet, compare shares only"
        )
    # An eager optimizer makes other calls than a captured one: its time is known by phase.
    wanted = [call for call in matched.program.calls if call.phase != "optimizer"]
    found = matched.found
    missing = [call for call in wanted if call.index not in found]
    if len(missing) > (1 - MATCHED_BOUND) * len(wanted):
        seen, total = len(wanted) - len(missing), len(wanted)
        yield (
            f"{seen} of {total} calls ({format_percent(seen / total)}) were found in the profile; "
            f"first missing: {missing[0]}"
        )


def _unattributed(matched: MatchedTrace, stretches: Iterable[_Stretch], last: int) -> Iterator[str]:
    """Warn if too much host time after the last call, and outside the optimizer, is not attributed to any."""
    trace = matched.trace
    known = [(start, end) for name, start, end in trace.phases if name == "optimizer"]
    lost = 0
    for stretch in stretches:
        start, end = max(stretch.start_ns, last), stretch.end_ns
        if stretch.cause not in _WAITS and end > start:
            lost += end - start - sum(max(0, min(end, until) - max(start, since)) for since, until in known)
    if lost > REMAINDER_BOUND * trace.length_ns:
        where = "come after its last call" if matched.program.calls else "are not attributed to any call"
        yield f"{format_ns(lost)} of the profiled iteration ({format_percent(lost / trace.length_ns)}) {where}"


def _source(trace: Trace) -> str:
    rounds = (
        f"torch.profiler, median of {len(trace.iterations_ns)} iterations" if trace.iterations_ns else "torch.profiler"
    )
    if trace.device == "cuda":
        return f"{rounds}; work is GPU time"
    return f"{rounds}; work is estimated: operator self time less a floor of {trace.floor_ns:.0f} ns each"


def device_idle(trace: Trace) -> DeviceIdle:
    """Say why the device idled, as docs/profiling.md defines it: each gap by what ended it. O(n log n)."""
    launched = {event.correlation: event.start_ns for event in trace.runtime if event.correlation}
    inside = [kernel for kernel in trace.kernels if kernel.end_ns > trace.start_ns and kernel.start_ns < trace.end_ns]
    gaps: list[tuple[int, int, int | None]] = []  # start, end, launch of what ended it
    reached = trace.start_ns
    for kernel in sorted(inside, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        if kernel.start_ns > reached:
            gaps.append((reached, kernel.start_ns, launched.get(kernel.correlation)))
        reached = max(reached, min(kernel.end_ns, trace.end_ns))
    found = Counter(host_late=max(0, trace.end_ns - reached), launch=0, dependency=0, unknown=0)
    usual = median([end - at for start, end, at in gaps if at is not None and start <= at <= end] or [0])
    for start, end, at in gaps:
        if at is None:
            found["unknown"] += end - start
            continue
        late = min(max(at - start, 0), end - start)  # clocks disagree by microseconds: a kernel may precede its launch
        latency = end - start - late if at >= start else min(end - start, max(0, round(at + usual) - start))
        found["host_late"] += late
        found["launch"] += latency
        found["dependency"] += end - start - late - latency
    return DeviceIdle(**{f"{cause}_ns": float(ns) for cause, ns in found.items()})


def iteration_bound(trace: Trace, profile: OverheadProfile) -> Bound:
    """Say what the wall time went to, as docs/profiling.md defines it, each nanosecond once. O(n log n)."""
    spans = union([(start, end) for name, start, end in trace.phases if name in INPUT])
    feeding = sum(end - start for start, end in spans)
    if trace.device == "cpu":
        own = sum(one.work_ns for one in profile.phases if one.phase in INPUT)
        work = max(0.0, min(profile.device_busy_ns - own, float(trace.length_ns - feeding)))
        return Bound(float(feeding), work, trace.length_ns - feeding - work)
    busy = union([(max(k.start_ns, trace.start_ns), min(k.end_ns, trace.end_ns)) for k in trace.kernels])
    device = sum(end - start for start, end in busy)
    either = sum(end - start for start, end in union([*busy, *spans]))
    return Bound(float(either - device), float(device), float(trace.length_ns - either))
