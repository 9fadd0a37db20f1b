"""Code that nobody wrapped, from the profiler's events to the values that the views know.

``one_iteration`` finds the iterations in a recording and keeps that of median length; ``observed`` makes a Program of
what it did: calls by operator, without tensors, since a trace holds none. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from nimble_core.ir.program import Call, Origin, Phase, Program
from nimble_core.utils.errors import ReportFileError
from nimble_viz.collect.overhead import Forest, covers, match_positions, union
from nimble_viz.report.data import INPUT, Stage
from nimble_viz.traces.chrome import Frame, Recording
from nimble_viz.traces.profiler import (
    CALIBRATION,
    PRINT,
    RUN,
    DeviceEvent,
    OperatorEvent,
    RawEvent,
    RuntimeEvent,
    Trace,
    floor_of,
    is_launch,
    is_runtime,
    kind_of,
    lost_launches,
    outer_first,
)

__all__ = ["LOADER", "TICK", "Iterations", "Observed", "observed", "one_iteration"]

TICK = "nimble.tick"
"""Annotation between two iterations, where somebody said what an iteration is."""

LOADER = "enumerate(DataLoader)#"
"""What torch's annotation of the wait for a batch begins with."""

_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_STEP = "ProfilerStep#"
_ENGINE = "autograd::engine::evaluate_function"
_AROUND = ("autograd::", "torch::autograd::")
_COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory")
# They change how a tensor is seen, or make one without values: no work on any device.
_NO_CALLS = re.compile(
    "aten::(_?reshape_alias|_unsafe_view|adjoint|alias|as_strided|atleast_[123]d|broadcast_to|chunk|contiguous|detach_?|"
    "diagonal|empty|empty_like|empty_strided|expand|expand_as|flatten|imag|is_[a-z_]+|lift|lift_fresh|m?T|mH|matrix_H|"
    "movedim|narrow|new_empty|new_empty_strided|numel|numpy_T|permute|ravel|real|requires_grad_|reshape|reshape_as|"
    "resize_|resolve_conj|resolve_neg|result_type|select|set_|size|slice|split|split_with_sizes|squeeze|stride|"
    "swapaxes|swapdims|t|to|transpose|type_as|unbind|unflatten|unfold|unsafe_chunk|unsafe_split|unsqueeze|view|view_as|"
    "view_as_complex|view_as_real)"
)
_PRINTS = re.compile(r"(.*/)?torch/_tensor_str\.py\(\d+\): _str")
_TRIVIAL = ("aten::as_strided", "aten::view", "aten::transpose", "aten::expand", "aten::detach")


