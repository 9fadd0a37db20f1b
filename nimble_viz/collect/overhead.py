"""Where the host time of an eager iteration goes, call by call.

Pure but for ``measure_overhead``, which profiles. The steps: ``match_calls`` finds each call of the Program among the
profiled operators; ``overhead_profile`` cuts the iteration at the ends of the matched calls and says of every
nanosecond what the host was doing; ``eager_timeline`` draws the same events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nimble_core.ir.program import Program
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.utils.units import format_ns, format_percent
from nimble_viz.report.data import (
    INPUT,
    STAGES,
    Bound,
    CallOverhead,
    DeviceIdle,
    HostSync,
    OverheadProfile,
    PhaseOverhead,
    Stage,
)
from nimble_viz.traces.profiler import (
    PRINT,
    DeviceEvent,
    OperatorEvent,
    RuntimeEvent,
    Trace,
    is_launch,
    is_synchronisation,
    outer_first,
    profile_eager,
)

__all__ = [
    "Forest",
    "align",
    "covers",
    "device_idle",
    "eager_timeline",
    "iteration_bound",
    "match_calls",
    "match_positions",
    "measure_overhead",
    "overhead_profile",
    "union",
]

MATCHED_BOUND = 0.95
"""Below this share of calls found in the profile the split is marked as doubtful."""

SPREAD_BOUND = 1.5
"""Above this ratio of the longest to the shortest profiled iteration the split is marked as doubtful."""

REMAINDER_BOUND = 0.05
"""Above this share of the profiled iteration that belongs to no call the split is marked as doubtful."""

UNPROFILED_BOUND = 1.1
"""Above this ratio of unprofiled to profiled time something other than the profiler made the difference."""

_ALLOCATING_OPERATORS = ("aten::empty", "aten::new_empty", "aten::resize_")
_NO_WORK = (*_ALLOCATING_OPERATORS, "autograd::", PRINT)
_ALLOCATING_RUNTIME = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap", "cuMemAddressReserve")
_HOST_READS = ("aten::item", "aten::_local_scalar_dense")
_PRINTING = "print(tensor)"
# What these return depends on values, so the host has to look at them.
_DATA_DEPENDENT = (
    "aten::nonzero",
    "aten::unique",
    "aten::_unique",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::is_nonzero",
    "aten::equal",
    "aten::bincount",
)

_NOWHERE = -(1 << 60)
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

    Args:
        program: what ``run`` does, as recorded.
        run: one eager iteration, without waiting for the device.
        device: what it runs on.
        unprofiled_ns: median wall time of ``run(); synchronize()`` without a profiler.
        synchronize: waits until the device is idle; does nothing on the host.

    Raises:
        DeviceError: another profiler is running in this process.
    """
    trace = profile_eager(run, device=device, synchronize=synchronize)
    if trace.warnings:
        # The first session of a process can lose kernel events; a second one seldom does.
        again = profile_eager(run, device=device, synchronize=synchronize)
        trace = again if len(again.warnings) < len(trace.warnings) else trace
    overhead = overhead_profile(program, trace, unprofiled_ns)
    return overhead, eager_timeline(program, trace, overhead)


