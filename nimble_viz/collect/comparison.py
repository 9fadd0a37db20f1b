"""Measure one comparison, step by step: record, prepare, time, check, watch, profile; and make a Report of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.api.call_mistakes import mistakes_explained
from nimble_core.autotune.autotune import tune
from nimble_core.autotune.capture_pipeline import capture, observe, schedule_by
from nimble_core.autotune.kept_choice import kinds_of
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.candidates import Candidate, EqualityCheck, simplicity
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, Ratio, interleave, not_slower, ratio, undecided
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.profiling import cupti
from nimble_core.profiling.machine import environment, finish, others_running
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.members import AnyDropout, AnyNorm
from nimble_core.tracing.pytree import builder
from nimble_core.tracing.recorded import Recorded, record_static, whole_note
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import NimbleError
from nimble_core.utils.units import format_ns
from nimble_core.validation.eager_cases import eager_cases
from nimble_core.validation.judge import Judge
from nimble_viz.collect.flops import count_work
from nimble_viz.collect.overhead import measure_overhead
from nimble_viz.collect.peers import Peer
from nimble_viz.collect.progress import Progress
from nimble_viz.collect.runs import EagerRuns, PeerRuns, dtype_name
from nimble_viz.collect.sources import read_sources
from nimble_viz.render.report import Report
from nimble_viz.report.data import EAGER_ALONE, EngineMemory, Memory, OverheadProfile, PeerResult, PrepareStep

__all__ = ["Comparison", "Findings", "dtype_of"]

_PATIENCE_S = 5.0
"""How long to go on measuring while a verdict is open."""

_FIRST_LOOK_S = 2.0
"""How long eager's own kernels are timed before others are compiled."""

_LOOK_AROUND = 8
"""Rounds between two looks at what else runs on this machine."""

_COSTS_BOUND = 3.0
"""If calls take this many times as long one by one as in a replay on one stream, something else was timed."""


@dataclass
class Findings:
    """What is known so far; ``recorded`` is the model as eager runs it, ``replayed`` perhaps with other kernels."""

    model: str
    dtype: str
    environment: Environment
    recorded: Recorded | None = None
    replayed: Recorded | None = None
    schedules: dict[str, Schedule] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    costs: Costs | None = None
    measurements: dict[str, Measurement] = field(default_factory=dict)
    checks: list[EqualityCheck] = field(default_factory=list)
    prepared: tuple[PrepareStep, ...] = ()
    overhead: OverheadProfile | None = None
    timelines: list[Timeline] = field(default_factory=list)
    engine_bytes: dict[str, int] = field(default_factory=dict)
    planned: list[EngineMemory] = field(default_factory=list)
    eager_peak: int = 0
    compare_peak: int = 0
    peers: tuple[PeerResult, ...] = ()
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False
    others: list[int] = field(default_factory=list)
    processors: Multiprocessors | None = None
    given: str = ""

    def is_replay(self, name: str) -> bool:
        """Say whether an engine runs the calls of the report's program, not others for comparison."""
        assert self.replayed is not None
        fuse = self.replayed.recording.program.fuse
        return {one.name: one.fuse for one in self.candidates}.get(name, fuse) == fuse

    def report(self) -> Report:
        """Return what is known, as one value."""
        assert self.recorded is not None
        assert self.replayed is not None
        eager, own, inputs = self.recorded.recording, self.replayed.recording, self.recorded.signature.tensors
        graph, program = self.replayed.graph, own.program
        measured = self.costs is not None and self.costs.source != "uniform"
        costs = self.costs or uniform_costs(graph.size)
        length, path = critical_path(predecessors(graph, meg=True), costs.ns)
        chosen = self._chosen()
        replaced = program.fuse != "none"
        return Report(
            model=self.model,
            dtype=self.dtype,
            batch=int(inputs[0].shape[0]) if inputs[0].dim() else 0,
            environment=finish(self.environment, self.others),
            program=program,
            graph=graph,
            costs=costs,
            critical_path=tuple(path),
            critical_path_ns=float(length) if measured else 0.0,
            schedules=tuple(self.schedules.values()),
            measurements=tuple(self.measurements.values()),
            checks=tuple(self.checks),
            preparation=self.prepared,
            overhead=self.overhead,
            timelines=tuple(
                replace(line, unprofiled_ns=taken.median_ns) if (taken := self.measurements.get(line.run)) else line
                for line in self.timelines
            ),
            memory=Memory(self.eager_peak, tuple(self.engine_bytes.items()), self.compare_peak, tuple(self.planned)),
            chosen=chosen,
            candidates=tuple(replace(one, chosen=one.name == chosen) for one in self.candidates),
            eager=eager.program if replaced else None,
            peers=self.peers,
            warnings=(*self.warnings, *(f"{one.name}: {one.note}" for one in self.peers if one.note)),
            complete=not self.interrupted,
            work=count_work(own, eager if replaced else None, self.processors),
            sources=read_sources(eager.program.calls),
            given=self.given,
        )

    def _chosen(self) -> str:
        """Return what preparation chose; if another right plan is decidedly faster here, the simplest of the best."""
        differ = {check.name for check in self.checks if check.differs}
        right = {
            name: taken for name, taken in self.measurements.items() if name in self.schedules and name not in differ
        }
        close = not_slower(right)
        prepared = next((one.name for one in self.candidates if one.chosen), "")
        if prepared in close or not close:
            return prepared if prepared in close else ""
        found = {one.name: one for one in self.candidates}
        return min(close, key=lambda name: simplicity(found[name]) if name in found else (True,))


