"""Where the host time of an eager iteration goes, call by call.

Pure but for ``measure_overhead``, which profiles. The steps: ``match_calls`` finds each call of the Program among the
profiled operators; ``overhead_profile`` cuts the iteration at the ends of the matched calls and says of every
nanosecond what the host was doing; ``eager_timeline`` draws the same events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nimble_core.program import Phase, Program
from nimble_core.timeline import Lane, Span, Timeline
from nimble_core.units import format_ns, format_percent
from nimble_viz.measure.profile import (
    DeviceEvent,
    OperatorEvent,
    Trace,
    is_launch,
    is_synchronisation,
    outer_first,
    profile_eager,
)
from nimble_viz.report import CallOverhead, HostSync, OverheadProfile, PhaseOverhead

__all__ = ["align", "eager_timeline", "match_calls", "measure_overhead", "overhead_profile"]

MATCHED_BOUND = 0.95
"""Below this share of calls found in the profile the split is marked as doubtful."""

SPREAD_BOUND = 1.5
"""Above this ratio of the longest to the shortest profiled iteration the split is marked as doubtful."""

UNPROFILED_BOUND = 1.1
"""Above this ratio of unprofiled to profiled time something other than the profiler made the difference."""

_ALLOCATING_OPERATORS = ("aten::empty", "aten::new_empty", "aten::resize_")
_NO_WORK = (*_ALLOCATING_OPERATORS, "autograd::")
_ALLOCATING_RUNTIME = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap", "cuMemAddressReserve")
_HOST_READS = ("aten::item", "aten::_local_scalar_dense")

_NOWHERE = -(1 << 60)
_Cause = Literal["python", "dispatch", "allocation", "launch", "waiting"]
_PRECEDENCE: tuple[_Cause, ...] = ("waiting", "launch", "allocation", "dispatch")


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


def overhead_profile(program: Program, trace: Trace, unprofiled_ns: float) -> OverheadProfile:
    """Split the profiled iteration's host time over the calls of ``program``.

    The host time of a call begins where that of the previous matched call ended and lasts to the end of the outermost
    operator around it (``aten::linear`` around ``aten::addmm``). Views, ``empty`` and other operators that are no call
    of the Program count for the next call. Every nanosecond has one cause, the first that fits: waiting for the device,
    launch (``cudaLaunchKernel``, ``cudaMemcpyAsync``, ...), allocation (``cudaMalloc``, ``aten::empty``, ...),
    dispatch (an operator or autograd node is active), Python (none is). Waiting is no work of the framework: it is
    counted in ``host_syncs`` and in the remainder.

    On the host no event tells an operator's own computing from its dispatch, so ``work_ns`` is an *estimate*: the self
    time of the call's operator and of those inside it, each less ``trace.floor_ns`` (what the profiler shows for an
    operator with next to nothing to do), never below 0. The floor is measured with warm caches, so work is rather too
    high and dispatch too low. All host overhead is exposed there. On CUDA ``work_ns`` is GPU time, no part of the
    host's sum.

    So for each device: the rows' overhead (on the host: and work) plus ``remainder_ns`` is ``profiled_ns``, exactly.
    ``profiled_ns`` includes the wait for the device at the end. Time is O(n log n) for n events, see ``align``.
    """
    forest = _Forest.of(trace.operators)
    matches = _match(program, forest)
    cuts = _cuts(trace, forest, matches)
    busy = _union([(max(k.start_ns, trace.start_ns), min(k.end_ns, trace.end_ns)) for k in trace.kernels])
    split = _split(_causes(trace, busy), cuts)
    gpu_ns = _device_time(trace, forest, matches, cuts)
    rows = []
    for (call, event), parts in zip(matches, split, strict=True):
        dispatch_ns, work_ns = parts["dispatch"], gpu_ns.get(call, 0)
        if trace.device == "cpu":
            work_ns = min(dispatch_ns, _work(forest, event, trace.floor_ns))
            dispatch_ns -= work_ns
        overhead_ns = parts["python"] + dispatch_ns + parts["allocation"] + parts["launch"]
        rows.append(
            CallOverhead(
                call=call,
                python_ns=float(parts["python"]),
                dispatch_ns=float(dispatch_ns),
                allocation_ns=float(parts["allocation"]),
                launch_ns=float(parts["launch"]),
                work_ns=float(work_ns),
                exposed_ns=float(overhead_ns if trace.device == "cpu" else parts["exposed"]),
            )
        )
    on_host = sum(row.overhead_ns + (row.work_ns if trace.device == "cpu" else 0.0) for row in rows)
    busy_ns = sum(row.work_ns for row in rows) if trace.device == "cpu" else float(sum(e - s for s, e in busy))
    return OverheadProfile(
        calls=tuple(rows),
        profiled_ns=float(trace.length_ns),
        unprofiled_ns=float(unprofiled_ns),
        remainder_ns=trace.length_ns - on_host,
        device_busy_ns=busy_ns,
        device_idle_share=1.0 - busy_ns / trace.length_ns if trace.length_ns else 0.0,
        matched=len(matches),
        total=len(program.calls),
        host_syncs=_host_syncs(program, trace, forest, matches),
        source=_source(trace),
        warnings=(*trace.warnings, *_doubts(program, trace, matches, unprofiled_ns)),
        phases=tuple(_phases(trace, forest, busy)),
    )


def eager_timeline(program: Program, trace: Trace, overhead: OverheadProfile) -> Timeline:
    """The profiled iteration as a timeline: one lane per host thread that issued operators, one per GPU stream.

    On a host lane stand the operators that are calls, and the outermost operators that hold none; what is inside
    either is left out, so spans of a lane do not overlap. Times count from the start of the iteration.
    """
    forest = _Forest.of(trace.operators)
    matches = _match(program, forest)
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
    forest = _Forest.of(operators)
    return tuple((call, forest.events[event]) for call, event in _match(program, forest))


def _match(program: Program, forest: _Forest) -> tuple[tuple[int, int], ...]:
    """``(call, position in the forest)``, both increasing."""
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
class _Forest:
    """Operators as nested by thread: preorder of the trees, the trees by start.

    ``ends[i]`` is one past the last operator inside ``i``, ``parents[i]`` the operator directly around it, -1 if none.
    """

    events: tuple[OperatorEvent, ...]
    ends: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def of(operators: Sequence[OperatorEvent]) -> _Forest:
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
        return _Forest(tuple(events), tuple(ends), tuple(parents))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of host time with one cause, during which the device was busy or was not."""

    start_ns: int
    end_ns: int
    cause: _Cause
    busy: bool