def overhead_profile(
    program: Program, trace: Trace, unprofiled_ns: float, matches: Sequence[tuple[int, int]] | None = None
) -> OverheadProfile:
    """Split the profiled iteration's host time over the calls of ``program``.

    The host time of a call begins where that of the previous matched call ended and lasts to the end of the outermost
    operator around it (``aten::linear`` around ``aten::addmm``). Views, ``empty`` and other operators that are no call
    of the Program count for the next call. Every nanosecond has one cause, the first that fits: waiting for the device
    (a copy to pageable memory of the host waits too), launch (``cudaLaunchKernel``, ``cudaMemcpyAsync``, ...),
    allocation (``cudaMalloc``, ``aten::empty``, ...), dispatch (an operator or autograd node is active), Python (none
    is). Dispatch after the call's last launch, on the host after its own operator returned, is its tail: what unwinding
    costs. Waiting is no work of the framework: it is counted in ``host_syncs`` and ``waiting_ns``. So is waiting for
    the data loader, in ``loader_ns``.

    On the host no event tells an operator's own computing from its dispatch, so ``work_ns`` is an *estimate*: the self
    time of the call's operator and of those inside it, each less ``trace.floor_ns`` (what the profiler shows for an
    operator with next to nothing to do), never below 0. The floor is measured with warm caches, so work is rather too
    high and dispatch too low. All host overhead is exposed there. On CUDA ``work_ns`` is GPU time, no part of the
    host's sum.

    Calls of the optimizer that were not found have one row together, of what is left up to the end of its phase: an
    eager optimizer makes many small calls where a captured one makes a few fused ones, so no operator is one of them.

    So for each device: the rows' overhead (on the host: and work) plus ``waiting_ns``, ``loader_ns`` and
    ``remainder_ns`` is ``profiled_ns``, exactly. ``profiled_ns`` includes the wait for the device at the end. Time is
    O(n log n) for n events, see ``align``.

    Args:
        program: the calls to find.
        trace: one profiled iteration.
        unprofiled_ns: median wall time of an iteration without the profiler; 0 if unknown.
        matches: ``(call, operator)`` where they are known; by default those of ``match_calls``.
    """
    forest = Forest.of(trace.operators)
    matches = match_positions(program, forest) if matches is None else matches
    cuts = _cuts(trace, forest, matches)
    busy = union([(max(k.start_ns, trace.start_ns), min(k.end_ns, trace.end_ns)) for k in trace.kernels])
    stretches = tuple(_causes(trace, busy, _tails(trace, forest, matches, cuts)))
    shared, until = _shared(program, trace, matches, cuts)
    *split, rest = _split(stretches, [*cuts, until])
    gpu_ns = _device_time(trace, forest, matches, cuts)

    def row(call: int, parts: Counter[str], work_ns: int) -> CallOverhead:
        return CallOverhead(call=call, **_parts_ns(trace, parts, work_ns))

    on_cpu = trace.device == "cpu"
    rows = [
        row(call, parts, _work(forest, event, trace.floor_ns) if on_cpu else gpu_ns.get(call, 0))
        for (call, event), parts in zip(matches, split, strict=True)
    ]
    if shared:
        work_ns = _work_inside(trace, forest, [(cuts[-1] if cuts else trace.start_ns, until)])
        rows = sorted([*rows, row(shared[0], rest, work_ns)], key=lambda one: one.call)
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
        matched=len(matches),
        total=len(program.calls),
        host_syncs=_host_syncs(program, trace, forest, matches),
        source=_source(trace),
        warnings=(
            *trace.warnings,
            *_doubts(program, trace, matches, unprofiled_ns),
            *_homeless(program, trace, stretches, matches, until),
        ),
        phases=tuple(_phases(trace, forest, stretches)),
        waiting_ns=float(lasted["waiting"]),
        loader_ns=float(lasted["loader"]),
        idle=device_idle(trace) if trace.device == "cuda" else None,
        shared=tuple(shared),
    )