class Comparison:
    """Measures; ``findings`` is what is known at any time."""

    def __init__(
        self,
        eager: EagerRuns,
        signature: Signature,
        device: Device,
        options: Options,
        against: Sequence[Peer],
        given: str,
    ) -> None:
        self.eager, self.training = eager, eager.training
        self.signature, self.device, self.options, self.against = signature, device, options, against
        self.executables: dict[str, Executable] = {}
        self.peers: PeerRuns | None = None
        training = eager.training
        model = training.model if training else eager.model
        self.findings = Findings(
            getattr(model, "__name__", type(model).__name__),
            dtype_of(eager.model, signature.tensors, training.autocast if training else None),
            environment("cuda" if device.kind == "cuda" else "cpu"),
            warnings=list(training.notes) if training else _mode_notes(eager.model),
            given=given,
        )

    def measure(self, progress: Progress) -> None:
        """Take all steps, in the order that gives the reader the most if it is interrupted."""
        found = self.findings
        found.compare_peak = self.device.memory_peak(lambda: self._steps(progress))
        if self.device.kind == "cuda":
            # A captured graph's pool is not among what torch counts as allocated, and all engines lived at once.
            found.compare_peak += sum(found.engine_bytes.values())
        with progress.step("eager memory"), self.eager.kept():
            self.eager.forget_earlier_runs()
            found.eager_peak = self.device.memory_peak(self.eager.run)

    def close(self) -> None:
        """Free engines and peers, one by one."""
        for one in self.executables.values():
            one.close()
        self.executables.clear()
        if self.peers:
            self.peers.close()
            self.findings.peers = self.peers.results

    def _steps(self, progress: Progress) -> None:
        self._record(progress)
        self.findings.warnings += self._recorded.recording.program.notes
        with self.eager.kept():
            self.findings.warnings += filter(None, [self.eager.choose_mode()])
            self._look_first(progress)
        with self.eager.kept(watched=0):
            self._prepare(progress)
        for take in (self._time, self._check, self._watch, self._profile):
            with self.eager.kept():
                take(progress)
        self.close()

    @property
    def _recorded(self) -> Recorded:
        assert self.findings.recorded is not None
        return self.findings.recorded

    def _record(self, progress: Progress) -> None:
        given = ((), {}) if self.training else (self.eager.args, self.eager.kwargs)  # a step calls the loss as well
        with progress.step("warm-up"), mistakes_explained(*given):
            self.device.warm_up(self.eager.model, *self.signature.arguments())
        recorded = record_static(
            self.device, self.eager.model, self.signature, strict=self.options.strict, step=progress.step
        )
        self.findings.recorded = self.findings.replayed = recorded
        self.eager.record(recorded)
        if self.device.kind == "cuda":
            from nimble_core.runtime.cuda.observing import multiprocessors

            self.findings.processors = multiprocessors(self.signature.device)

    def _look_first(self, progress: Progress) -> None:
        """Tell how fast a replay of eager's own kernels is, where kernels are compiled next, which takes a while."""
        device, recorded = self.device, self._recorded
        if recorded.whole or "inductor" not in kinds_of(device, self.options):
            return
        with progress.step("first look"), suppress(NimbleError):  # what cannot be captured is told by the next step
            single = capture(device, recorded, schedule_by(recorded, "single", None, None))
            try:
                taken = interleave(
                    {"eager": self.eager.run, "replay": self.eager.rewound(self._replay(single))},
                    clock_ns=device.clock_ns,
                    synchronize=device.synchronize,
                    patience_s=_FIRST_LOOK_S,
                    open_names=lambda taken: () if ratio(taken["replay"], taken["eager"]).decided else taken,
                    on_round=self._on_round(progress),
                )
            finally:
                single.close()
            progress.tell(_first_words(ratio(taken["replay"], taken["eager"])))

    def _prepare(self, progress: Progress) -> None:
        found = self.findings
        try:
            self._capture(progress)
        finally:
            found.prepared = progress.steps
        for name, one in self.executables.items():
            found.engine_bytes[name] = one.nbytes
            if found.is_replay(name):
                found.schedules[name] = replace(one.schedule, counts=one.counts)
                if one.memory is not None and found.replayed is not None:
                    found.planned.append(_engine_memory(name, one.memory, found.replayed))

    def _capture(self, progress: Progress) -> None:
        found, device, recorded = self.findings, self.device, self._recorded
        if recorded.whole:
            found.warnings.append(whole_note(device, recorded))
            with progress.step("capture single"):
                executable = device.capture_whole(self.eager.model, recorded.recording, self.signature)
            self.executables = {executable.schedule.policy: executable}
            return
        tuned = tune(device, recorded, self.options, step=progress.step, measure_single=True)
        self.executables = tuned.executables
        found.candidates, found.replayed, found.costs = tuned.candidates, tuned.recorded, tuned.costs
        found.checks = [check for check in tuned.checks if check.name in tuned.executables]
        found.warnings += tuned.notes
        if tuned.observed:
            found.timelines.append(tuned.observed.timeline)

    def _time(self, progress: Progress) -> None:
        found = self.findings
        self._prepare_peers(progress)
        runs: dict[str, Callable[[], object]] = {"eager": self.eager.run}
        if self.device.kind == "cpu" and torch.get_num_threads() > 1:
            runs[EAGER_ALONE] = self.eager.run_on_one_thread
        others = {name: self._replay(one) for name, one in self.executables.items()}
        if self.peers:
            others |= self.peers.timed()
        runs |= {name: self.eager.rewound(run) for name, run in others.items()}
        if self.device.kind == "cuda" and cupti.present():
            found.warnings.append(
                "CUPTI was in this process: CUDA graphs took longer to launch than they do without it"
            )
        with progress.step("measure"):
            found.measurements = interleave(
                runs,
                clock_ns=self.device.clock_ns,
                synchronize=self.device.synchronize,
                budget_s=self.options.budget_s,
                patience_s=0.0 if found.interrupted else _PATIENCE_S,
                open_names=_undecided,
                interruptions=self.device.interruptions,
                rehearse=self.device.kind == "cuda",
                on_round=self._on_round(progress),
                on_interrupt=self._interrupt,
            )
        if self.peers:
            failed = self.peers.failed
            found.measurements = {name: found.measurements[name] for name in runs if name not in failed}
            self.peers.close()
            found.peers = self.peers.results
        if found.interrupted:
            raise KeyboardInterrupt

    def _on_round(self, progress: Progress) -> Callable[[int, int], None]:
        rewind = self.training.rewinding() if self.training else None

        def on_round(done: int, total: int) -> None:
            if rewind is not None:  # weights that all runs train together would not be those of any of them
                rewind()
                self.device.synchronize()
            if done % _LOOK_AROUND == 1 and (running := others_running()) is not None:
                self.findings.others.append(running)
            progress.advance(done, total)

        return on_round

    def _replay(self, one: Executable) -> Callable[[], object]:
        build, inputs = builder(self._recorded.recording.output_structure), self.signature.tensors
        training = self.training
        if training is None:
            return lambda: build(one.run(inputs))
        return training.replay(lambda: build(one.run(inputs, static=True)))

    def _interrupt(self) -> None:
        self.findings.interrupted = True

    def _prepare_peers(self, progress: Progress) -> None:
        if not self.against:
            return
        peers = self.peers = PeerRuns(
            self.eager, synchronize=self.device.synchronize, taken=("eager", *self.executables)
        )
        cases = eager_cases(self._recorded, truth=self.training is None)
        build = builder(self._recorded.signature.structure)
        for inputs, _ in () if self.training else cases.eager:
            self.eager.watch(*build([tensor.clone() for tensor in inputs]))
        waiting = list(self.against)
        try:
            while waiting:
                with progress.step(f"peer {waiting[0].name}"):
                    peers.prepare(waiting[0], cases)
                waiting.pop(0)
        except KeyboardInterrupt:  # what is ready is measured, which takes seconds
            self.findings.interrupted = True
            peers.leave_out(waiting, "interrupted")

    def _check(self, progress: Progress) -> None:
        found = self.findings
        unchecked = [name for name in self.executables if name not in {check.name for check in found.checks}]
        if unchecked:
            judge = Judge(self.device, self._recorded, truth=False)
            with progress.step("check equality"):  # eager's own kernels: others are checked while they are chosen
                for name in unchecked:
                    found.checks.append(judge.judged(name, self._recorded, self.executables[name]))
            found.warnings += judge.notes
        if self.training:
            found.warnings += filter(None, [self.training.left_out(self._recorded)])
        found.warnings += [f"{check.name}: {check.reason}" for check in found.checks if not check.passed]

    def _watch(self, progress: Progress) -> None:
        found, replayed = self.findings, self.findings.replayed
        if replayed is None or replayed.whole:
            return
        watched = {line.run for line in found.timelines}
        with progress.step("watch replays"):
            self._doubt_costs()
            for name, one in self.executables.items():
                if name not in watched and found.is_replay(name):
                    found.timelines.append(observe(self.device, replayed, one).timeline)
        for line in found.timelines:
            if not line.reliable:
                found.warnings.append(f"timeline of {line.run} is unreliable: {line.note}")

    def _doubt_costs(self) -> None:
        """Forget what calls cost if a replay on one stream took far less than all of them."""
        found = self.findings
        single = next((name for name, one in found.schedules.items() if one.streams == 1), "")
        taken = found.measurements.get(single)
        if taken is None or found.costs is None or found.costs.total_ns <= _COSTS_BOUND * taken.median_ns:
            return
        found.warnings.append(
            f"what each call costs is unknown: timed one by one they took {format_ns(found.costs.total_ns)}, in a "
            f"replay on one stream {format_ns(taken.median_ns)}; the machine was not quiet"
        )
        found.costs = None

    def _profile(self, progress: Progress) -> None:
        if self.device.kind == "fake":
            return
        found = self.findings
        with progress.step("profile eager"):
            try:
                found.overhead, timeline = measure_overhead(
                    self._recorded.recording.program,
                    self.eager.run_with_phases,
                    device="cuda" if self.device.kind == "cuda" else "cpu",
                    unprofiled_ns=found.measurements["eager"].median_ns,
                    synchronize=self.device.synchronize,
                )
            except NimbleError as error:
                found.warnings.append(f"eager could not be profiled: {error.what}")
            else:
                found.timelines.insert(0, timeline)