def _cuts(trace: Trace, forest: _Forest, matches: Sequence[tuple[int, int]]) -> list[int]:
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


def _causes(trace: Trace, busy: Sequence[tuple[int, int]]) -> Iterator[_Stretch]:
    """The iteration as consecutive stretches: one sweep over the ends of all events."""
    edges: list[tuple[int, int, str]] = []
    for event in trace.operators:
        cause = "allocation" if event.name.startswith(_ALLOCATING_OPERATORS) else "dispatch"
        edges += [(event.start_ns, 1, cause), (event.end_ns, -1, cause)]
    for call in trace.runtime:
        runtime_cause = _runtime_cause(call.name)
        if runtime_cause:
            edges += [(call.start_ns, 1, runtime_cause), (call.end_ns, -1, runtime_cause)]
    edges += [edge for start, end in busy for edge in ((start, 1, "busy"), (end, -1, "busy"))]
    edges += [(trace.run_end_ns, 1, "waiting"), (trace.end_ns, -1, "waiting")]
    active: dict[str, int] = defaultdict(int)
    now = trace.start_ns
    for at, change, cause in sorted(edges):
        at = min(max(at, trace.start_ns), trace.end_ns)
        if at > now:
            current: _Cause = next((name for name in _PRECEDENCE if active[name]), "python")
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
            if stretch.cause != "waiting" and not stretch.busy:
                split[call]["exposed"] += end - start
            start = end
            if cuts[call] <= start:
                call += 1
    return split


