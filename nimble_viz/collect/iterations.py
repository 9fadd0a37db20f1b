"""Find the iterations in a recording of torch's profiler, and keep the one of median length.

Pure but for ``profile_eager``, which records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Literal, get_args

from nimble_core.ir.program import Phase
from nimble_core.utils.errors import ReportFileError
from nimble_viz.analysis.intervals import covers, union
from nimble_viz.report.data import Stage
from nimble_viz.traces.chrome import Recording
from nimble_viz.traces.events import (
    CALIBRATION,
    PHASE,
    RUN,
    TICK,
    DeviceEvent,
    HostEvent,
    Trace,
    floor_of,
    lost_launches,
    outer_first,
)
from nimble_viz.traces.profiler import Profiled

__all__ = ["LOADER", "one_iteration", "profile_eager"]

LOADER = "enumerate(DataLoader)#"
"""What torch's annotation of the wait for a batch begins with."""

_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_STEP = "ProfilerStep#"
_WARM_UPS, _ITERATIONS = 2, 3
_ENGINE = "autograd::engine::evaluate_function"
_COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory")
_TRIVIAL = ("aten::as_strided", "aten::view", "aten::transpose", "aten::expand", "aten::detach")


def profile_eager(
    run: Callable[[], object], *, device: Literal["cuda", "cpu"], synchronize: Callable[[], object]
) -> Trace:
    """Run ``run`` under the profiler, five times, and return its iteration of median length, or raise DeviceError.

    ``synchronize`` waits until the device is idle; it is called after every run, inside the iteration and outside
    what counts as the model's own. The first two runs warm up.
    """
    import torch

    profiled = Profiled(cuda=device == "cuda")
    try:
        profiled.start()
        for iteration in range(_WARM_UPS + _ITERATIONS):
            if iteration >= _WARM_UPS:
                profiled.tick()
            with torch.profiler.record_function(RUN):
                run()
            synchronize()
        profiled.tick()
    finally:
        profiled.end()
    trace, _ = one_iteration(replace(profiled.recording(), device=device))
    if device == "cuda" and not trace.kernels:
        return replace(trace, warnings=(*trace.warnings, "the profiler saw no device event"))
    return trace