def _first_words(found: Ratio) -> str:
    """Say what the first look gave.

    >>> print(_first_words(Ratio("replay", "eager", 3.21, 3.1, 3.3)))
    first look, eager's own kernels replayed: faster, 3.21x [3.10, 3.30]; compiling others
    """
    figures = f", {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]" if found.decided else ""
    return f"first look, eager's own kernels replayed: {found.verdict}{figures}; compiling others"


def _undecided(taken: Mapping[str, Measurement]) -> set[str]:
    """Return the runs whose comparison with eager, or with the fastest of all, is not decided yet."""
    beside_eager = {name for name in taken if name != "eager" and not ratio(taken[name], taken["eager"]).decided}
    names = beside_eager | ({"eager"} if beside_eager else set())
    return names | undecided(taken, [name for name in taken if name != "eager"])


def _engine_memory(name: str, memory: MemoryPlan, recorded: Recorded) -> EngineMemory:
    storages = recorded.recording.program.storages
    placed = [storage.nbytes for storage, offset in zip(storages, memory.offsets, strict=True) if offset >= 0]
    unshared = sum(placed) + max(memory.needs.workspaces, default=0)
    return EngineMemory(name, memory.nbytes, unshared, memory.workspace_nbytes)


def _mode_notes(model: Callable[..., Any]) -> list[str]:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    if not any(isinstance(one, (AnyNorm, AnyDropout)) and one.training for one in modules):
        return []
    return ["batch norm or dropout is in training mode: model.eval() for inference, or training=True for steps"]


def dtype_of(model: Callable[..., Any], inputs: Sequence[torch.Tensor], cast: torch.dtype | None) -> str:
    """Return the floating-point type of most weights and inputs, and what they are cast to."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    elements: Counter[str] = Counter()
    for tensor in [*parameters, *inputs]:
        if tensor.is_floating_point():
            elements[dtype_name(tensor.dtype)] += tensor.numel()
    held = elements.most_common(1)[0][0] if elements else dtype_name(inputs[0].dtype)
    return held if cast is None else f"{held} under {dtype_name(cast)} autocast"
