"""The measured choice: candidates are captured, checked and timed in turn; the simplest of the best wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any

from nimble_core.autotune.budget import Budget, compile_s
from nimble_core.autotune.capture_pipeline import capture, observe
from nimble_core.autotune.choice import MemoryPrice, choose
from nimble_core.autotune.kept_choice import keep, kept_plan, kinds_of
from nimble_core.autotune.mending import mend
from nimble_core.autotune.plans import (
    Planned,
    asked_plan,
    best_kernels_first,
    searched_plans,
    simulated_ns,
    variant_name,
)
from nimble_core.autotune.trials import Trials, known_costs, reason_of
from nimble_core.compiler.pipeline import follow, fuse
from nimble_core.ir.candidates import Candidate, EqualityCheck
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import interleave, undecided
from nimble_core.ir.program import Fuse, KernelChoice
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Observation
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.liveness import serial_peak
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import schedule_of
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.utils.errors import CaptureError, NimbleError
from nimble_core.utils.files import cache_directory
from nimble_core.validation.judge import Judge, judged_again

__all__ = ["Tuned", "eager_peak", "tune"]

Step = Callable[[str], AbstractContextManager[Any]]

_PATIENCE_S = {"fast": 2.0, "full": 10.0}
"""How long to go on measuring while it is open which candidate is best, as far as the budget goes."""
_IMPATIENT = 3.0
"""How many times as long at most, where replays are so long that they are few by then."""
_LESS = (0.0, 0.25, 0.5, 0.75)
"""Memory limits to try for a plan that holds much, until one is kept: shares of the way from what is not much to all
that it holds."""


@dataclass(slots=True)
class Tuned:
    """What tuning found. The executables are open: the caller closes them.

    Args:
        best: what the engine should run.
        recorded: what ``best`` runs: the model, or what it was rewritten to.
        executables: those still open by name: ``single`` if it was captured, one stream and the fastest of several
            streams of the kernels of ``best``, and ``best``.
        candidates: what was tried.
        checks: each captured candidate's outputs against eager's.
        observed: the one-stream replay of ``recorded``, watched; None if nothing was measured.
        notes: what the user should know.
        wrong: how even one stream's outputs differ from eager's; empty if they do not.
    """

    best: Executable
    recorded: Recorded
    executables: dict[str, Executable]
    candidates: tuple[Candidate, ...] = ()
    checks: tuple[EqualityCheck, ...] = ()
    observed: Observation | None = None
    notes: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def costs(self) -> Costs | None:
        """Isolated time of each call, None if unknown."""
        return known_costs(self.observed)

    def close(self, *, keep: Executable | None = None) -> None:
        """Close all executables but ``keep``."""
        for executable in self.executables.values():
            if executable is not keep:
                executable.close()


def tune(
    device: Device,
    recorded: Recorded,
    options: Options,
    *,
    step: Step,
    measure_single: bool = False,
    eager_nbytes: int | None = None,
    beside_nbytes: int = 0,
    worth: float = 1.1,
    compiled: Collection[KernelChoice] | None = None,
) -> Tuned:
    """Find the kernels and the plan to run.

    Kernels: ``fuse`` names them, or ``"auto"`` tries eager's own, libraries' and, as far as the budget goes, compiled
    ones. Kernels that cannot be made, planned or run, or whose outputs are not right, are left out with the reason;
    eager's own remain.

    Plans: with ``tune="off"`` nothing is measured: ``policy="auto"`` then means ``nimble`` on CUDA and ``single``
    elsewhere. Else one stream is captured and watched first: what each call costs decides the rest. ``policy="auto"``
    plans by every policy, simulates the plans, captures the most promising ones as long as the budget lasts
    (``"full"``: all, with several caps on streams), compares their outputs with eager's, and times them in turn with
    one stream. Of those whose outputs are right and that are not decidedly slower than another, the simplest wins
    (``simplicity``); where nothing is decided, what was kept last, else the simplest compiled kernels. A policy given
    by name is not compared with others.

    Args:
        device: where.
        recorded: the model. What replays write of it is the caller's to keep (``state_kept``).
        options: fuse, policy, tune, budget_s, max_streams, memory_limit, strict.
        step: times the steps.
        measure_single: capture and watch eager's kernels on one stream whatever the options say.
        eager_nbytes: most bytes that eager holds in what this is a part of; None: as ``eager_peak`` says.
        beside_nbytes: of that, what other parts hold already.
        worth: how many times as fast as others a plan has to be that holds much more than eager does; little more need
            be worth less.
        compiled: what ``compile_for_tuning`` returned: those kernels are made, and no others timed for them.

    Raises:
        CaptureError: a call that cannot be issued again; under ``strict`` also outputs that differ from eager's.
        ScheduleError, DeviceError, InputError: as ``capture`` and ``schedule_by``.
        Exception: what a policy raises; under ``strict`` also what else goes wrong with other kernels than eager's, but
            for CaptureError and DeviceError.
    """
    if eager_nbytes is None:  # what was timed is held against it, and nothing else
        eager_nbytes = eager_peak(device, recorded) if options.tune != "off" else 0
    owned = (one.nbytes for one in recorded.recording.program.storages if one.role in ("parameter", "buffer"))
    price = MemoryPrice(eager_nbytes, sum(owned), beside_nbytes, worth)
    trials, budget = Trials(options.strict), Budget(options.budget_s)
    judge = Judge(device, recorded, truth=kinds_of(device, options) != ("none",))
    run = _Tuning(device, recorded, options, step, judge, price, trials, budget, compiled)
    try:
        return run.tuned(measure_single)
    except BaseException:
        trials.close()
        raise


def eager_peak(device: Device, recorded: Recorded) -> int:
    """Return the most bytes that the model's own calls hold at a time, one after the other.

    Workspaces are included; what was there before (inputs, parameters) is not.
    """
    recording, calls = recorded.recording, len(recorded.recording.program.calls)
    layout = device.lay_out(recording, Schedule("single", (0,) * calls, tuple(range(calls)), ()), stagger=False)
    if layout is None:
        return serial_peak(recording.program)
    running = list(map(add, layout.scratch, layout.workspaces))
    return serial_peak(layout.sized(recording.program), running)


@dataclass(slots=True)
class _Tuning:
    device: Device
    recorded: Recorded
    options: Options
    step: Step
    judge: Judge
    price: MemoryPrice
    trials: Trials
    budget: Budget
    compiled: Collection[KernelChoice] | None = None
    decided: bool = True
    timed: int = 0
    wrong: str = ""

    def tuned(self, measure_single: bool) -> Tuned:
        kinds, trials = kinds_of(self.device, self.options), self.trials
        # A report shows what else was tried: it is made anew.
        recalled = not measure_single and self._recalled()
        if not recalled:
            self._try(kinds, measure_single)
            trials.say_what_is_wrong(kinds)
        asked = bool(trials.right(kinds))
        if not asked and "none" not in kinds:
            self._try(("none",), measure_single)
        kinds = kinds if asked else ("none",)
        best = self._chosen(kinds)
        kind = trials.candidates[best].fuse
        # What nothing decides is kept as well: another process would find no more, in as much time.
        if asked and not (recalled or self.wrong) and (self.decided or not self._kept()):
            chosen = trials.variants[kind], trials.executables[best].schedule
            keep(self.device, self.recorded, self.options, *chosen)
        trials.close(keep=trials.shown(best))
        return Tuned(
            trials.executables[best],
            trials.variants[kind],
            trials.executables,
            tuple(trials.candidates.values()),
            tuple(trials.checks.values()),
            trials.observed.get(kind),
            (*trials.notes, *self.judge.notes),
            self.wrong,
        )

    # -- what an earlier process chose --

    def _recalled(self) -> bool:
        """Make again what an earlier process chose; False if none did, or it does not fit or is not right any more."""
        plan = kept_plan(self.device, self.recorded, self.options)
        if plan is None:
            return False
        kind, name, trials = plan.fuse, plan.policy, self.trials
        try:
            start, thorough = time.perf_counter(), self.options.tune == "full"
            variant = follow(self.device, self.recorded, plan, thorough=thorough, step=self.step)
            trials.variants[kind], trials.fuse_s[kind] = variant, time.perf_counter() - start
            self._capture(Planned(kind, schedule_of(plan, variant.recording.program, variant.graph)))
            if variant.kernels and variant.kernels == plan.shown and name in trials.executables:
                with self.step("check equality"):
                    check = judged_again(name, self.recorded, variant, trials.executables[name])
                    if check is not None:
                        trials.judged(name, check)
            if kind != "none" or plan.schedule.streams > 1:
                self._check()
        except Exception as error:  # whatever it is: what is tried now says so again if it concerns that, too
            trials.notes.append(f"what an earlier process chose could not be made again: {reason_of(error)}")
        else:
            if name in trials.right((kind,)):
                again = f"tune again by emptying {cache_directory()}"
                trials.notes.append(f"{name} was chosen by an earlier process; {again}")
                return True
        trials.clear()
        self.judge.forget(kind)  # what is made now need not be the same
        return False

    # -- what there is to choose from --

    def _try(self, kinds: Sequence[Fuse], measure_single: bool) -> None:
        """Capture, check and time what these kernels offer."""
        options, trials = self.options, self.trials
        measured = options.tune != "off" and (options.policy != "single" or len(kinds) > 1)
        search = options.policy == "auto" and measured
        plans: list[Planned] = []
        eager_missing = measure_single and "none" not in kinds and "none" not in trials.variants
        baseline: tuple[Fuse, ...] = ("none",) if eager_missing else ()
        for kind in (*baseline, *kinds):
            with trials.or_left_out(kind):
                if not self._made(kind):
                    continue
                if (measured or measure_single) and not self._watched(kind):
                    continue
                if kind not in baseline:
                    with self.step("schedule"):
                        plans += self._planned(kind, search, measure_single)
        self._capture_promising(plans, search, optional=options.policy == "auto" or measure_single)
        several = len(trials.executables) > 1
        if (search and several) or any(kind != "none" for kind in kinds):
            self._check()
            for kind in () if measured or measure_single else kinds:
                self._mend(kind, lambda one: self._planned(one, search, measure_single)[0])
        if measured and several and (options.policy == "auto" or len(kinds) > 1):
            self._time(trials.executables)
            if search and options.memory_limit is None:
                self._try_less_memory(self._best(kinds, None), kinds)

    def _made(self, kind: Fuse) -> bool:
        """Make kernels of this kind; False if the budget does not allow it."""
        trials, options = self.trials, self.options
        if kind == "none":
            trials.variants[kind] = self.recorded
            return True
        left_s = self.budget.left_s  # compile_s is rough: compiling may use the time reserved for choosing
        compiles = kind == "inductor" and self.compiled is None
        expected_s = compile_s(self.recorded.recording.program) if compiles else 0.0
        if options.fuse == "auto" and expected_s > left_s:
            verb = "compiled" if kind == "inductor" else "rewritten"
            left = f"{max(left_s, 0):.0f} s left of budget_s={options.budget_s:g}"
            trials.leave_out(kind, note=f"not {verb}: about {expected_s:.0f} s expected, {left}")
            return False
        start, measure, thorough = time.perf_counter(), options.tune != "off", options.tune == "full"
        made = partial(fuse, self.device, self.recorded, kind, measure=measure, thorough=thorough, step=self.step)
        choices = self.compiled if kind == "inductor" else None
        try:
            trials.variants[kind] = made(measure_s=max(self.budget.to_make_s - expected_s, 0.0) / 2, choices=choices)
        finally:
            trials.fuse_s[kind] = time.perf_counter() - start
        return True

    def _watched(self, kind: Fuse) -> bool:
        """Watch one stream of these kernels; False if that could not be captured, or other kernels are wrong."""
        trials, single = self.trials, variant_name(kind, "single")
        if single not in trials.executables:
            self._capture(asked_plan(kind, trials.variants[kind], "single", None, 1))
        if kind != "none" and single in trials.executables:
            self._check(kind)  # kernels that are wrong must not displace plans of others
            self._mend(kind, lambda one: asked_plan(one, trials.variants[one], "single", None, 1))
        if single not in trials.executables or (kind != "none" and trials.wrong(single)):
            return False
        # Replays of a training step train: what is judged later starts from where this one did.
        with self.step("measure calls"), state_kept(self.recorded):
            variant, executable = trials.variants[kind], trials.executables[single]
            trials.observed[kind] = observe(self.device, variant, executable)
        expected_ns = simulated_ns(self.device, variant, executable.schedule, trials.costs(kind))
        trials.amend(single, simulated_ns=expected_ns)
        return True

    def _mend(self, kind: Fuse, planned: Callable[[Fuse], Planned]) -> None:
        """Make kernels of this kind again without those found wrong, and capture and check a plan for them."""

        def try_again() -> None:
            self._capture(planned(kind))
            self._check(kind)

        with self.trials.or_left_out(kind):
            mend(kind, self.trials, self.judge, self.options, self.budget, try_again, step=self.step)

    def _planned(self, kind: Fuse, search: bool, measure_single: bool) -> list[Planned]:
        """Plan these kernels, and write the plans down; return those to capture, the most promising first."""
        trials, options, single = self.trials, self.options, variant_name(kind, "single")
        variant, costs = trials.variants[kind], trials.costs(kind)
        if search:
            plans = searched_plans(self.device, kind, variant, options, costs, trials.executables[single].schedule)
        else:
            policy = options.policy
            if policy == "auto":
                policy = "nimble" if self.device.kind != "cpu" or measure_single else "single"
            if policy == "single" and single in trials.executables:
                return []
            plans = [asked_plan(kind, variant, policy, costs, self.device.stream_cap(options.max_streams))]
        for plan in plans:
            trials.enter(plan)
        return [plan for plan in plans if not plan.note]

    def _capture_promising(self, plans: list[Planned], search: bool, *, optional: bool) -> None:
        """Capture plans as long as the budget lasts, but none of hopeless kernels."""
        trials = self.trials
        singles = {kind: variant_name(kind, "single") for kind in {plan.kind for plan in plans}}
        singles_ns = {
            kind: trials.candidates[single].simulated_ns for kind, single in singles.items() if trials.costs(kind)
        }
        for plan in best_kernels_first(plans, singles_ns, full=self.options.tune == "full"):
            name, one_stream = plan.schedule.policy, variant_name(plan.kind, "single")
            if plan.note:
                trials.amend(name, note=plan.note)
            elif search and len(trials.executables) > 1 and self.budget.spent(trials.candidates[one_stream].capture_s):
                trials.amend(name, note="not captured: the budget was spent")
            else:
                self._capture(plan, optional=optional and one_stream in trials.executables)

    def _capture(self, plan: Planned, *, optional: bool = False) -> None:
        """Capture a plan, or leave it out: most often there is too little memory."""
        trials, name, start = self.trials, plan.schedule.policy, time.perf_counter()
        if name not in trials.candidates:
            trials.enter(plan)
        with self.step(f"capture {name}"), trials.or_left_out(plan.kind, name, optional=optional):
            limit, costs = self.options.memory_limit, trials.costs(plan.kind)
            executable = capture(
                self.device, trials.variants[plan.kind], plan.schedule, memory_limit=limit, costs=costs
            )
            trials.add(plan, executable, time.perf_counter() - start)

    def _check(self, kind: str = "") -> None:
        """Judge those (of one kind of kernels) that were not judged yet; others than eager's that fail are left out."""
        trials = self.trials
        unchecked = trials.unchecked(kind)
        if not unchecked:
            return
        with self.step("check equality"):
            self.judge.cases()  # if that goes wrong, no candidate is to blame
            for name in unchecked:
                fused_by = trials.candidates[name].fuse
                with trials.or_left_out(fused_by, name):
                    check = self.judge.judged(name, trials.variants[fused_by], trials.executables[name])
                    trials.judged(name, check)

    def _time(self, executables: Mapping[str, Executable]) -> None:
        """Time replays in turn, until it is decided which is the fastest."""
        patience_s = min(_PATIENCE_S[self.options.tune], self.budget.to_choose_s)
        longest_s = _IMPATIENT * patience_s or math.inf
        self.timed += 1
        with self.step("choose"), state_kept(self.recorded):
            taken = interleave(
                {name: executable.replay for name, executable in executables.items()},
                clock_ns=self.device.clock_ns,
                synchronize=self.device.synchronize,
                budget_s=min(self.budget.to_choose_s, longest_s),
                patience_s=patience_s,
                open_names=lambda taken: undecided(taken, [name for name in taken if not self.trials.wrong(name)]),
                interruptions=self.device.interruptions,
                rehearse=self.device.kind != "cpu",
                first_round=self.timed * 100_000,  # more than one timing has: samples of two are never paired
                on_interrupt=_interrupt,
            )
        for name, measurement in taken.items():
            self.trials.amend(name, measurement=measurement)

    def _try_less_memory(self, best: str, kinds: Sequence[Fuse]) -> None:
        """Try the best plan with less memory, if it holds much more than eager.

        With as little as can be, and then with more as long as that is too slow to be chosen.
        """
        trials, candidate = self.trials, self.trials.candidates[best]
        kind, single_nbytes = candidate.fuse, self.trials.singles_nbytes().get(candidate.fuse, 0)
        if not single_nbytes or not self.price.heavy(candidate.nbytes, single_nbytes):
            return
        name = f"{best}, less memory"
        plan = Planned(kind, replace(trials.executables[best].schedule, policy=name))
        least = self.price.light(single_nbytes)
        for share in _LESS:
            limit, start = int(least + share * (candidate.nbytes - least)), time.perf_counter()
            try:
                with self.step(f"capture {name}"):
                    executable = capture(
                        self.device, trials.variants[kind], plan.schedule, memory_limit=limit, costs=trials.costs(kind)
                    )
            except Exception as error:
                if not isinstance(error, NimbleError) and (kind == "none" or self.options.strict):
                    raise
                if name not in trials.candidates:
                    trials.enter(replace(plan, note=f"left out: {reason_of(error)}"))
                continue
            trials.add(plan, executable, time.perf_counter() - start)
            self._check()
            if name not in trials.executables:
                break
            self._time({one: trials.executables[one] for one in (best, name)})
            if self._best(kinds, self.price) == name or self.budget.spent(time.perf_counter() - start):
                break

    # -- the choice --

    def _best(self, wanted: Sequence[Fuse], price: MemoryPrice | None) -> str:
        """Return the best right candidate of ``wanted`` kernels; what was asked for where nothing was measured."""
        trials = self.trials
        right = [name for name in trials.executables if not trials.wrong(name)]
        measured = {name: trials.candidates[name] for name in right if trials.candidates[name].measurement}
        measured = {name: one for name, one in measured.items() if _asked(self.options, one, wanted)} or measured
        if measured:
            singles_nbytes, on_cuda = trials.singles_nbytes(), self.device.kind == "cuda"
            choice = choose(measured, singles_nbytes, price, kept=self._kept, on_cuda=on_cuda)
            self.decided = choice.decided
            return choice.name
        return (trials.right(wanted) or right or [next(iter(trials.executables))])[-1]

    def _kept(self) -> str:
        """Return what was chosen last; empty if nothing was kept."""
        plan = kept_plan(self.device, self.recorded, self.options)
        return plan.policy if plan else ""

    def _chosen(self, wanted: Sequence[Fuse]) -> str:
        """Choose, mark the choice, and say if it, or one stream of eager's kernels, is wrong."""
        best = self._best(wanted, self.price)
        for name in ("single", best):
            if name in self.trials.executables and self.trials.wrong(name):
                reason = f"a one-stream replay is not what eager computes: {self.trials.candidates[name].note}"
                if self.options.strict:
                    raise CaptureError(reason, fix="report this model")
                self.wrong = reason
        self.trials.amend(best, chosen=True)
        return best


def _asked(options: Options, one: Candidate, kinds: Sequence[str]) -> bool:
    """Tell whether the options ask for this one, and not only for what it is compared with."""
    alone = one.name == variant_name(one.fuse, "single")
    return one.fuse in kinds and (not alone or options.policy in ("auto", "single"))


def _interrupt() -> None:
    raise KeyboardInterrupt
