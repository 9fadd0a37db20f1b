"""``from_trace``: make a Report of a trace that ``torch.profiler`` exported, of code as it is."""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement
from nimble_core.ir.program import Call, Origin, Phase, Program
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.intervals import covers, union
from nimble_viz.collect.iterations import one_iteration
from nimble_viz.collect.matched_trace import Forest, MatchedTrace, eager_timeline, match_positions
from nimble_viz.collect.overhead import iteration_bound, overhead_profile
from nimble_viz.render.report import Report
from nimble_viz.report.data import INPUT, Sampling, Stage
from nimble_viz.traces.chrome import MAX_BYTES, Recording, read_trace
from nimble_viz.traces.events import HostEvent, Trace, is_launch, outer_first
from nimble_viz.traces.profiler import exported

__all__ = ["from_trace", "make_report", "observed"]


class _Profiler(Protocol):
    """What this needs of ``torch.profiler.profile``."""

    def export_chrome_trace(self, path: str) -> Any: ...


def from_trace(source: str | os.PathLike[str] | _Profiler, *, max_bytes: int = MAX_BYTES) -> Report:
    """Make a Report of a Chrome trace that ``torch.profiler`` exported, or of the profiler itself.

    It shows the iteration of median length: what lies between two steps of the profiler, else between two batches of a
    data loader, else between two steps of an optimizer, else all of it. It holds no engine and no time without the
    profiler. Source lines are known if the trace was recorded ``with_stack=True``. Needs neither torch nor a GPU, and
    runs nothing from the file.

    Args:
        source: path of the trace (``*.json``, ``*.json.gz``), or a ``torch.profiler.profile`` that has stopped.
        max_bytes: refuse a file that is larger, unpacked.

    Raises:
        ReportFileError: no trace, damaged, without operators, or too large.
        InputError: a profiler whose trace was exported before, or that has none.
        OSError: the file cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        recording, subject = read_trace(source, max_bytes=max_bytes), Path(source).name
    else:
        try:
            recording, subject = exported(source, max_bytes), "torch.profiler"
        except (AssertionError, AttributeError, RuntimeError) as error:  # Kineto gives its trace away once
            if "already saved" in str(error):
                raise InputError(
                    "the trace of this profiler has been exported before", fix="give that file to from_trace"
                ) from error
            raise InputError(
                f"a {type(source).__name__} gave no trace: {error}", fix="give a torch.profiler that has stopped"
            ) from error
    settings = dict(recording.settings)
    where = Environment(
        device=recording.device,
        device_name=recording.device_name,
        host_cpu="",
        cores=0,
        threads=0,
        torch="",
        python="",
        system="",
        cuda=settings.pop("cuda", ""),
        settings=tuple(settings.items()),
    )
    return make_report(recording, where, subject=subject)


def make_report(
    recording: Recording,
    where: Environment,
    *,
    subject: str,
    iteration: str = "",
    seen: int = 0,
    timed: Measurement | None = None,
    loader_ns: float = -1.0,
    origins: Sequence[Origin] = (),
    warnings: Sequence[str] = (),
    replayed: bool = False,
) -> Report:
    """Make a Report of what was recorded; raise ReportFileError if no operator ran.

    ``timed`` are iterations without the profiler, ``loader_ns`` the wait in those (-1: not timed), and ``origins`` what
    one further iteration dispatched, in order. All else is as ``Sampling`` says.
    """
    trace, iteration = one_iteration(recording, iteration)
    what = observed(trace, recording.frames, origins, recording.backward_of)
    program, trace = what.program, what.trace
    profile = overhead_profile(what, timed.median_ns if timed else 0.0)
    if timed is None:
        profile = replace(profile, source=f"{profile.source}; without the profiler it was not timed")
    size = len(program.calls)
    return Report(
        model=subject,
        dtype="",
        batch=0,
        environment=where,
        program=program,
        graph=CallGraph(size, (), (), ()),
        costs=uniform_costs(size),
        critical_path=(),
        critical_path_ns=0.0,
        schedules=(),
        measurements=(timed,) if timed else (),
        overhead=profile,
        timelines=(eager_timeline(what, profile),),
        warnings=tuple(warnings),
        sampling=Sampling(
            subject=subject,
            iteration=iteration,
            seen=seen or len(trace.iterations_ns),
            timed=len(timed.samples_ns) if timed else 0,
            profiled=len(trace.iterations_ns),
            bound=iteration_bound(trace, profile),
            loader_ns=loader_ns,
            replayed=replayed,
        ),
    )


_AROUND = ("autograd::", "torch::autograd::")
# They change how a tensor is seen, or make one without values: no work on any device.
_NO_CALLS = re.compile(
    "aten::(_?reshape_alias|_unsafe_view|adjoint|alias|as_strided|atleast_[123]d|broadcast_to|chunk|contiguous|detach_?|"
    "diagonal|empty|empty_like|empty_strided|expand|expand_as|flatten|imag|is_[a-z_]+|lift|lift_fresh|m?T|mH|matrix_H|"
    "movedim|narrow|new_empty|new_empty_strided|numel|numpy_T|permute|ravel|real|requires_grad_|reshape|reshape_as|"
    "resize_|resolve_conj|resolve_neg|result_type|select|set_|size|slice|split|split_with_sizes|squeeze|stride|"
    "swapaxes|swapdims|t|to|transpose|type_as|unbind|unflatten|unfold|unsafe_chunk|unsafe_split|unsqueeze|view|view_as|"
    "view_as_complex|view_as_real)"
)


def observed(
    trace: Trace,
    frames: Sequence[HostEvent] = (),
    seen: Sequence[Origin] = (),
    backward_of: Mapping[tuple[int, int], tuple[int, int]] | None = None,
) -> MatchedTrace:
    """Make a Program of what the iteration did: calls by operator; a trace holds no tensors.

    A call is an outermost operator, without autograd's wrappers around it: on CUDA one that launched something, on the
    host one that is no view. The trace gets an operator for each launch that no operator issued (a CUDA graph, Triton).
    Origins are those of ``seen``, matched by operator in order; else the Python functions and modules that were
    running. A call of the backward has the origin of the forward call that made its node of autograd, if that is known.

    ``seen`` are the origins of what another iteration dispatched, in order; ``backward_of`` is that of ``Recording``.
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
    return MatchedTrace.of(program, trace, tuple(enumerate(at)))


