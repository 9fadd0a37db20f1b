"""``compare``: from a model and its inputs to a Report.

Eager, one-stream replay and multi-stream replay are measured in turn on the same inputs; the plans are checked against
eager on fresh ones; the eager run is profiled and the replays are watched, kernel by kernel. A training step goes the
same way, as one module of inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.candidates import Candidate, EqualityCheck, simplicity
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.measurement import Measurement, interleave, not_slower, ratio, undecided
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.profiling import cupti
from nimble_core.profiling.machine import environment, finish, others_running
from nimble_core.scheduling.options import Options, require_flag, require_options
from nimble_core.utils.errors import InputError, NimbleError
from nimble_core.utils.units import format_ns
from nimble_core.validation.equality import check_equality
from nimble_viz.collect.overhead import measure_overhead
from nimble_viz.collect.progress import Progress, default_progress
from nimble_viz.collect.sources import pass_over_machinery, read_sources
from nimble_viz.collect.suggestions import refuse_unknown
from nimble_viz.render.report import Report
from nimble_viz.report.data import EAGER_ALONE, EngineMemory, Memory, OverheadProfile, PrepareStep, Work

if TYPE_CHECKING:
    import torch

    from nimble_core.runtime.device import Device, Executable
    from nimble_core.scheduling.memory_planner import MemoryPlan
    from nimble_core.tracing.recorded import Recorded
    from nimble_core.tracing.side_effects import Guard
    from nimble_viz.collect.compare_training import Training
    from nimble_viz.collect.peer_runs import PeerRuns
    from nimble_viz.collect.peers import Peer

__all__ = ["compare"]

_PATIENCE_S = 5.0
"""How long to go on measuring while a verdict is open."""

_LOOK_AROUND = 8
"""Rounds between two looks at what else runs on this machine."""

_COSTS_BOUND = 3.0
"""If calls take this many times as long one by one as in a replay on one stream, it was not they that were timed."""


def compare(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    against: str | Iterable[str | Peer] = (),
    options: Options | None = None,
    training: bool = False,
    progress: Progress | None = None,
    device: Device | None = None,
    **unknown: Never,
) -> Report:
    """Measure ``model`` on these inputs: eager, one-stream replay, multi-stream replay, and the peers asked for.

    With ``training`` all of them run whole training steps: zeroed gradients, forward, loss, backward and
    ``optimizer.step()``, eager with the optimizer as it is, replays as ``nimble_core.TrainStep`` does. Each round of
    measuring starts from the same parameters. ``autocast``, ``scaler`` and ``clip_grad_norm`` hold for eager and peers
    as for replays, and ``Report.warnings`` says so.

    The model, its parameters, buffers and random state are left as they were, bit for bit, and so are gradients,
    optimizer, scaler and their state: steps are made with copies of both. An interruption (Ctrl-C) while a peer is
    prepared leaves out this peer and those after it, measures what is ready, and returns that; once something was
    measured it returns what there is, marked incomplete, with a ``NimbleWarning`` that says what is missing; earlier it
    passes through.

    Rounds are measured until verdicts (``Ratio.verdict``) are decided: up to the first look after five seconds, of at
    least 128 rounds, within ``budget_s``.

    Args:
        model: module or function of tensors, on one device; to train, a module in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        target: what the loss is told besides the model's output; None: nothing.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where the target is None; a scalar.
        optimizer: of parameters of the model; None: a step is forward, loss and backward.
        autocast: type for ``torch.autocast`` around forward and loss, ``torch.bfloat16`` or ``torch.float16``.
        scaler: scales the loss, and leaves out updates by gradients that are not finite. Needs an optimizer with a
            fused form (SGD, Adam, AdamW, Adagrad).
        clip_grad_norm: largest norm of the gradients of all the optimizer's parameters together.
        accumulate: 1: steps that update are compared, none that only add to gradients.
        against: peers to measure in the same rounds: names (``peers.peer_names``) and ``Peer`` objects. One
            that fails, that cannot train, or whose outputs are not eager's, is left out, and ``Report.peers`` says why.
        options: how to prepare; defaults to ``Options()``.
        training: compare training steps; what else says how to train is for this alone.
        progress: a ``Progress`` (``nimble_viz.collect.progress``), told what is going on; ``Progress()`` shows nothing;
            by default a progress line where someone can see it.
        device: a ``Device`` that runs it, as ``nimble_core.runtime.host.device.HostDevice()``; by default that of the
            inputs.
        unknown: refused, with a word on what to write instead.

    Raises:
        InputError: no model, no tensor among the inputs, mixed devices, an option that is not available, no such peer,
            no ``Device``, no ``Progress``.
        NotStaticError: the model does not do the same on every input.
        CaptureError: a call that cannot be captured; names it, its module path and source line.
        DeviceError: out of memory.
    """
    from nimble_core.api.call_mistakes import mistakes_explained
    from nimble_core.autotune.capture_pipeline import device_for
    from nimble_core.tracing.provenance import warn
    from nimble_core.tracing.recorded import check_inputs, preparing
    from nimble_core.tracing.side_effects import requirements_kept

    refuse_unknown(compare, unknown)
    pass_over_machinery()  # of a model without code of its own, the line is that which compares
    how = {
        "target": target,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "autocast": autocast,
        "scaler": scaler,
        "clip_grad_norm": clip_grad_norm,
    }
    _require_training(training, how, accumulate)
    peers: tuple[Peer, ...] = ()
    if against:
        from nimble_viz.collect.peers import resolve_peers

        peers = resolve_peers(against)
    options = Options() if options is None else options
    require_options(options)
    _require_runner(device, progress)
    if not isinstance(kwargs or {}, Mapping):
        raise InputError(f"kwargs is a {type(kwargs).__name__}", fix="a dict of the model's keyword inputs")
    named = dict(kwargs or {})
    step = None
    if training:
        from nimble_viz.collect.compare_training import Training

        check_inputs(model, args, named)
        step = Training(model, args, named, **how)
        model, args, named = step.whole, step.arguments, {}
    with mistakes_explained(args, named):
        signature = check_inputs(model, args, named)
    run = _Comparison(model, args, named, signature, device or device_for(signature.device), options, peers, step)
    kept = step.gradients_kept() if step else nullcontext()
    with preparing(model), requirements_kept(args, named), kept, progress or default_progress() as told:
        try:
            run.measure(told)
        except KeyboardInterrupt:
            if not run.measurements:
                raise
            run.interrupted = True
        finally:
            run.close()
    if run.interrupted:
        warn(f"compare was interrupted: {run.missing()}")
    return run.report()


class _Comparison:
    """What is known so far; ``report`` makes a Report of it at any time once the model is recorded."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        signature: Any,
        device: Device,
        options: Options,
        against: Sequence[Peer] = (),
        training: Training | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.signature, self.device, self.options, self.against = signature, device, options, against
        self.training = training
        self.environment = environment("cuda" if device.kind == "cuda" else "cpu")
        self.recorded: Recorded | None = None
        self.replayed: Recorded | None = None
        self.rewind: Callable[[], None] | None = None
        self.executables: dict[str, Executable] = {}
        self.schedules: dict[str, Schedule] = {}
        self.candidates: tuple[Candidate, ...] = ()
        self.costs: Costs | None = None
        self.peers: PeerRuns | None = None
        self.measurements: dict[str, Measurement] = {}
        self.checks: list[EqualityCheck] = []
        self.prepared: tuple[PrepareStep, ...] = ()
        self.overhead: OverheadProfile | None = None
        self.timelines: list[Timeline] = []
        self.engine_bytes: dict[str, int] = {}
        self.planned: list[EngineMemory] = []
        self.eager_peak = 0
        self.compare_peak = 0
        self.warnings: list[str] = list(training.notes) if training else _mode_notes(model)
        self.interrupted = False
        self.others: list[int] = []
        self._without_autograd: Callable[[], Any] = nullcontext
        self._guard: Guard

    # -- steps -------------------------------------------------------------------------------------------------

    def measure(self, progress: Progress) -> None:
        """All steps, in the order that gives the reader the most if it is interrupted."""
        import torch

        self.compare_peak = self.device.memory_peak(lambda: self._steps(progress))
        if self.device.kind == "cuda":
            # A captured graph's pool is not among what torch counts as allocated, and all engines lived at once.
            self.compare_peak += sum(self.engine_bytes.values())
        with progress.step("eager memory"), self._kept():
            if self.training:
                self.training.eager.close()  # gradients of the step before are no part of this one
            torch.clear_autocast_cache()  # what a region around us has kept of cast weights belongs to this run
            self.eager_peak = self.device.memory_peak(self._eager)

    @contextmanager
    def _kept(self, runs: int = 2) -> Iterator[None]:
        """Runs inside, eager or replayed, leave attributes, tensors and random state as they were.

        Args:
            runs: of eager that are watched first; 0 where none follow.
        """
        import torch

        from nimble_core.tracing.recorded import state_kept
        from nimble_core.tracing.side_effects import preserved

        assert self.recorded is not None
        with preserved(self.model, draws=()) as self._guard, state_kept(self.recorded):
            # What timed runs write, whichever branch a second one takes, is known before: nothing watches them.
            for _ in range(0 if self.training else runs):
                with self._guard.watching(), torch.no_grad():
                    self._eager()
            yield

    def _steps(self, progress: Progress) -> None:
        self._record(progress)
        assert self.recorded is not None
        self.warnings += self.recorded.recording.program.notes
        for take in (self._prepare, self._time, self._check, self._watch, self._profile):
            with self._kept(0 if take == self._prepare else 2):
                take(progress)
        self.close()

    def _record(self, progress: Progress) -> None:
        from nimble_core.api.call_mistakes import mistakes_explained
        from nimble_core.tracing.recorded import record_static
        from nimble_core.tracing.recording import rewinding

        given = ((), {}) if self.training else (self.args, self.kwargs)  # a step calls the user's loss as well
        with progress.step("warm-up"), mistakes_explained(*given):
            self.device.warm_up(self.model, *self.signature.arguments())
        recorded = record_static(
            self.device,
            self.model,
            self.signature,
            strict=self.options.strict,
            step=progress.step,
        )
        self.recorded = self.replayed = recorded
        self.rewind = rewinding(recorded.recording, self.signature.tensors)

    def _prepare(self, progress: Progress) -> None:
        try:
            self._capture(progress)
        finally:
            self.prepared = progress.steps
        for name, one in self.executables.items():
            self.engine_bytes[name] = one.nbytes
            if self._replays(name):
                self.schedules[name] = _with_counts(one)
                if one.memory is not None:
                    self.planned.append(_engine_memory(name, one.memory, self.replayed))

    def _replays(self, name: str) -> bool:
        """Whether an executable runs the calls of the report's program, not others for comparison."""
        kinds = {one.name: one.fuse for one in self.candidates}
        assert self.replayed is not None
        fuse = self.replayed.recording.program.fuse
        return kinds.get(name, fuse) == fuse

    def _capture(self, progress: Progress) -> None:
        from nimble_core.autotune.autotune import tune
        from nimble_core.tracing.recorded import whole_note

        device, recorded = self.device, self.recorded
        assert recorded is not None
        if recorded.whole:
            self.warnings.append(whole_note(device, recorded))
            with progress.step("capture single"):
                executable = device.capture_whole(self.model, recorded.recording, self.signature)
            self.executables = {executable.schedule.policy: executable}
            return
        tuned = tune(device, recorded, self.options, step=progress.step, measure_single=True)
        self.executables = tuned.executables
        self.candidates = tuned.candidates
        self.replayed = tuned.recorded
        self.checks = [check for check in tuned.checks if check.name in tuned.executables]
        self.costs = tuned.costs
        self.warnings += tuned.notes
        if tuned.observed:
            self.timelines.append(tuned.observed.timeline)

    def _time(self, progress: Progress) -> None:
        import torch

        self._choose_eager()
        self._prepare_peers(progress)
        candidates: dict[str, Callable[[], object]] = {"eager": self._eager}
        if self.device.kind == "cpu" and torch.get_num_threads() > 1:
            candidates[EAGER_ALONE] = self._eager_alone
        candidates |= {name: self._replay(one) for name, one in self.executables.items()}
        rewind = self.training.rewinding() if self.training else None

        def on_round(done: int, total: int) -> None:
            if rewind is not None:  # weights that all runs train together would not be those of any of them
                rewind()
                self.device.synchronize()
            if done % _LOOK_AROUND == 1 and (running := others_running()) is not None:
                self.others.append(running)
            progress.advance(done, total)

        if self.peers:
            candidates |= self.peers.timed()
        if self.rewind:
            candidates |= {
                name: partial(self._rewound, run)
                for name, run in candidates.items()
                if name not in ("eager", EAGER_ALONE)
            }
        if self.device.kind == "cuda" and cupti.present():
            self.warnings.append("CUPTI was in this process: CUDA graphs took longer to launch than they do without it")
        with progress.step("measure"):
            self.measurements = interleave(
                candidates,
                clock_ns=self.device.clock_ns,
                synchronize=self.device.synchronize,
                budget_s=self.options.budget_s,
                patience_s=0.0 if self.interrupted else _PATIENCE_S,
                open_names=self._open,
                interruptions=self.device.interruptions,
                rehearse=self.device.kind == "cuda",
                on_round=on_round,
                on_interrupt=self._interrupt,
            )
        if self.peers:
            self.measurements = {name: self.measurements[name] for name in candidates if name not in self.peers.failed}
            self.peers.close()
        if self.interrupted:
            raise KeyboardInterrupt

    def _open(self, taken: Mapping[str, Measurement]) -> set[str]:
        """Runs whose comparison with eager, or with the fastest of all, is not decided yet."""
        beside_eager = {name for name in taken if name != "eager" and not ratio(taken[name], taken["eager"]).decided}
        names = beside_eager | ({"eager"} if beside_eager else set())
        return names | undecided(taken, [name for name in taken if name != "eager"])

    def _replay(self, one: Executable) -> Callable[[], object]:
        build, inputs, training = _builder(self.recorded), self.signature.tensors, self.training
        if training is None:
            return lambda: build(one.run(inputs))
        return training.replay(lambda: build(one.run(inputs, static=True)))

    def _rewound(self, run: Callable[[], object]) -> object:
        """Run with counters, such as positions in a cache, as they were: many runs would count them out of range."""
        assert self.rewind is not None
        self.rewind()
        return run()

    def _interrupt(self) -> None:
        self.interrupted = True

    def _prepare_peers(self, progress: Progress) -> None:
        from nimble_core.tracing.pytree import builder
        from nimble_core.validation.eager_cases import eager_cases
        from nimble_viz.collect.peer_runs import PeerRuns

        if not self.against:
            return
        assert self.recorded is not None
        self.peers = PeerRuns(
            self.recorded,
            self.args,
            self.kwargs,
            without_autograd=self._without_autograd,
            synchronize=self.device.synchronize,
            taken=("eager", *self.executables),
            training=self.training,
        )
        cases = eager_cases(self.recorded, truth=self.training is None)
        build = builder(self.recorded.signature.structure)
        for inputs, _ in () if self.training else cases.eager:
            args, kwargs = build([tensor.clone() for tensor in inputs])
            with self._guard.watching(), self._without_autograd():
                self.model(*args, **kwargs)
        waiting = list(self.against)
        try:
            while waiting:
                with progress.step(f"peer {waiting[0].name}"):
                    self.peers.prepare(waiting[0], cases)
                waiting.pop(0)
        except KeyboardInterrupt:  # what is ready is measured, which takes seconds
            self.interrupted = True
            self.peers.leave_out(waiting, "interrupted")

    def _check(self, progress: Progress) -> None:
        from nimble_core.validation.eager_cases import eager_cases, from_same_state

        assert self.recorded is not None
        unchecked = [name for name in self.executables if name not in {check.name for check in self.checks}]
        if unchecked:
            with progress.step("check equality"):
                cases = eager_cases(self.recorded)
                judge = partial(check_equality, lowest=cases.lowest)
                if self.training:
                    moved, names = self.training.rounded(self.recorded, cases)
                    judge = partial(judge, perturbed=moved, names=names)
                for name in unchecked:  # eager's own kernels: others are checked while they are chosen
                    replay = from_same_state(self.recorded, self.executables[name].run)
                    self.checks.append(judge(name, replay, cases.eager))
        if self.training:
            with progress.step("check updates"):
                self.warnings += filter(None, [self.training.left_out(self.recorded)])
                self.checks = [self._with_update(check) for check in self.checks]
        self.warnings += [f"{check.name}: {check.reason}" for check in self.checks if not check.passed]

    def _with_update(self, check: EqualityCheck) -> EqualityCheck:
        """The check, failed where the parameters after a step are not what the optimizer makes of the gradients."""
        from nimble_core.tracing.recorded import state_kept

        one = self.executables.get(check.name)
        if one is None or self.training is None or self.recorded is None or check.differs:
            return check
        build, inputs = _builder(self.recorded), self.signature.tensors
        with state_kept(self.recorded):
            wrong = self.training.wrong_update(lambda: build(one.run(inputs)))
        return replace(check, passed=False, reason=wrong) if wrong else check

    def _watch(self, progress: Progress) -> None:
        if self.replayed is None or self.replayed.whole:
            return
        from nimble_core.autotune.capture_pipeline import observe

        watched = {line.run for line in self.timelines}
        with progress.step("watch replays"):
            self._hold_costs_to_replay()
            for name, one in self.executables.items():
                if name not in watched and self._replays(name):
                    seen = observe(self.device, self.replayed, one)
                    self.timelines.append(seen.timeline)
        for line in self.timelines:
            if not line.reliable:
                self.warnings.append(f"timeline of {line.run} is unreliable: {line.note}")

    def _hold_costs_to_replay(self) -> None:
        """Time the calls again, once, if a replay on one stream took far less than all of them; else forget them."""
        from nimble_core.autotune.capture_pipeline import observe

        single = next((name for name, one in self.schedules.items() if one.streams == 1), "")
        taken = self.measurements.get(single)
        if taken is None or self.costs is None or self.replayed is None:
            return
        bound = _COSTS_BOUND * taken.median_ns
        if self.costs.total_ns <= bound:
            return
        again = observe(self.device, self.replayed, self.executables[single])
        self.timelines = [again.timeline if line.run == again.timeline.run else line for line in self.timelines]
        if again.costs.total_ns <= bound:
            self.costs = again.costs
            return
        self.warnings.append(
            f"what each call costs is unknown: timed one by one they took {format_ns(again.costs.total_ns)}, in a "
            f"replay on one stream {format_ns(taken.median_ns)}; the machine was not quiet"
        )
        self.costs = None

    def _profile(self, progress: Progress) -> None:
        if self.device.kind == "fake" or self.recorded is None:
            return

        with progress.step("profile eager"):
            try:
                self.overhead, timeline = measure_overhead(
                    self.recorded.recording.program,
                    self._eager_marked,
                    device=self.device.kind,
                    unprofiled_ns=self.measurements["eager"].median_ns,
                    synchronize=self.device.synchronize,
                )
            except NimbleError as error:
                self.warnings.append(f"eager could not be profiled: {error.what}")
            else:
                self.timelines.insert(0, timeline)

    def close(self) -> None:
        """Free engines and peers, one by one."""
        for one in self.executables.values():
            one.close()
        self.executables.clear()
        if self.peers:
            self.peers.close()

    # -- eager -------------------------------------------------------------------------------------------------

    def _eager(self) -> Any:
        if self.rewind:
            self.rewind()
        if self.training:
            return self.training.eager.step(*self.args)
        with self._without_autograd():
            return self.model(*self.args, **self.kwargs)

    def _eager_alone(self) -> Any:
        """Eager with one thread: what is faster only than more threads gains nothing by replaying."""
        import torch

        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._eager()
        finally:
            torch.set_num_threads(usual)

    def _eager_marked(self) -> Any:
        """The same for the profiler, which is told of the phases of a training step."""
        if self.training is None:
            return self._eager()
        from nimble_viz.collect.compare_training import mark_phase

        inputs, targets = self.args
        return self.training.eager.step(inputs, targets, mark_phase)

    def _choose_eager(self) -> None:
        """Eager runs in inference mode, the fastest there is, unless the model cannot, or trains."""
        import torch

        if self.training:
            self._without_autograd = torch.enable_grad
            return
        self._without_autograd = torch.inference_mode
        try:
            with self._kept():
                self._eager()
        except RuntimeError as error:
            self._without_autograd = torch.no_grad
            self.warnings.append(f"eager runs under no_grad: inference_mode fails with {str(error).splitlines()[0]}")

    # -- report ------------------------------------------------------------------------------------------------

    def missing(self) -> str:
        """What an interruption after the first round of timing left out, in words."""
        rounds = min(len(taken.samples_ns) for taken in self.measurements.values())
        watched = {line.run for line in self.timelines}
        known = {
            "whether outputs equal eager's": {check.name for check in self.checks}.issuperset(self.engine_bytes),
            "when the calls of replays ran": watched.issuperset(self.schedules),
            "where eager's host time goes": self.overhead is not None or self.device.kind == "fake",
            "eager's memory": False,
        }
        lacks = ", ".join(name for name, there in known.items() if not there)
        return f"the report rests on {rounds} rounds of timing and does not know {lacks}"

    def report(self) -> Report:
        """What is known, as one value."""
        assert self.recorded is not None
        assert self.replayed is not None
        graph, program = self.replayed.graph, self.replayed.recording.program
        measured = self.costs is not None and self.costs.source != "uniform"
        costs = self.costs or uniform_costs(graph.size)
        length, path = critical_path(predecessors(graph, meg=True), costs.ns)
        differ = {check.name for check in self.checks if check.differs}
        right = {
            name: taken for name, taken in self.measurements.items() if name in self.schedules and name not in differ
        }
        chosen = self._chosen(right)
        return Report(
            model=_name(self.training.model if self.training else self.model),
            dtype=self._dtype(),
            batch=int(self.signature.tensors[0].shape[0]) if self.signature.tensors[0].dim() else 0,
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
            timelines=tuple(self._stamped(line) for line in self.timelines),
            memory=Memory(self.eager_peak, tuple(self.engine_bytes.items()), self.compare_peak, tuple(self.planned)),
            chosen=chosen,
            candidates=tuple(replace(one, chosen=one.name == chosen) for one in self.candidates),
            eager=None if program.fuse == "none" else self.recorded.recording.program,
            peers=self.peers.results if self.peers else (),
            warnings=(*self.warnings, *(self.peers.warnings if self.peers else ())),
            complete=not self.interrupted,
            work=self._work(),
            sources=read_sources(self.recorded.recording.program.calls),
        )

    def _work(self) -> Work:
        """What the calls compute, and the GPU they run on."""
        from nimble_viz.collect.flops import count_work

        assert self.recorded is not None
        assert self.replayed is not None
        processors = None
        if self.device.kind == "cuda":
            from nimble_core.runtime.cuda.observing import multiprocessors

            processors = multiprocessors(self.signature.device)
        eager = None if self.replayed.recording.program.fuse == "none" else self.recorded.recording
        return count_work(self.replayed.recording, eager, processors)

    def _dtype(self) -> str:
        """Of weights and inputs, and what they are cast to."""
        held = _dtype(self.model, self.signature.tensors)
        cast = self.training.autocast if self.training else None
        return held if cast is None else f"{held} under {str(cast).removeprefix('torch.')} autocast"

    def _chosen(self, taken: Mapping[str, Measurement]) -> str:
        """What preparation chose, unless that is decidedly slower here than another; then the simplest of the best."""
        close = not_slower(taken)
        prepared = next((one.name for one in self.candidates if one.chosen), "")
        if prepared in close or not close:
            return prepared if prepared in close else ""
        found = {one.name: one for one in self.candidates}
        return min(close, key=lambda name: simplicity(found[name]) if name in found else (True,))

    def _stamped(self, line: Timeline) -> Timeline:
        taken = self.measurements.get(line.run)
        return replace(line, unprofiled_ns=taken.median_ns) if taken else line