def _phases(trace: Trace, forest: _Forest, busy: Sequence[tuple[int, int]]) -> Iterator[PhaseOverhead]:
    """Each phase's host time by cause, whatever operator it was spent on; in the order of a step."""
    split = _split(_causes(trace, busy), [at for _, start, end in trace.phases for at in (start, end)])
    roots = [at for at, parent in enumerate(forest.parents) if parent < 0]
    launched_at = {event.correlation: event.start_ns for event in trace.runtime}
    named = {name for name, _, _ in trace.phases}
    for phase in (name for name in get_args(Phase) if name in named):  # gradients are zeroed before all else
        at = [position for position, (name, _, _) in enumerate(trace.phases) if name == phase]
        inside = [trace.phases[position][1:] for position in at]
        parts = sum((split[2 * position + 1] for position in at), Counter[str]())
        dispatch_ns = parts["dispatch"]
        if trace.device == "cpu":
            own = (root for root in roots if _within(forest.events[root].start_ns, inside))
            work_ns = min(dispatch_ns, sum(_work(forest, root, trace.floor_ns) for root in own))
            dispatch_ns -= work_ns
        else:
            launched = (kernel for kernel in trace.kernels if _within(launched_at.get(kernel.correlation, -1), inside))
            work_ns = sum(kernel.end_ns - kernel.start_ns for kernel in launched)
        overhead_ns = parts["python"] + dispatch_ns + parts["allocation"] + parts["launch"]
        yield PhaseOverhead(
            phase=phase,
            spans=tuple((float(start - trace.start_ns), float(end - trace.start_ns)) for start, end in inside),
            python_ns=float(parts["python"]),
            dispatch_ns=float(dispatch_ns),
            allocation_ns=float(parts["allocation"]),
            launch_ns=float(parts["launch"]),
            work_ns=float(work_ns),
            exposed_ns=float(overhead_ns if trace.device == "cpu" else parts["exposed"]),
        )


def _within(at: int, spans: Iterable[tuple[int, int]]) -> bool:
    return any(start <= at < end for start, end in spans)


def _work(forest: _Forest, event: int, floor_ns: float) -> int:
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


def _owners(trace: Trace, forest: _Forest, matches: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[int | None]:
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
    trace: Trace, forest: _Forest, matches: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> dict[int, int]:
    """Sum of the durations of each call's device events, by call."""
    total: dict[int, int] = defaultdict(int)
    for kernel, call in zip(trace.kernels, _owners(trace, forest, matches, cuts), strict=True):
        if call is not None:
            total[call] += kernel.end_ns - kernel.start_ns
    return total


def _host_syncs(
    program: Program, trace: Trace, forest: _Forest, matches: Sequence[tuple[int, int]]
) -> tuple[HostSync, ...]:
    """Host synchronisations by kind and place, the longest first.

    A host read (``.item()``) is one synchronisation, not two, whatever the runtime does inside. No event says which
    source line it came from; the recorded origin of the call under way, or of the last call before, is given instead.
    """
    reads = [
        (event.start_ns, event.end_ns, event.name)
        for event, parent in zip(forest.events, forest.parents, strict=True)
        if event.name in _HOST_READS and (parent < 0 or forest.events[parent].name not in _HOST_READS)
    ]
    inside = _union((start, end) for start, end, _ in reads)
    waits = [
        (event.start_ns, event.end_ns, event.name)
        for event in trace.runtime
        if is_synchronisation(event.name) and not _covers(inside, event.start_ns)
    ]
    starts = [forest.events[event].start_ns for _, event in matches]
    found: dict[tuple[str, str, Phase | Literal[""]], list[int]] = defaultdict(list)
    for start, end, kind in (*reads, *waits):
        before = bisect_right(starts, start) - 1
        place = ""
        if before >= 0:
            call, event = matches[before]
            place = _place(program, call, within=start < forest.events[event].end_ns)
        phase: Phase | Literal[""] = next((name for name, *span in trace.phases if span[0] <= start < span[1]), "")
        found[kind, place, phase].append(end - start)
    rows = [HostSync(kind, len(ns), float(sum(ns)), place, phase) for (kind, place, phase), ns in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind, row.source)))


def _place(program: Program, call: int, within: bool) -> str:
    origins = program.calls[call].origins
    if not origins or not origins[0].file:
        return ""
    line = f"{origins[0].file}:{origins[0].line}"
    return line if within else f"after {line}"


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


def _source(trace: Trace) -> str:
    rounds = (
        f"torch.profiler, median of {len(trace.iterations_ns)} iterations" if trace.iterations_ns else "torch.profiler"
    )
    if trace.device == "cuda":
        return f"{rounds}; work is GPU time"
    return f"{rounds}; work is estimated: operator self time less a floor of {trace.floor_ns:.0f} ns each"


def _shown(forest: _Forest, call_of: dict[int, int]) -> Iterator[tuple[OperatorEvent, int | None]]:
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


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint, sorted intervals that cover the same; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _covers(union: Sequence[tuple[int, int]], at: int) -> bool:
    position = bisect_right(union, at, key=lambda interval: interval[0]) - 1
    return position >= 0 and at < union[position][1]