def one_iteration(recording: Recording, what: str = "") -> tuple[Trace, str]:
    """Keep the iteration of median length, and say in words what it is. O(n log n).

    Iterations are the first of these that there are: what lies between ``nimble.tick`` marks (``what`` says what that
    is), the profiler's own steps, batches of the data loader, steps of the optimizer, the whole. Device events count if
    they run during the iteration or were launched in it: without synchronisation the device runs behind the host. What
    follows a ``nimble.run`` mark in it is our own wait for the device, and not the code's.

    Raises:
        ReportFileError: no operator ran.
    """
    calibrations = [mark for mark in recording.marks if mark.name == CALIBRATION]
    apart = union((mark.start_ns, mark.end_ns) for mark in calibrations)
    operators, runtime, marks = (
        [event for event in events if not covers(apart, event.start_ns)]
        for events in (recording.operators, recording.runtime, recording.marks)
    )
    if not operators and not recording.kernels:
        raise ReportFileError("no operator ran while it was recorded", fix="profile code that runs torch operators")
    what, windows = _iterations([*operators, *runtime, *marks, *recording.kernels], marks, what, recording.device)
    start, end = sorted(windows, key=lambda window: window[1] - window[0])[(len(windows) - 1) // 2]
    engine = {event.thread for event in operators if event.name.startswith(_ENGINE)}
    main = _main_thread(operators, marks, engine)
    ran = [mark.end_ns for mark in marks if mark.name == RUN and start <= mark.start_ns < end]
    run_end = min(max(ran, default=end), end)
    loader = union([(event.start_ns, event.end_ns) for event in marks if event.name.startswith(LOADER)])

    def of_the_loop(events: Sequence[HostEvent]) -> list[HostEvent]:
        inside = (event for event in events if start <= event.start_ns < run_end)
        return [one for one in inside if one.thread in {main, *engine} and not covers(loader, one.start_ns)]

    launches = tuple(of_the_loop(runtime))
    launched = {event.correlation for event in launches if event.correlation}
    kernels = tuple(
        event
        for event in recording.kernels
        if event.correlation in launched or (event.start_ns < end and event.end_ns > start)
    )
    trace = Trace(
        device=recording.device,
        start_ns=start,
        run_end_ns=run_end,
        end_ns=end,
        operators=outer_first(of_the_loop(operators)),
        runtime=launches,
        kernels=kernels,
        iterations_ns=tuple(until - since for since, until in windows),
    )
    lost = lost_launches(launches, kernels) if recording.device == "cuda" else ""
    others = [one.thread for one in operators if start <= one.start_ns < run_end and one.thread not in {main, *engine}]
    left_out = (
        f"{len(others)} operators of {len({*others})} other threads (not the loop's, not autograd's) are left out"
    )
    return replace(
        trace,
        floor_ns=floor_of(recording.operators, calibrations) or _views_ns(trace),
        phases=tuple(_told(trace, marks) or _stages(trace, main, [mark for mark in marks if mark.thread == main])),
        warnings=(*recording.warnings, *([left_out] if others else []), *([lost] if lost else [])),
    ), what


def _iterations(
    events: Sequence[HostEvent | DeviceEvent], marks: Sequence[HostEvent], what: str, device: str
) -> tuple[str, list[tuple[int, int]]]:
    """Say how iterations were found, and return their starts and ends in ns."""

    def between(prefix: str | tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the spans from start to start of the most frequent annotation that begins so."""
        named = [mark for mark in marks if mark.name.startswith(prefix)]
        names = Counter((mark.name, mark.thread) for mark in named)
        if not names:
            return []
        most = names.most_common(1)[0][0]
        return list(pairwise(sorted(mark.start_ns for mark in named if (mark.name, mark.thread) == most)))

    # Our marks are not the code's own, nor is what comes after a run, unless it waits for the device.
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
    return name, [window for window in windows if window[1] > window[0]]


def _main_thread(operators: Sequence[HostEvent], marks: Sequence[HostEvent], engine: set[int]) -> int:
    """Return the thread that runs the loop: that of the marks that only a loop makes, else the busiest."""
    telling = Counter(mark.thread for mark in marks if mark.name.startswith((TICK, _STEP, LOADER, *_OPTIMIZER)))
    busy = Counter(event.thread for event in operators if event.thread not in engine)
    counts = telling or busy or Counter(event.thread for event in operators)
    return counts.most_common(1)[0][0] if counts else 0


def _told(trace: Trace, marks: Sequence[HostEvent]) -> list[tuple[Stage, int, int]]:
    """Return the phases that a training step of ours marks."""
    names: dict[str, Phase] = {f"{PHASE}{one}": one for one in get_args(Phase)}
    return [
        (names[mark.name], mark.start_ns, mark.end_ns)
        for mark in marks
        if mark.name in names and trace.start_ns <= mark.start_ns < trace.end_ns
    ]


def _stages(trace: Trace, main: int, marks: Sequence[HostEvent]) -> Iterator[tuple[Stage, int, int]]:
    """Cut the iteration, without gaps, by what it is for; yield nothing if all of it is forward.

    Where several fit, the first of loader, copy, optimizer, backward. Backward lasts from one node of autograd to the
    next, unless something else begins in between.
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
    """Yield the outermost operators that copy from the host to the device."""
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
    """Return the median time that the profiler shows for a view: dispatch and no work; 0 if there is none."""
    lengths = [event.end_ns - event.start_ns for event in trace.operators if event.name in _TRIVIAL]
    return float(median(lengths)) if lengths else 0.0