def _require_training(training: bool, how: Mapping[str, Any], accumulate: Any) -> None:
    require_flag(training, f"training={training!r}")
    given = [name for name, value in how.items() if value is not None]
    if accumulate != 1:
        raise InputError(
            f"accumulate={accumulate!r}: compare measures steps that update, one by one",
            fix="leave it out; TrainStep(..., accumulate=...) trains that way",
        )
    if given and not training:
        what = f"{', '.join(given)} {'are' if len(given) > 1 else 'is'} for training"
        raise InputError(what, fix=f"training=True, or leave {'them' if len(given) > 1 else 'it'} out")


def _require_runner(device: Any, progress: Any) -> None:
    if device is not None and (isinstance(device, type) or not callable(getattr(device, "record", None))):
        raise InputError(
            f"device is a {type(device).__name__}, not a Device",
            fix="leave it out: a model runs where its inputs are, model.to('cuda') and x.to('cuda'), say; else an "
            "instance of a Device, as nimble_core.runtime.host.device.HostDevice()",
        )
    if progress is not None and not isinstance(progress, Progress):
        raise InputError(
            f"progress is a {type(progress).__name__}, not a Progress",
            fix="leave it out, or nimble_viz.collect.progress.Progress(), which shows nothing",
        )


def _with_counts(executable: Executable) -> Schedule:
    return replace(executable.schedule, counts=executable.counts)