def _calls(trace: Trace, forest: Forest) -> list[int]:
    """Return the positions of the operators that are calls, in order."""
    launches: dict[int, list[int]] = {}
    for call in trace.runtime:
        if is_launch(call.name):
            launches.setdefault(call.thread, []).append(call.start_ns)

    def launched(event: HostEvent) -> bool:
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
    """Say whether an operator on the host, or one inside it, is more than a view."""
    inside = forest.events[at : forest.ends[at]]
    return any("::" in event.name and not _NO_CALLS.fullmatch(event.name) for event in inside)


def _with_orphans(trace: Trace) -> Trace:
    """Add an operator to the trace for each launch outside all calls, named after what it launched."""
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
        HostEvent(
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
    """Return, by call, the first origin of what was dispatched inside it."""
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
    """Return, by call of the backward, the call of the forward that made the node around it."""
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
    """Knows which Python functions and modules were running when."""

    def __init__(self, frames: Sequence[HostEvent]) -> None:
        self.forest = Forest.of(frames)
        self.positions: dict[int, list[int]] = {}
        for position, frame in enumerate(self.forest.events):
            self.positions.setdefault(frame.thread, []).append(position)

    def origin(self, operator: str, event: HostEvent) -> Origin:
        """Return the modules around ``event``, and file and line of the innermost function outside torch."""
        frames, own = self.forest.events, self.positions.get(event.thread, [])
        before = bisect_right(own, event.start_ns, key=lambda position: frames[position].start_ns)
        at = own[before - 1] if before else -1
        modules: list[str] = []
        file, line = "", 0
        while at >= 0:
            frame = frames[at]
            if frame.end_ns >= event.end_ns:
                if frame.name.startswith("nn.Module: "):
                    modules.append(frame.name.removeprefix("nn.Module: "))
                elif not file:
                    file, line = _place(frame.name)
            at = self.forest.parents[at]
        return Origin(operator, ".".join(reversed(modules)), file, line)


def _place(name: str) -> tuple[str, int]:
    """Return file and line of a function of the user's, from ``"file.py(12): name"``.

    >>> _place("model.py(12): forward"), _place("torch/nn/functional.py(3): relu"), _place("<built-in method add>")
    (('model.py', 12), ('', 0), ('', 0))
    """
    place, colon, _ = name.partition("): ")
    file, bracket, line = place.rpartition("(")
    if not colon or not bracket or not line.isdecimal() or len(line) > 9 or not file.endswith(".py"):
        return "", 0
    return ("", 0) if file.startswith("torch/") or "/torch/" in file else (file, int(line))