@dataclass(frozen=True, slots=True)
class Iterations:
    """How the iterations of a recording were found.

    Args:
        what: what one is, in words.
        windows: ``(start, end)`` of each, nanoseconds, in order.
        chosen: which one is shown.
    """

    what: str
    windows: tuple[tuple[int, int], ...]
    chosen: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What an iteration did.

    Args:
        program: a call for each outermost operator that reaches the device; without tensors.
        trace: the iteration, with an operator for each launch that no operator issued (a CUDA graph, Triton).
        matches: ``(call, position in Forest.of(trace.operators))``.
    """

    program: Program
    trace: Trace
    matches: tuple[tuple[int, int], ...]


def one_iteration(recording: Recording, what: str = "") -> tuple[Trace, Iterations]:
    """The iteration of median length. O(n log n).

    Iterations are, the first that there are: what lies between ``nimble.tick`` marks (``what`` says what that is), the
    profiler's own steps, batches of the data loader, steps of the optimizer, the whole. Device events count if they run
    during the iteration or were launched in it: without synchronisation the device runs behind the host. What follows a
    ``nimble.run`` mark in it is somebody waiting for the device, and none of the code's own.

    Raises:
        ReportFileError: no operator ran.
    """
    calibrations = [event for event in recording.events if event.annotation and event.name == CALIBRATION]
    apart = union((event.start_ns, event.end_ns) for event in calibrations)
    events = [event for event in recording.events if not covers(apart, event.start_ns)]
    host = [event for event in events if not event.on_device and (not event.annotation or event.name == PRINT)]
    host += _printed(recording.frames)
    marks = [event for event in events if event.annotation]
    operators = [event for event in host if not is_runtime(event.name)]
    if not operators and not any(event.on_device for event in events):
        raise ReportFileError("no operator ran while it was recorded", fix="profile code that runs torch operators")
    found = _iterations(events, marks, what, recording.device)
    start, end = found.windows[found.chosen]
    engine = {event.thread for event in operators if event.name.startswith(_ENGINE)}
    main = _main_thread(operators, marks, engine)
    ran = [mark.end_ns for mark in marks if mark.name == RUN and start <= mark.start_ns < end]
    run_end = min(max(ran, default=end), end)
    inside = [event for event in host if start <= event.start_ns < run_end]
    loader = union([(event.start_ns, event.end_ns) for event in marks if event.name.startswith(LOADER)])
    mine = [event for event in inside if event.thread in {main, *engine} and not covers(loader, event.start_ns)]
    runtime = tuple(
        RuntimeEvent(event.name, event.start_ns, event.end_ns, event.thread, event.correlation)
        for event in mine
        if is_runtime(event.name)
    )
    launched = {event.correlation for event in runtime if event.correlation}
    kernels = tuple(
        DeviceEvent(
            event.name, kind_of(event.name), event.start_ns, event.end_ns, event.stream, event.correlation, event.linked
        )
        for event in events
        if event.on_device and (event.correlation in launched or (event.start_ns < end and event.end_ns > start))
    )
    trace = Trace(
        device=recording.device,
        start_ns=start,
        run_end_ns=run_end,
        end_ns=end,
        operators=outer_first(
            OperatorEvent(event.name, event.start_ns, event.end_ns, event.thread, event.correlation)
            for event in mine
            if not is_runtime(event.name)
        ),
        runtime=runtime,
        kernels=kernels,
        iterations_ns=tuple(until - since for since, until in found.windows),
        warnings=(*recording.warnings, *_left_out(inside, main, engine)),
    )
    trace = replace(trace, floor_ns=floor_of(recording.events, calibrations) or _views_ns(trace))
    lost = lost_launches(trace.runtime, trace.kernels) if recording.device == "cuda" else ""
    return replace(
        trace,
        phases=tuple(_stages(trace, main, [mark for mark in marks if mark.thread == main])),
        warnings=(*trace.warnings, lost) if lost else trace.warnings,
    ), found


def observed(
    trace: Trace,
    frames: Sequence[Frame] = (),
    seen: Sequence[Origin] = (),
    backward_of: Mapping[tuple[int, int], tuple[int, int]] | None = None,
) -> Observed:
    """What the iteration did, as calls.

    A call is an outermost operator (not autograd's wrappers around it): on CUDA one that launched something, on the
    host one that is no view. Origins are, as far as known: ``seen``, what was dispatched in another iteration, matched
    by operator in order; else the Python functions and modules that were running. Calls of the backward have those of
    the forward call that made their node of autograd (``Recording.backward_of``), where that is known.
    """
    trace = _with_orphans(trace)
    forest = Forest.of(trace.operators)
    at = _calls(trace, forest)
    phase_starts = [start for _, start, _ in trace.phases]
    running = _Running(frames)
    known = _known(forest, at, seen)
    forward = _forward_calls(forest, at, backward_of or {})
    calls: list[Call] = []
    for index, position in enumerate(at):
        event = forest.events[position]
        operator = event.name.replace("::", ".", 1)
        origin = known.get(index) or running.origin(operator, event)
        if index in forward and forward[index] < index:
            made_by = calls[forward[index]].origins[0]
            origin = made_by if made_by.module or made_by.file else origin
        before = bisect_right(phase_starts, event.start_ns) - 1
        stage: Stage = trace.phases[before][0] if before >= 0 else "forward"
        phase: Phase = "forward" if stage in INPUT else stage  # type: ignore[assignment]  # what is left is a Phase
        calls.append(Call(index, operator, (), (), phase=phase, origins=(replace(origin, operator=operator),)))
    program = Program(tuple(calls), (), (), (), device=trace.device)
    return Observed(program, trace, tuple(enumerate(at)))


def _printed(frames: Sequence[Frame]) -> Iterator[RawEvent]:
    """What made tensors' texts, where only the Python functions say so."""
    for frame in frames:
        if _PRINTS.fullmatch(frame.name):
            yield RawEvent(PRINT, frame.start_ns, frame.end_ns, False, False, frame.thread, 0, 0, 0)


def _iterations(events: Sequence[RawEvent], marks: Sequence[RawEvent], what: str, device: str) -> Iterations:
    def between(prefix: str | tuple[str, ...]) -> list[tuple[int, int]]:
        """From start to start of the most frequent annotation that begins so."""
        named = [mark for mark in marks if mark.name.startswith(prefix)]
        names = Counter((mark.name, mark.thread) for mark in named)
        if not names:
            return []
        most = names.most_common(1)[0][0]
        return list(pairwise(sorted(mark.start_ns for mark in named if (mark.name, mark.thread) == most)))

    # Marks of ours are none of the code's own, nor is what comes after a run, unless it waits for the device.
    said = sorted((mark.start_ns, mark.end_ns) for mark in marks if mark.name == TICK)
    runs = sorted((mark.start_ns, mark.end_ns) for mark in marks if mark.name == RUN)
    ticks = []
    for (_, since), (until, _) in pairwise(said):
        own = runs[bisect_left(runs, (since, 0)) : bisect_left(runs, (until, 0))] or [(since, until)]
        ticks.append((own[0][0], own[-1][1] if device == "cpu" else until))
    steps = sorted((mark.start_ns, mark.end_ns) for mark in marks if mark.name.startswith(_STEP))
    whole = min(event.start_ns for event in events), max(event.end_ns for event in events)
    ways = (
        (what, ticks),
        ("one step of torch.profiler", steps),
        ("one batch of the data loader", between(LOADER)),
        ("one step of the optimizer", between(_OPTIMIZER[0])),
        ("the whole recording", [(whole[0], max(whole[1], whole[0] + 1))]),
    )
    name, windows = next((name, windows) for name, windows in ways if any(end > start for start, end in windows))
    windows = [window for window in windows if window[1] > window[0]]
    by_length = sorted(range(len(windows)), key=lambda i: windows[i][1] - windows[i][0])
    return Iterations(name, tuple(windows), by_length[(len(by_length) - 1) // 2])


def _main_thread(operators: Sequence[RawEvent], marks: Sequence[RawEvent], engine: set[int]) -> int:
    """The thread that runs the loop: that of the marks that only a loop makes, else the busiest."""
    telling = Counter(mark.thread for mark in marks if mark.name.startswith((TICK, _STEP, LOADER, *_OPTIMIZER)))
    busy = Counter(event.thread for event in operators if event.thread not in engine)
    counts = telling or busy or Counter(event.thread for event in operators)
    return counts.most_common(1)[0][0] if counts else 0


def _left_out(inside: Sequence[RawEvent], main: int, engine: set[int]) -> Iterator[str]:
    others = [event for event in inside if event.thread not in {main, *engine} and not is_runtime(event.name)]
    if others:
        threads = len({event.thread for event in others})
        yield f"{len(others)} operators of {threads} other threads (not the loop's, not autograd's) are left out"


def _stages(trace: Trace, main: int, marks: Sequence[RawEvent]) -> Iterator[tuple[Stage, int, int]]:
    """The iteration without gaps, by what it is for; nothing if all of it is forward.

    Where several fit: loader, copy, optimizer, backward. Backward lasts from one node of autograd to the next, unless
    something else begins in between.
    """
    labelled: dict[Stage, list[tuple[int, int]]] = {
        "loader": [(mark.start_ns, mark.end_ns) for mark in marks if mark.name.startswith(LOADER)],
        "copy": list(_input_copies(trace, main)),
        "optimizer": [(mark.start_ns, mark.end_ns) for mark in marks if mark.name.startswith(_OPTIMIZER)],
    }
    labelled["backward"] = list(_backward(trace, [span for spans in labelled.values() for span in spans]))
    edges = sorted(
        (min(max(at, trace.start_ns), trace.end_ns), change, stage)
        for stage, spans in labelled.items()
        for start, end in spans
        for at, change in ((start, 1), (end, -1))
    )
    active: Counter[Stage] = Counter()
    stretches: list[tuple[Stage, int, int]] = []
    now = trace.start_ns
    for at, change, stage in [*edges, (trace.end_ns, 0, "forward")]:
        if at > now:
            current: Stage = next((name for name in labelled if active[name] > 0), "forward")
            if stretches and stretches[-1][0] == current:
                stretches[-1] = (current, stretches[-1][1], at)
            else:
                stretches.append((current, now, at))
            now = at
        active[stage] += change
    if {stage for stage, _, _ in stretches} != {"forward"}:
        yield from stretches


def _input_copies(trace: Trace, main: int) -> Iterator[tuple[int, int]]:
    """Outermost operators that copy from the host to the device."""
    copies = {kernel.correlation for kernel in trace.kernels if kernel.kind == "memcpy" and "HtoD" in kernel.name}
    issued = sorted(event.start_ns for event in trace.runtime if event.correlation in copies)
    until = trace.start_ns
    for event in trace.operators:  # outer first
        if event.thread != main or event.start_ns < until:
            continue
        until = event.end_ns
        if event.name in _COPIES and bisect_left(issued, event.start_ns) < bisect_left(issued, event.end_ns):
            yield event.start_ns, event.end_ns


def _backward(trace: Trace, others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    engine = union((event.start_ns, event.end_ns) for event in trace.operators if event.name.startswith(_ENGINE))
    apart = sorted(
        [event.start_ns for event in trace.operators if not covers(engine, event.start_ns)]
        + [start for start, _ in others]
    )
    merged: list[tuple[int, int]] = []
    for start, end in engine:
        if merged and bisect_left(apart, merged[-1][1]) == bisect_left(apart, start):
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return iter(merged)


def _views_ns(trace: Trace) -> float:
    """What the profiler shows for a view, the median: dispatch and no work; 0 if there is none."""
    lengths = [event.end_ns - event.start_ns for event in trace.operators if event.name in _TRIVIAL]
    return float(median(lengths)) if lengths else 0.0


def _calls(trace: Trace, forest: Forest) -> list[int]:
    """Positions of the operators that are calls, in order."""
    launches: dict[int, list[int]] = {}
    for call in trace.runtime:
        if is_launch(call.name):
            launches.setdefault(call.thread, []).append(call.start_ns)

    def launched(event: OperatorEvent) -> bool:
        at = launches.get(event.thread, [])
        return bisect_left(at, event.start_ns) < bisect_left(at, event.end_ns)

    found, at = [], 0
    while at < len(forest.events):
        event, end = forest.events[at], forest.ends[at]
        reaches = launched(event) if trace.device == "cuda" else _works(forest, at)
        around = "::" not in event.name or event.name.startswith(_AROUND)
        if around and not (trace.device == "cuda" and end == at + 1):  # a compiled kernel runs under its own name
            at += 1
            continue
        if reaches:
            found.append(at)
        at = end
    return found


def _works(forest: Forest, at: int) -> bool:
    """Whether an operator on the host, or one inside it, is more than a view."""
    inside = forest.events[at : forest.ends[at]]
    return any("::" in event.name and not _NO_CALLS.fullmatch(event.name) for event in inside)


def _with_orphans(trace: Trace) -> Trace:
    """The trace with an operator for each launch outside all calls: named after what it launched."""
    if trace.device != "cuda":
        return trace
    forest = Forest.of(trace.operators)
    spans: dict[int, list[tuple[int, int]]] = {}
    for at in _calls(trace, forest):
        event = forest.events[at]
        spans.setdefault(event.thread, []).append((event.start_ns, event.end_ns))
    covered = {thread: union(own) for thread, own in spans.items()}
    names: dict[int, str] = {}
    for kernel in trace.kernels:
        names.setdefault(kernel.correlation, kernel.name)
    orphans = [
        OperatorEvent(
            event.name if "Graph" in event.name else names.get(event.correlation, event.name),
            event.start_ns, event.end_ns, event.thread,
        )
        for event in trace.runtime
        if is_launch(event.name) and not covers(covered.get(event.thread, []), event.start_ns)
    ]  # fmt: skip
    # "::" would make a kernel of a C++ namespace an operator of that namespace.
    named = [replace(event, name=event.name.replace("::", ".")) for event in orphans]
    return replace(trace, operators=outer_first([*trace.operators, *named])) if named else trace


def _known(forest: Forest, at: Sequence[int], seen: Sequence[Origin]) -> dict[int, Origin]:
    """By call, the first origin of what was dispatched inside it."""
    if not seen:
        return {}
    calls = tuple(Call(i, origin.operator, (), (), origins=(origin,)) for i, origin in enumerate(seen))
    found: dict[int, Origin] = {}
    for index, position in match_positions(Program(calls, (), (), ()), forest):
        call = bisect_right(at, position) - 1
        if call >= 0 and position < forest.ends[at[call]] and (seen[index].file or seen[index].module):
            found.setdefault(call, seen[index])
    return found


def _forward_calls(
    forest: Forest, at: Sequence[int], backward_of: Mapping[tuple[int, int], tuple[int, int]]
) -> dict[int, int]:
    """By call of the backward, the call of the forward that made the node around it."""
    if not backward_of:
        return {}
    position_of = {(event.thread, event.start_ns): i for i, event in reversed(list(enumerate(forest.events)))}
    found: dict[int, int] = {}
    for index, position in enumerate(at):
        around = position
        while around >= 0:
            event = forest.events[around]
            made = backward_of.get((event.thread, event.start_ns))
            if made is not None and made in position_of:
                call = bisect_right(at, position_of[made]) - 1
                if call >= 0 and position_of[made] < forest.ends[at[call]]:
                    found[index] = call
                break
            around = forest.parents[around]
    return found


class _Running:
    """Which Python functions and modules were running when."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.by_thread: dict[int, list[Frame]] = {}
        self.parents: dict[int, list[int]] = {}
        for frame in frames:  # sorted by start, outer first
            own = self.by_thread.setdefault(frame.thread, [])
            parents = self.parents.setdefault(frame.thread, [])
            around = len(own) - 1
            while around >= 0 and own[around].end_ns < frame.end_ns:
                around = parents[around]
            own.append(frame)
            parents.append(around)
        self.starts = {thread: [frame.start_ns for frame in own] for thread, own in self.by_thread.items()}

    def origin(self, operator: str, event: OperatorEvent) -> Origin:
        """Modules around it, outermost first, and the innermost function outside torch: the line it begins at."""
        own = self.by_thread.get(event.thread, [])
        at = bisect_right(self.starts.get(event.thread, []), event.start_ns) - 1
        modules: list[str] = []
        file, line = "", 0
        while at >= 0:
            frame = own[at]
            if frame.end_ns >= event.end_ns:
                if frame.name.startswith("nn.Module: "):
                    modules.append(frame.name.removeprefix("nn.Module: "))
                elif not file:
                    file, line = _place(frame.name)
            at = self.parents[event.thread][at]
        return Origin(operator, ".".join(reversed(modules)), file, line)


def _place(name: str) -> tuple[str, int]:
    """File and line of a function of the user's, from ``"file.py(12): name"``.

    >>> _place("model.py(12): forward"), _place("torch/nn/functional.py(3): relu"), _place("<built-in method add>")
    (('model.py', 12), ('', 0), ('', 0))
    """
    place, colon, _ = name.partition("): ")
    file, bracket, line = place.rpartition("(")
    if not colon or not bracket or not line.isdecimal() or len(line) > 9 or not file.endswith(".py"):
        return "", 0
    return ("", 0) if file.startswith("torch/") or "/torch/" in file else (file, int(line))