def _engine_memory(name: str, memory: MemoryPlan, recorded: Recorded | None) -> EngineMemory:
    assert recorded is not None
    storages = recorded.recording.program.storages
    placed = [storage.nbytes for storage, offset in zip(storages, memory.offsets, strict=True) if offset >= 0]
    unshared = sum(placed) + max(memory.needs.workspaces, default=0)
    return EngineMemory(name, memory.nbytes, unshared, memory.workspace_nbytes)


def _mode_notes(model: Callable[..., Any]) -> list[str]:
    import torch

    from nimble_core.torch_compat.members import AnyDropout, AnyNorm

    moody = AnyNorm, AnyDropout
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    if not any(isinstance(one, moody) and one.training for one in modules):
        return []
    return ["batch norm or dropout is in training mode: model.eval() for inference, or training=True for steps"]


def _builder(recorded: Recorded | None) -> Callable[[Sequence[torch.Tensor]], Any]:
    from nimble_core.tracing.pytree import builder

    assert recorded is not None
    return builder(recorded.recording.output_structure)


def _name(model: Callable[..., Any]) -> str:
    import torch

    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")


def _dtype(model: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> str:
    from collections import Counter

    import torch

    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    weights: Counter[str] = Counter()
    for tensor in [*parameters, *inputs]:
        if tensor.is_floating_point():
            weights[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return weights.most_common(1)[0][0] if weights else str(inputs[0].dtype).removeprefix("torch.")
