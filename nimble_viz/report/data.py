"""What a report holds: one frozen value of all that was recorded, planned and measured.

Files, views and text are functions of it; it knows none of them. Users get a ``Report`` (``nimble_viz.render.report``),
which is this and shows itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.candidates import Candidate, EqualityCheck
from nimble_core.ir.costs import Costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, Ratio, ratio
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.program import Call, Program
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.scheduling.saved_plan import Plan, make_plan
from nimble_core.utils.errors import InputError

__all__ = [
    "EAGER_ALONE", "INPUT", "STAGES", "Bound", "CallOverhead", "DeviceIdle", "EngineMemory", "EqualityCheck",
    "HostSync", "Memory", "OverheadProfile", "PeerResult", "PhaseOverhead", "PrepareStep", "ReportData", "Sampling",
    "SourceLines", "Stage", "Work",
]  # fmt: skip

SCHEMA_VERSION = 1

EAGER_ALONE = "eager, 1 thread"
"""Name of the run of eager with one of torch's threads, measured on the host beside eager with those it has."""

Stage = Literal["loader", "copy", "forward", "loss", "backward", "optimizer"]
"""What a stretch of host time is for: waiting for the data loader, copying inputs to the device, or a ``Phase``."""

STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which a step runs them."""

INPUT: tuple[Stage, ...] = ("loader", "copy")
"""Stages that only fetch input."""


@dataclass(frozen=True, slots=True)
class CallOverhead:
    """Host time of one call of the profiled eager run, split by cause; nanoseconds.

    ``python`` is Python and module code since the previous call, ``dispatch`` the dispatcher, autograd, shape
    inference and argument preparation, ``allocation`` and ``launch`` what events show of them, ``tail`` the dispatcher
    after the last launch (on the host: after the operator itself returned), 0 in older files. On the host device
    ``work`` is the operator's own computing; on CUDA ``work`` is its GPU time, which runs beside the host.
    ``exposed`` is the part of python + dispatch + allocation + launch + tail during which the device was idle.
    """

    call: int
    python_ns: float
    dispatch_ns: float
    allocation_ns: float
    launch_ns: float
    work_ns: float
    exposed_ns: float
    tail_ns: float = 0.0

    @property
    def overhead_ns(self) -> float:
        """All host time that is not work."""
        return self.python_ns + self.dispatch_ns + self.allocation_ns + self.launch_ns + self.tail_ns


@dataclass(frozen=True, slots=True)
class HostSync:
    """One place where the eager run made the host wait for the device; ``phase``: where known, else empty."""

    kind: str
    count: int
    total_ns: float
    source: str
    phase: Stage | Literal[""] = ""


@dataclass(frozen=True, slots=True)
class PhaseOverhead:
    """Host time of one phase of a profiled eager step; nanoseconds.

    The parts are those of ``CallOverhead``, here of all that happens in the phase, whether it is a call of the Program
    or not (an eager optimizer's operators are not: a captured one is a few fused calls). With the time that the phase
    waits for the device they add up to the length of its ``spans``, on the host with ``work_ns`` too.

    Args:
        phase: which.
        spans: ``(start, end)`` of its stretches, from the start of the iteration.
    """

    phase: Stage
    spans: tuple[tuple[float, float], ...]
    python_ns: float
    dispatch_ns: float
    allocation_ns: float
    launch_ns: float
    work_ns: float
    exposed_ns: float
    tail_ns: float = 0.0

    @property
    def host_ns(self) -> float:
        """How long the phase lasts on the host."""
        return sum(end - start for start, end in self.spans)

    @property
    def overhead_ns(self) -> float:
        """All host time that is not work."""
        return self.python_ns + self.dispatch_ns + self.allocation_ns + self.launch_ns + self.tail_ns


@dataclass(frozen=True, slots=True)
class DeviceIdle:
    """Why a GPU idled during a profiled iteration; nanoseconds, together the iteration less ``device_busy_ns``.

    Args:
        host_late_ns: nothing was queued: the host had not begun to launch what came next.
        launch_ns: the host had begun to launch it, and it had not begun to run.
        dependency_ns: it was queued in time and waited for what came before it.
        unknown_ns: its launch was not seen.
    """

    host_late_ns: float
    launch_ns: float
    dependency_ns: float
    unknown_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class OverheadProfile:
    """Framework overhead of one profiled eager iteration.

    Args:
        calls: one row per matched call, by call index, and one for those in ``shared`` together.
        profiled_ns: host time of the profiled iteration.
        unprofiled_ns: median wall time of the same iteration without the profiler.
        remainder_ns: profiled host time that is not attributed to any call: what comes after the last.
        device_busy_ns: union of the device's busy intervals; on the host device the sum of the calls' work.
        device_idle_share: 1 - busy / span.
        matched: calls found in the profile.
        total: calls in the program.
        host_syncs: host synchronisations by kind and source line.
        source: how it was measured, in words.
        warnings: what the reader should doubt.
        phases: of a training step, in its order; empty for inference.
        waiting_ns: profiled host time spent waiting for the device; in older files part of ``remainder_ns``.
        loader_ns: profiled host time spent waiting for the data loader.
        idle: why the device idled; None on the host device and in older files.
        shared: calls of the optimizer that were not found, as eager runs other operators; the first has a row, of
            them all. In older files each has one, with an even share.
    """

    calls: tuple[CallOverhead, ...]
    profiled_ns: float
    unprofiled_ns: float
    remainder_ns: float
    device_busy_ns: float
    device_idle_share: float
    matched: int
    total: int
    host_syncs: tuple[HostSync, ...] = ()
    source: str = "torch.profiler"
    warnings: tuple[str, ...] = ()
    phases: tuple[PhaseOverhead, ...] = ()
    waiting_ns: float = 0.0
    loader_ns: float = 0.0
    idle: DeviceIdle | None = None
    shared: tuple[int, ...] = ()

    def calls_of(self, row: CallOverhead) -> tuple[int, ...]:
        """Return the calls whose time a row holds."""
        return self.shared if row.call in self.shared else (row.call,)

    @property
    def overhead_ns(self) -> float:
        """Framework overhead of all calls."""
        return sum(row.overhead_ns for row in self.calls)

    @property
    def slowdown(self) -> float:
        """How much the profiler slowed the run: profiled over unprofiled."""
        return self.profiled_ns / self.unprofiled_ns if self.unprofiled_ns else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What the wall time of a profiled iteration was spent on; nanoseconds, together the iteration.

    Args:
        input_ns: waiting for the data loader or copying inputs, the device idle meanwhile.
        device_ns: the device was at work; on the host device the calls' own computing.
        host_ns: neither: the framework's overhead and the user's Python.
    """

    input_ns: float
    device_ns: float
    host_ns: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How code that nobody wrapped was profiled: iterations of its loop, or the whole of it.

    Args:
        subject: what was profiled, e.g. ``"train.py"`` or the name of a trace file.
        iteration: what one iteration is, in words, e.g. ``"one batch of the data loader"``.
        seen: iterations that went by, 0 if unknown.
        timed: of them timed without the profiler.
        profiled: of them profiled.
        bound: what the profiled iteration of median length was spent on.
        loader_ns: median wait for the data loader in iterations timed without the profiler; -1 if not timed.
        replayed: whether nimble_core replayed something in it.
    """

    subject: str
    iteration: str
    seen: int
    timed: int
    profiled: int
    bound: Bound
    loader_ns: float = -1.0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class PrepareStep:
    """One step of the preparation and its wall time."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Planned memory of one engine, bytes.

    Args:
        name: of its schedule.
        arena: shared by all results of all calls and large workspaces of libraries, on all streams.
        unshared: what these results would take if each kept its memory, beside one workspace for all calls.
        workspaces: the most that libraries need while one call runs, but for those that begin with counters, which lie
            beside the arena; in older reports all workspaces, which lay there.
    """

    name: str
    arena: int
    unshared: int
    workspaces: int

    @property
    def saved(self) -> int:
        """What sharing saves."""
        return self.unshared - self.arena


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory; bytes, 0 where unknown.

    Args:
        eager_peak: peak of one eager run above the model's own tensors.
        engines: ``(engine name, bytes it holds)``: arena, workspaces, input buffers, and what was not planned.
        compare_peak: peak of the whole ``compare`` run.
        planned: of each engine whose memory was planned.
    """

    eager_peak: int = 0
    engines: tuple[tuple[str, int], ...] = ()
    compare_peak: int = 0
    planned: tuple[EngineMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Another way to run the model, measured beside ours (``compare(..., against=[...])``).

    Args:
        name: as asked for, e.g. ``"compile:reduce-overhead"``; its measurement has the same name.
        prepare_s: seconds from the model to its first finished result.
        check: its outputs against eager's; None if it could not be checked.
        note: why it was not measured, or what the reader should know; empty otherwise.
    """

    name: str
    prepare_s: float = 0.0
    check: EqualityCheck | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What the calls compute, and what the device that ran them holds.

    Args:
        flops: floating-point operations of each call of the program, a multiply and an add counted as two; None for a
            call of which it is not known.
        eager: likewise of each eager call, where ``Report.eager`` holds them; else empty.
        processors: multiprocessors of the GPU; None off CUDA.
    """

    flops: tuple[int | None, ...]
    eager: tuple[int | None, ...] = ()
    processors: Multiprocessors | None = None


@dataclass(frozen=True, slots=True)
class SourceLines:
    """Code that calls come from: one function, or statements outside of functions.

    Args:
        file: as ``Origin.file`` names it.
        first: number of the first line.
        name: qualified name of the function, e.g. ``"Net.forward"``, or of a notebook's cell; else empty.
        lines: without their ends; none where the note says why.
        note: what is not here, and why; empty otherwise.
    """

    file: str
    first: int
    name: str
    lines: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything ``compare`` found out, as values.

    Args:
        model: name of the model.
        dtype: main floating dtype of the inputs and parameters, e.g. ``"float16"``; of a training step also what it is
            cast to, e.g. ``"float32 under bfloat16 autocast"``.
        batch: leading dimension of the first tensor input, 0 if there is none.
        environment: where it was measured.
        program: what was recorded.
        graph: hazards, minimum equivalent graph.
        costs: isolated duration of each call.
        critical_path: call indices along the longest path, and
        critical_path_ns: its length.
        schedules: the plans that were captured, ``single`` first.
        measurements: wall times, taken in turn; ``eager`` first.
        checks: equality of each replay with eager.
        preparation: steps of the preparation.
        overhead: framework overhead of eager calls; None if it could not be profiled.
        timelines: eager and replayed runs.
        memory: what the device held.
        chosen: name of the schedule the engine would use.
        candidates: the plans that were tried before one was chosen.
        peers: other ways to run the model that were asked for.
        eager: the eager calls, where ``program`` holds others (rewritten or compiled) that stand for them
            (``Call.eager``); None where ``program`` itself holds the eager calls. ``overhead`` and the timeline
            ``"eager"`` count in eager calls, everything else in calls of ``program``.
        sampling: how code that nobody wrapped was profiled; None for what ``compare`` and ``plan`` make. With it there
            is no engine: no schedules, costs, checks or replays, and the graph has no edges.
        work: what the calls compute; None in older files, and where it was not counted.
        sources: the code that calls come from, by file and line, read where it ran; empty in older files and where it
            was not at hand.
        warnings: everything the reader should know before believing a figure.
        complete: False if the run was interrupted and this is what there was.
        given: how the call's inputs were given, to be pasted: ``"x"``, ``"*args, **kwargs"``; empty in older files.
        schema_version: of the file format.
    """

    model: str
    dtype: str
    batch: int
    environment: Environment
    program: Program
    graph: CallGraph
    costs: Costs
    critical_path: tuple[int, ...]
    critical_path_ns: float
    schedules: tuple[Schedule, ...]
    measurements: tuple[Measurement, ...]
    checks: tuple[EqualityCheck, ...] = ()
    preparation: tuple[PrepareStep, ...] = ()
    overhead: OverheadProfile | None = None
    timelines: tuple[Timeline, ...] = ()
    memory: Memory = Memory()
    chosen: str = ""
    candidates: tuple[Candidate, ...] = ()
    peers: tuple[PeerResult, ...] = ()
    eager: Program | None = None
    warnings: tuple[str, ...] = ()
    complete: bool = True
    schema_version: int = SCHEMA_VERSION
    sampling: Sampling | None = None
    work: Work | None = None
    sources: tuple[SourceLines, ...] = ()
    given: str = ""

    @property
    def eager_calls(self) -> tuple[Call, ...]:
        """The calls of the eager run: what ``overhead`` and the timeline ``"eager"`` count in."""
        return (self.eager or self.program).calls

    def schedule(self, policy: str) -> Schedule | None:
        """Return the plan made by ``policy``, None if there is none."""
        return next((plan for plan in self.schedules if plan.policy == policy), None)

    def measurement(self, name: str) -> Measurement | None:
        """Return the measurement called ``name``, None if there is none."""
        return next((taken for taken in self.measurements if taken.name == name), None)

    def timeline(self, run: str) -> Timeline | None:
        """Return the timeline of ``run`` (``"eager"`` or a schedule's name), None if there is none."""
        return next((line for line in self.timelines if line.run == run), None)

    def ratio(self, name: str, baseline: str = "eager") -> Ratio | None:
        """Return how much faster ``name`` is than ``baseline``.

        None if either was not measured, or is ``""``, as ``chosen`` is where nothing was chosen.

        Raises:
            InputError: no such run in this report; names those there are.
        """
        known = {"eager", "single"}
        known |= {taken.name for taken in self.measurements} | {peer.name for peer in self.peers}
        known |= {tried.name for tried in self.candidates} | {plan.policy for plan in self.schedules}
        for one in (name, baseline):
            if one and one not in known:
                measured = ", ".join(run.name for run in self.measurements)
                fix = f"one of {measured}" if measured else "nothing was measured"
                raise InputError(f"this report has no run {one!r}", fix=fix)
        faster, base = self.measurement(name), self.measurement(baseline)
        return ratio(faster, base) if faster and base else None

    @property
    def plan(self) -> Plan:
        """The chosen schedule, to ``save`` and to prepare with again (``prepare(..., plan=...)``).

        Raises:
            InputError: no schedule was chosen.
        """
        schedule = self.schedule(self.chosen)
        if schedule is None:
            raise InputError("no plan was chosen in this report", fix="take one that was not interrupted")
        where = self.environment
        return make_plan(self.program, self.graph, schedule, device_name=where.device_name, torch=where.torch)

    def __repr__(self) -> str:
        return f"<Report of {self.model!r}: {len(self.program.calls)} calls, {len(self.measurements)} measurements>"