def device_idle(trace: Trace) -> DeviceIdle:
    """Why the device idled during the iteration: each gap between its busy stretches, by what ended it.

    A gap is ended by a kernel (or copy). Up to the moment when the host began to launch that kernel nothing was queued:
    the host was late. From there to the kernel's start it is launch latency. If the launch lies before the gap the
    kernel was queued in time; what is left of the usual latency (the median over launches that found the device idle)
    is still launch latency, and the rest is dependency: the device turning from one kernel to the next, or a stream
    waiting for another. After the last kernel the host is late too: nothing more was queued. Gaps that end with a
    kernel whose launch was not seen are unknown. Pure; O(n log n).
    """
    launched = {event.correlation: event.start_ns for event in trace.runtime if event.correlation}
    inside = [kernel for kernel in trace.kernels if kernel.end_ns > trace.start_ns and kernel.start_ns < trace.end_ns]
    gaps: list[tuple[int, int, int | None]] = []  # start, end, launch of what ended it
    reached = trace.start_ns
    for kernel in sorted(inside, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        if kernel.start_ns > reached:
            gaps.append((reached, kernel.start_ns, launched.get(kernel.correlation)))
        reached = max(reached, min(kernel.end_ns, trace.end_ns))
    found: Counter[str] = Counter(host_late=max(0, trace.end_ns - reached))
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
    return DeviceIdle(
        host_late_ns=float(found["host_late"]),
        launch_ns=float(found["launch"]),
        dependency_ns=float(found["dependency"]),
        unknown_ns=float(found["unknown"]),
    )


def iteration_bound(trace: Trace, profile: OverheadProfile) -> Bound:
    """What the iteration's wall time was spent on: waiting for input, the device at work, or the host's own overhead.

    Each nanosecond counts once. On CUDA: the device was busy; else the host was in a phase of input (``"loader"``,
    ``"copy"``); else it is the host's. On the host device: phases of input; else the calls' estimated work; else the
    host's. Pure; O(n log n).
    """
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


def eager_timeline(
    program: Program, trace: Trace, overhead: OverheadProfile, matches: Sequence[tuple[int, int]] | None = None
) -> Timeline:
    """The profiled iteration as a timeline: one lane per host thread that issued operators, one per GPU stream.

    On a host lane stand the operators that are calls, and the outermost operators that hold none; what is inside
    either is left out, so spans of a lane do not overlap. Waiting for the data loader is a span too. Times count from
    the start of the iteration.
    """
    forest = Forest.of(trace.operators)
    matches = match_positions(program, forest) if matches is None else matches
    threads = sorted({event.thread for event in trace.operators})
    streams = sorted({kernel.stream for kernel in trace.kernels})
    hosts = [Lane(f"host thread {i}" if i else "host", "host") for i in range(len(threads))]
    lanes = (*hosts, *(Lane(f"GPU stream {stream}", "gpu") for stream in streams))
    lane_of_thread = {thread: i for i, thread in enumerate(threads)}
    lane_of_stream = {stream: len(threads) + i for i, stream in enumerate(streams)}
    spans = [
        _span(lane_of_thread[event.thread], event, trace.start_ns, call)
        for event, call in _shown(forest, {event: call for call, event in matches})
    ]
    spans += [
        Span(0, float(start - trace.start_ns), float(end - trace.start_ns), None, "data loader")
        for name, start, end in trace.phases
        if name == "loader" and hosts
    ]
    owners = _owners(trace, forest, matches, _cuts(trace, forest, matches))
    spans += [
        _span(lane_of_stream[kernel.stream], kernel, trace.start_ns, call)
        for kernel, call in zip(trace.kernels, owners, strict=True)
    ]
    return Timeline(
        run="eager",
        source="measured",
        clock="torch.profiler",
        lanes=lanes,
        spans=tuple(sorted(spans, key=lambda span: (span.start_ns, span.lane, span.end_ns))),
        profiled_ns=overhead.profiled_ns,
        unprofiled_ns=overhead.unprofiled_ns,
        reliable=not trace.warnings,
        note="; ".join(overhead.warnings),
    )


def match_calls(program: Program, operators: Sequence[OperatorEvent]) -> tuple[tuple[int, OperatorEvent], ...]:
    """Calls of the Program, by index, with the operators they were; both in order.

    A Program is recorded below autograd: of ``aten::linear`` it knows only the ``aten::addmm`` inside, and of what
    ``aten::addmm`` does inside it knows nothing. So the candidates are the outermost operators that carry the name of
    any call, and the pairs are a longest common subsequence of names, or nearly (see ``align``).
    """
    forest = Forest.of(operators)
    return tuple((call, forest.events[event]) for call, event in match_positions(program, forest))


def match_positions(program: Program, forest: Forest) -> tuple[tuple[int, int], ...]:
    """``match_calls`` as ``(call, position in the forest)``, both increasing."""
    # Autograd adds up gradients in place where nobody looks on.
    in_place = any(call.phase == "backward" for call in program.calls)

    def name_of(event: str) -> str:
        return event.rstrip("_") if in_place else event

    keys = [name_of(_event_name(call.operator)) for call in program.calls]
    wanted = set(keys)
    candidates = []
    at = 0
    while at < len(forest.events):
        if name_of(forest.events[at].name) in wanted:
            candidates.append(at)
            at = forest.ends[at]
        else:
            at += 1
    names = [name_of(forest.events[event].name) for event in candidates]
    return tuple((call, candidates[j]) for call, j in align(keys, names))


def align(left: Sequence[str], right: Sequence[str], max_edits: int = 256) -> list[tuple[int, int]]:
    """Index pairs of equal items, increasing in both: a longest common subsequence while few items differ.

    Complexity: O((n + m) D) for D differing items up to ``max_edits``; after that many the path that reaches furthest
    is kept and the search starts again there, so the whole stays within O((n + m) ``max_edits``).
    Source: E. W. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1 (1986), section 4.

    >>> align(["mm", "relu", "mm", "add"], ["mm", "copy_", "relu", "add"])
    [(0, 0), (1, 2), (3, 3)]
    """
    shared = set(left) & set(right)
    at_left = [i for i, item in enumerate(left) if item in shared]
    at_right = [j for j, item in enumerate(right) if item in shared]
    pairs: list[tuple[int, int]] = []
    x = y = 0
    common_left, common_right = [left[i] for i in at_left], [right[j] for j in at_right]
    while x < len(at_left) and y < len(at_right):
        found, x, y = _edit_path(common_left, common_right, x, y, max_edits)
        pairs += [(at_left[i], at_right[j]) for i, j in found]
    return pairs


def _edit_path(
    left: list[str], right: list[str], x0: int, y0: int, max_edits: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Matched pairs from ``(x0, y0)`` to where ``max_edits`` edits lead, and that place; the end if they suffice."""
    n, m = len(left), len(right)
    reach = {1: x0}
    history: list[dict[int, int]] = []
    for edits in range(max_edits + 1):
        history.append(reach)
        row: dict[int, int] = {}
        for k in range(-edits, edits + 1, 2):
            down, before = _step(reach, edits, k)
            x = before if down else before + 1
            y = x - x0 - k + y0
            if x < x0 or x > n or y > m:
                continue
            while x < n and y < m and left[x] == right[y]:
                x, y = x + 1, y + 1
            row[k] = x
            if x == n and y == m:
                return _backtrack(history, edits, k, x, x0, y0), x, y
        reach = row
    furthest = max(reach, key=lambda k: (2 * reach[k] - k, -abs(k)))
    x = reach[furthest]
    return _backtrack(history, max_edits, furthest, x, x0, y0), x, x - x0 - furthest + y0


def _step(reach: dict[int, int], edits: int, k: int) -> tuple[bool, int]:
    """Whether diagonal ``k`` is best entered by skipping an item on the right, and from which ``x``."""
    above, below = reach.get(k + 1, _NOWHERE), reach.get(k - 1, _NOWHERE)
    down = k == -edits or (k != edits and below < above)
    return down, above if down else below


def _backtrack(history: list[dict[int, int]], edits: int, k: int, x: int, x0: int, y0: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    while True:
        reach = history[edits]
        down, before = _step(reach, edits, k)
        start = before if down else before + 1
        while x > start:
            x -= 1
            pairs.append((x, x - x0 - k + y0))
        if edits == 0:
            return pairs[::-1]
        edits, k, x = edits - 1, k + 1 if down else k - 1, before


def _event_name(operator: str) -> str:
    """The profiler's name of an operator: ``"aten.add_.Tensor"`` is ``"aten::add_"``; a kernel keeps its own."""
    parts = operator.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else operator


@dataclass(frozen=True, slots=True)
class Forest:
    """Operators as nested by thread: preorder of the trees, the trees by start.

    ``ends[i]`` is one past the last operator inside ``i``, ``parents[i]`` the operator directly around it, -1 if none.
    """

    events: tuple[OperatorEvent, ...]
    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def of(operators: Sequence[OperatorEvent]) -> Forest:
        """Nest these operators; any order."""
        trees: list[list[OperatorEvent]] = []
        open_until: dict[int, int] = {}
        tree_of: dict[int, list[OperatorEvent]] = {}
        for event in outer_first(operators):
            if event.start_ns >= open_until.get(event.thread, event.start_ns):
                trees.append([])
                tree_of[event.thread] = trees[-1]
                open_until[event.thread] = event.end_ns
            tree_of[event.thread].append(event)
        events: list[OperatorEvent] = []
        ends, parents = [0] * len(operators), [-1] * len(operators)
        for tree in trees:
            around: list[int] = []
            for event in tree:
                while around and events[around[-1]].end_ns <= event.start_ns:
                    ends[around.pop()] = len(events)
                if around:
                    parents[len(events)] = around[-1]
                around.append(len(events))
                events.append(event)
            for unfinished in around:
                ends[unfinished] = len(events)
        return Forest(tuple(events), tuple(ends), tuple(parents))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of host time with one cause, during which the device was busy or was not."""

    start_ns: int
    end_ns: int
    cause: _Cause
    busy: bool


def _cuts(trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]]) -> list[int]:
    """End of each matched call's host time: that of the outermost operator around it which holds no later call."""
    cuts = []
    reached = trace.start_ns
    for position, (_, event) in enumerate(matches):
        following = matches[position + 1][1] if position + 1 < len(matches) else len(forest.events)
        while (around := forest.parents[event]) >= 0 and forest.ends[around] <= following:
            event = around
        reached = min(max(reached, forest.events[event].end_ns), trace.run_end_ns)
        cuts.append(reached)
    return cuts


def _shared(
    program: Program, trace: Trace, matches: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> tuple[list[int], int]:
    """Calls of the optimizer that were not found, and where the host time after the last cut that they share ends."""
    last = cuts[-1] if cuts else trace.start_ns
    until = min(max((end for name, _, end in trace.phases if name == "optimizer"), default=last), trace.run_end_ns)
    found = {call for call, _ in matches}
    missing = [call.index for call in program.calls if call.phase == "optimizer" and call.index not in found]
    return (missing, until) if missing and until > last else ([], last)


def _tails(
    trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """From each call's last launch (on the host: from the end of its own operator) to the end of its host time."""
    if trace.device == "cpu":
        yield from ((forest.events[event].end_ns, cut) for (_, event), cut in zip(matches, cuts, strict=True))
        return
    last: dict[int, int] = {}
    for event in trace.runtime:
        if is_launch(event.name):
            position = bisect_right(cuts, event.start_ns)
            last[position] = max(last.get(position, 0), event.end_ns)
    yield from ((end, cuts[position]) for position, end in last.items() if position < len(cuts))


def _causes(trace: Trace, busy: Sequence[tuple[int, int]], tails: Iterable[tuple[int, int]] = ()) -> Iterator[_Stretch]:
    """The iteration as consecutive stretches: one sweep over the ends of all events."""
    edges: list[tuple[int, int, str]] = []
    for event in trace.operators:
        if event.name == PRINT:
            continue  # it is Python that runs there, but for the operators inside
        cause = "allocation" if event.name.startswith(_ALLOCATING_OPERATORS) else "dispatch"
        edges += [(event.start_ns, 1, cause), (event.end_ns, -1, cause)]
    blocking = _blocking_copies(trace)
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
    """Cause of a runtime call; None leaves it to what is around it (``cudaGetDevice`` inside an operator)."""
    if is_synchronisation(name):
        return "waiting"
    if is_launch(name):
        return "launch"
    return "allocation" if name.startswith(_ALLOCATING_RUNTIME) else None


def _split(stretches: Iterable[_Stretch], cuts: Sequence[int]) -> list[Counter[str]]:
    """Nanoseconds by cause, and ``"exposed"``, between cuts; what lies after the last cut is left out."""
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
    """Each phase's host time by cause, whatever operator it was spent on; in the order of a step."""
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
    """Fields of a row. On a CPU an operator computes while it is dispatched, and all overhead is exposed."""
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
    """Work of what began (on CUDA: what was launched) in these stretches, nanoseconds."""
    if trace.device == "cpu":
        roots = (at for at, parent in enumerate(forest.parents) if parent < 0)
        own = (root for root in roots if covers(inside, forest.events[root].start_ns))
        return sum(_work(forest, root, trace.floor_ns) for root in own)
    launched_at = {event.correlation: event.start_ns for event in trace.runtime}
    launched = (kernel for kernel in trace.kernels if covers(inside, launched_at.get(kernel.correlation, -1)))
    return sum(kernel.end_ns - kernel.start_ns for kernel in launched)


def _work(forest: Forest, event: int, floor_ns: float) -> int:
    """Self time above the floor of an operator and those inside it, nanoseconds.

    Allocations are left out, and autograd's own nodes.
    """
    own = {i: forest.events[i].end_ns - forest.events[i].start_ns for i in range(event, forest.ends[event])}
    for i in range(event + 1, forest.ends[event]):
        own[forest.parents[i]] -= forest.events[i].end_ns - forest.events[i].start_ns
    return sum(
        max(0, round(ns - floor_ns))
        for i, ns in own.items()
        if "::" in forest.events[i].name and not forest.events[i].name.startswith(_NO_WORK)
    )


def _owners(trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[int | None]:
    """The call of each device event: that in whose host time it was launched; None if its launch is unknown."""
    launched_at = {event.correlation: event.start_ns for event in trace.runtime}
    operator_at = {event.correlation: event.start_ns for event in forest.events if event.correlation}
    owners: list[int | None] = []
    for kernel in trace.kernels:
        at = launched_at.get(kernel.correlation, operator_at.get(kernel.linked))
        position = len(cuts) if at is None else bisect_right(cuts, at)
        owners.append(matches[position][0] if position < len(cuts) else None)
    return owners


def _device_time(
    trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> dict[int, int]:
    """Sum of the durations of each call's device events, by call."""
    total: dict[int, int] = defaultdict(int)
    for kernel, call in zip(trace.kernels, _owners(trace, forest, matches, cuts), strict=True):
        if call is not None:
            total[call] += kernel.end_ns - kernel.start_ns
    return total


def _host_syncs(
    program: Program, trace: Trace, forest: Forest, matches: Sequence[tuple[int, int]]
) -> tuple[HostSync, ...]:
    """Host synchronisations by kind and place, the longest first.

    No event says which source line they came from; the recorded origin of the call under way, or of the last call
    before, is given instead.
    """
    starts = [forest.events[event].start_ns for _, event in matches]
    phases = sorted(trace.phases, key=lambda one: one[1])
    sums: dict[tuple[str, str, Stage | Literal[""]], list[int]] = defaultdict(list)
    for start, end, kind in _waits(trace, forest):
        before = bisect_right(starts, start) - 1
        place = ""
        if before >= 0:
            call, operator = matches[before]
            place = _place(program, call, within=start < forest.events[operator].end_ns)
        at = bisect_right(phases, start, key=lambda one: one[1]) - 1
        phase: Stage | Literal[""] = phases[at][0] if at >= 0 and start < phases[at][2] else ""
        sums[kind, place, phase].append(end - start)
    rows = [HostSync(kind, len(ns), float(sum(ns)), place, phase) for (kind, place, phase), ns in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind, row.source)))


def _waits(trace: Trace, forest: Forest) -> Iterator[tuple[int, int, str]]:
    """``(start, end, kind)`` of what made the host wait.

    A host read (``.item()``), an operator whose result has a size that depends on data (``nonzero``), a tensor that is
    printed (it is read value by value), and a copy that the host waits for are one each, not two, whatever the runtime
    does inside; the last is named after the copy (``"Memcpy DtoH (Device -> Pageable)"``). Where a GPU was traced they
    count if the host waited inside: what is read may lie on the host, as the step of Adam does. On the host nothing
    waits, so reads count as what would wait on a GPU, but for the optimizer's own, which are of such counters.
    """
    blocking = _blocking_copies(trace)
    waits = sorted(
        (event for event in trace.runtime if is_synchronisation(event.name) or event.correlation in blocking),
        key=lambda event: event.start_ns,
    )
    on_host = trace.device == "cpu"
    names = (PRINT, *_HOST_READS, *(() if on_host else _DATA_DEPENDENT))
    waited = [(event.start_ns, event.end_ns) for event in waits]
    if on_host:
        waited = sorted((start, end) for start, end, _ in _outermost(forest, _HOST_READS))
    counters = sorted((start, end) for name, start, end in trace.phases if name == "optimizer")
    reads = []
    for start, end, kind in _outermost(forest, names):
        lasted = [b - a for a, b in waited[bisect_left(waited, (start, 0)) : bisect_left(waited, (end, 0))]]
        if not lasted or (on_host and covers(counters, start)):
            continue
        reads.append((start, end))
        if kind == PRINT:  # the rest of it is Python that makes text
            yield start, start + sum(lasted), _PRINTING
        else:
            yield start, end, kind
    inside = union(reads)
    copies = _copies(trace, forest)
    waited_in: dict[int, list[RuntimeEvent]] = defaultdict(list)
    for event in waits:
        if covers(inside, event.start_ns):
            continue
        copy = bisect_right(copies, event.start_ns, key=lambda one: one[0]) - 1
        if copy >= 0 and event.start_ns < copies[copy][1]:
            waited_in[copy].append(event)
        else:
            yield event.start_ns, event.end_ns, blocking.get(event.correlation, event.name)
    for copy, own in waited_in.items():
        yield own[0].start_ns, own[0].start_ns + sum(one.end_ns - one.start_ns for one in own), copies[copy][2]


def _outermost(forest: Forest, names: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """``(start, end, name)`` of the operators whose name begins so, without those inside another of them."""
    until = -1
    for at, event in enumerate(forest.events):
        if at >= until and event.name.startswith(names):
            until = forest.ends[at]
            yield event.start_ns, event.end_ns, event.name


def _blocking_copies(trace: Trace) -> dict[int, str]:
    """Correlation and kind of the copies that wait by themselves: to memory of the host that is not pinned."""
    return {
        kernel.correlation: kernel.name
        for kernel in trace.kernels
        if kernel.kind == "memcpy" and kernel.correlation and "DtoH" in kernel.name and "Pageable" in kernel.name
    }


def _copies(trace: Trace, forest: Forest) -> list[tuple[int, int, str]]:
    """``(start, end, kind)`` of the operators that copy between host and device, sorted by start, not nested."""
    issued = sorted(
        (event.start_ns, event.correlation) for event in trace.runtime if event.correlation and is_launch(event.name)
    )
    kind_of = {kernel.correlation: kernel.name for kernel in trace.kernels if kernel.kind == "memcpy"}
    found: list[tuple[int, int, str]] = []
    for event in forest.events:
        if event.name == "aten::copy_":
            inside = issued[bisect_left(issued, (event.start_ns, 0)) : bisect_left(issued, (event.end_ns, 0))]
            kinds = (kind_of.get(correlation, "") for _, correlation in inside)
            kind = next((kind for kind in kinds if "HtoD" in kind or "DtoH" in kind), "")
            if kind:
                found.append((event.start_ns, event.end_ns, kind))
    return sorted(found)


def _place(program: Program, call: int, within: bool) -> str:
    origins = program.calls[call].origins
    if within and origins and origins[0].file:
        return f"{origins[0].file}:{origins[0].line}"
    return _last_place(program, call)


def _last_place(program: Program, call: int) -> str:
    """``"after FILE:LINE"``: the last known line of the phase up to ``call``: printing a tensor has none itself."""
    phase = program.calls[call].phase
    for one in reversed(program.calls[: call + 1]):
        if one.phase != phase:
            break
        if one.origins and one.origins[0].file:
            return f"after {one.origins[0].file}:{one.origins[0].line}"
    return ""


def _doubts(program: Program, trace: Trace, matches: Sequence[tuple[int, int]], unprofiled_ns: float) -> Iterator[str]:
    shortest, longest = min(trace.iterations_ns, default=0), max(trace.iterations_ns, default=0)
    if longest > SPREAD_BOUND * shortest:
        yield f"the profiled iterations took {format_ns(shortest)} to {format_ns(longest)}: the machine was not quiet"
    if unprofiled_ns > UNPROFILED_BOUND * trace.length_ns:
        yield (
            f"the profiled iteration ({format_ns(trace.length_ns)}) was faster than those without the profiler "
            f"({format_ns(unprofiled_ns)}): the machine was not quiet, compare shares only"
        )
    # An eager optimizer makes other calls than a captured one: its time is known by phase.
    wanted = [call for call in program.calls if call.phase != "optimizer"]
    found = {call for call, _ in matches}
    missing = [call for call in wanted if call.index not in found]
    if len(missing) > (1 - MATCHED_BOUND) * len(wanted):
        seen, total = len(wanted) - len(missing), len(wanted)
        yield (
            f"{seen} of {total} calls ({format_percent(seen / total)}) were found in the profile; "
            f"first missing: {missing[0]}"
        )


def _homeless(
    program: Program, trace: Trace, stretches: Iterable[_Stretch], matches: Sequence[tuple[int, int]], last: int
) -> Iterator[str]:
    """Said where too much host time after the last call belongs to none; an eager optimizer is known by phase.

    Where one stretch of Python, without any operator, is most of it, the line before it is named: a data pipeline of
    the user's own, say.
    """
    known = [(start, end) for name, start, end in trace.phases if name == "optimizer"]
    lost = longest = running = 0
    for stretch in stretches:
        start, end = max(stretch.start_ns, last), stretch.end_ns
        own = 0
        if stretch.cause not in _WAITS and end > start:
            own = end - start - sum(max(0, min(end, until) - max(start, since)) for since, until in known)
        lost += own
        running = running + own if stretch.cause == "python" else 0  # stretches also end where the device turns idle
        longest = max(longest, running)
    if lost > REMAINDER_BOUND * trace.length_ns:
        share = format_percent(lost / trace.length_ns)
        place = _last_place(program, matches[-1][0]) if matches else ""
        one = f": {format_ns(longest)} in one stretch of Python, {place}" if place and 2 * longest > lost else ""
        where = "come after its last call and belong to none" if program.calls else "belong to no call: there is none"
        yield f"{format_ns(lost)} of the profiled iteration ({share}) {where}{one}"


def _source(trace: Trace) -> str:
    rounds = (
        f"torch.profiler, median of {len(trace.iterations_ns)} iterations" if trace.iterations_ns else "torch.profiler"
    )
    if trace.device == "cuda":
        return f"{rounds}; work is GPU time"
    return f"{rounds}; work is estimated: operator self time less a floor of {trace.floor_ns:.0f} ns each"


def _shown(forest: Forest, call_of: dict[int, int]) -> Iterator[tuple[OperatorEvent, int | None]]:
    """Matched operators, and the outermost others that hold no matched one."""
    holds = [False] * len(forest.events)
    for event in call_of:
        while event >= 0 and not holds[event]:
            holds[event] = True
            event = forest.parents[event]
    at = 0
    while at < len(forest.events):
        if at in call_of or not holds[at]:
            yield forest.events[at], call_of.get(at)
            at = forest.ends[at]
        else:
            at += 1


def _span(lane: int, event: OperatorEvent | DeviceEvent, origin_ns: int, call: int | None) -> Span:
    # The device's clock is mapped to the host's with an error of microseconds: a kernel may seem to start too early.
    start_ns = max(0, event.start_ns - origin_ns)
    return Span(lane, float(start_ns), float(max(start_ns, event.end_ns - origin_ns)), call, event.name)


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint, sorted intervals that cover the same; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covers(intervals: Sequence[tuple[int, int]], at: int) -> bool:
    """Whether one of these disjoint, sorted intervals holds ``at``."""
    position = bisect_right(intervals, at, key=lambda interval: interval[0]) - 1
    return position >= 0 and at < intervals[position][1]
