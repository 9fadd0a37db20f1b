"""The measured choice: candidates are captured, checked and timed in turn; the simplest of the best wins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import torch

from nimble_core.autotune.capture_pipeline import capture, observe, schedule_by
from nimble_core.autotune.disk_cache import cache_directory, choice_key, recall, remember
from nimble_core.compiler.pipeline import follow, fuse
from nimble_core.ir.candidates import Candidate, EqualityCheck, simplicity
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import SAME, Measurement, interleave, not_slower, ratio, undecided
from nimble_core.ir.observation import Observation
from nimble_core.ir.program import Fuse
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.live_bytes import serial_peak
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import fingerprint, make_plan, schedule_of
from nimble_core.scheduling.simulator import simulate
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError, first_line
from nimble_core.utils.version import __version__
from nimble_core.validation.judge import Judge

__all__ = ["Tuned", "eager_peak", "tune"]

Step = Callable[[str], AbstractContextManager[Any]]

_POLICIES = ("contention", "nimble", "critical_path", "opara", "torchsched")
"""In the order of promise where simulation cannot tell: it knows neither launch priorities nor issue order."""
_CAPS = (2, 3, 4, 6, 8)
_TAKEN = ("single", "eager", "whole", "none", "library", "inductor")
"""Names in reports that a policy of the user's cannot have."""
_CAPTURED = {"cuda": 3}
"""Candidates beside one stream that ``tune="fast"`` captures: the first two policies above and the most promising of
the others; only the most promising one where not listed."""
_PATIENCE_S = {"fast": 2.0, "full": 10.0}
"""How long to go on measuring while it is open which candidate is best; at most a tenth of the budget."""
_HOPELESS = 1.25
"""Kernels whose best simulated plan takes this much longer than that of others are tried on one stream only."""
_HEAVY, _HEAVY_NBYTES = 1.22, 8 << 20
"""What holds this many times as much as eager does, parameters and their like included, and this much more, has to be
worth it."""
_RATE = 3.0
"""What a percent of eager's memory beyond that has to be worth, in percent of time, as far as ``worth``."""
_LESS = (0.0, 0.25, 0.5, 0.75)
"""Limits to try where much is held, until one is kept: shares of the way from what is not heavy to all that the fastest
holds."""
_NEGLIGIBLE = 0.02
"""What costs less than this share of the budget is done even when it is gone."""
_COMPILE_S = (2.0, 0.03)
"""What compiling is expected to take on eight cores: at least, and for each call."""


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
        return _known_costs(self.observed)

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

    Raises:
        CaptureError: a call that cannot be issued again; under ``strict`` also outputs that differ from eager's.
        ScheduleError, DeviceError, InputError: as ``capture`` and ``schedule_by``.
        Exception: what a policy raises; under ``strict`` also what else goes wrong with other kernels than eager's, but
            for CaptureError and DeviceError.
    """
    if eager_nbytes is None:  # what was timed is held against it, and nothing else
        eager_nbytes = eager_peak(device, recorded) if options.tune != "off" else 0
    run = _Tuning(device, recorded, options, step, Judge(device, recorded), eager_nbytes, beside_nbytes, worth)
    try:
        return run.tuned(measure_single)
    except BaseException:
        for executable in run.executables.values():
            executable.close()
        raise


def eager_peak(device: Device, recorded: Recorded) -> int:
    """Most bytes that the model's own calls hold at a time, one after the other, workspaces included; what was there
    before (inputs, parameters) apart.
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
    eager_nbytes: int
    beside_nbytes: int
    worth: float
    variants: dict[str, Recorded] = field(default_factory=dict)
    fuse_s: dict[str, float] = field(default_factory=dict)
    observed: dict[str, Observation] = field(default_factory=dict)
    executables: dict[str, Executable] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wrong: str = ""
    decided: bool = True
    timed: int = 0
    began: float = field(default_factory=time.perf_counter)

    def tuned(self, measure_single: bool) -> Tuned:
        kinds = self._kinds()
        # A report shows what else was tried: it is made anew.
        checks = None if measure_single or len(kinds) < 2 else self._recalled()
        recalled = checks is not None
        if checks is None:
            checks = self._tried(kinds, measure_single)
            self._say_what_is_wrong(kinds)
        if not self._right(kinds):
            kinds = ("none",)
            if "none" not in self._kinds():
                checks += self._tried(kinds, measure_single)
        best = self._choose(kinds)
        kind = self.candidates[best].fuse
        if len(kinds) > 1 and self.options.policy == "auto" and not recalled and self.decided:
            variant = self.variants[kind]
            remember(self._key(), make_plan(variant.recording.program, variant.graph, self.executables[best].schedule))
        self._close_losers(best)
        return Tuned(
            self.executables[best],
            self.variants[kind],
            self.executables,
            tuple(self.candidates.values()),
            checks,
            self.observed.get(kind),
            (*self.notes, *self.judge.notes),
            self.wrong,
        )

    def _key(self) -> str:
        """What the choice depends on, for those who choose again."""
        options, cudnn = self.options, torch.backends.cudnn
        names = ("policy", "tune", "budget_s", "max_streams", "memory_limit")
        conditions = {name: getattr(options, name) for name in names}
        conditions |= {
            "device": self.device.name,
            "torch": str(torch.__version__),
            "nimble": __version__,
            "matmul": torch.get_float32_matmul_precision(),
            "copied out": self.recorded.copied_out,
            "copied in": self.recorded.copied_in,
            "convolution": (getattr(cudnn, "conv").fp32_precision, cudnn.deterministic),  # noqa: B009  # torch's stub lacks it
        }
        return choice_key(fingerprint(self.recorded.recording.program, self.recorded.graph), conditions)

    def _recalled(self) -> tuple[EqualityCheck, ...] | None:
        """Make again what an earlier process chose; None if none did, or it does not fit or is not right any more."""
        plan = recall(self._key()) if self.options.policy == "auto" else None
        if plan is None:
            return None
        kind, name = plan.fuse, plan.policy
        try:
            start = time.perf_counter()
            thorough = self.options.tune == "full"
            variant = follow(self.device, self.recorded, plan, thorough=thorough, step=self.step)
            self.variants[kind], self.fuse_s[kind] = variant, time.perf_counter() - start
            schedule = schedule_of(plan, variant.recording.program, variant.graph)
            with self.step(f"capture {name}"):
                self._capture(name, kind, schedule, None)
            with self.step("check equality"):
                checks = self._check()
        except Exception as error:  # whatever it is: what is tried now says so again if it concerns that, too
            self.notes.append(f"what an earlier process chose could not be made again: {_reason(error)}")
        else:
            if name in self.executables and not self._wrong(name):
                self.notes.append(
                    f"{name} was chosen by an earlier process; tune again by emptying {cache_directory()}"
                )
                return checks
        for executable in self.executables.values():
            executable.close()
        self.executables.clear()
        self.candidates.clear()
        return None

    def _kinds(self) -> tuple[Fuse, ...]:
        """Whose kernels to try, in the order of what they cost to make."""
        options = self.options
        if options.fuse != "auto":
            return (options.fuse,)
        # On the host eager's kernels are the libraries' already, and a compiler takes longer than it saves.
        return ("none", "library", "inductor") if self.device.kind == "cuda" and options.tune != "off" else ("none",)

    def _tried(self, kinds: Sequence[Fuse], measure_single: bool) -> tuple[EqualityCheck, ...]:
        """Capture, check and time what these kernels offer."""
        options, auto = self.options, self.options.policy == "auto"
        measured = options.tune != "off" and (options.policy != "single" or len(kinds) > 1)
        search = auto and measured
        planned: dict[str, tuple[str, Schedule]] = {}
        checks: tuple[EqualityCheck, ...] = ()
        baseline: tuple[Fuse, ...] = (
            ("none",) if measure_single and "none" not in kinds and "none" not in self.variants else ()
        )
        for kind in (*baseline, *kinds):
            with self._or_left_out(kind, kind):
                if not self._made(kind):
                    continue
                single = _named(kind, "single")
                if measured or measure_single:
                    if single not in self.executables:
                        with self.step(f"capture {single}"):
                            self._capture(single, kind, schedule_by(self.variants[kind], "single", None, 1), None)
                    if search and kind != "none" and single in self.executables:
                        # Kernels that are wrong must not displace plans of others.
                        with self.step("check equality"):
                            checks += self._check(kind)
                    if single not in self.executables or (kind != "none" and self._wrong(single)):
                        continue
                    # Replays of a training step train: what is judged later starts from where this one did.
                    with self.step("measure calls"), state_kept(self.recorded):
                        self.observed[kind] = observe(self.device, self.variants[kind], self.executables[single])
                if kind in baseline:
                    continue
                with self.step("schedule"):
                    found = self._planned(kind, search, measure_single)
                    planned |= {name: (kind, plan) for name, plan in found.items()}
        for name, (fused, schedule) in self._promising(planned).items():
            single = _named(fused, "single")
            if len(self.executables) > 1 and search and self._spent(0.8, self.candidates[single].capture_s):
                self.candidates[name] = replace(self.candidates[name], note="not captured: the budget was spent")
                continue
            with self.step(f"capture {name}"):
                optional = single in self.executables and (auto or measure_single)
                self._capture(name, fused, schedule, _known_costs(self.observed.get(fused)), optional=optional)
        several = len(self.executables) > 1
        if (search and several) or any(kind != "none" for kind in kinds):
            with self.step("check equality"):
                checks += self._check()
        if measured and several and (auto or len(kinds) > 1):
            with self.step("choose"), state_kept(self.recorded):
                self._time(self.executables)
            if search and options.memory_limit is None:
                checks += self._with_less_memory(self._best(kinds, worth=1.0), kinds)
        return checks

    def _with_less_memory(self, best: str, kinds: Sequence[Fuse]) -> tuple[EqualityCheck, ...]:
        """Memory has to be worth it: where the best takes much more than eager, the same with less of it.

        With as little as can be, and then with more as long as that is too slow to be chosen.
        """
        kind = self.candidates[best].fuse
        if not self._heavy(best):
            return ()
        least, most = self._light(best), self.candidates[best].nbytes
        name = f"{best}, less memory"
        plan = replace(self.executables[best].schedule, policy=name)
        costs = _known_costs(self.observed.get(kind))
        checks: tuple[EqualityCheck, ...] = ()
        for share in _LESS:
            limit, start = int(least + share * (most - least)), time.perf_counter()
            try:
                with self.step(f"capture {name}"):
                    executable = capture(self.device, self.variants[kind], plan, memory_limit=limit, costs=costs)
            except Exception as error:
                if not isinstance(error, NimbleError) and (kind == "none" or self.options.strict):
                    raise
                if name not in self.candidates:
                    self._note(name, kind, plan)
                    self.candidates[name] = replace(self.candidates[name], note=f"left out: {_reason(error)}")
                continue
            with_less = self.executables.pop(name, None)
            if with_less is not None:
                with_less.close()
            self._add(name, kind, executable, start)
            with self.step("check equality"):
                checks = self._check()
            if name not in self.executables:
                break
            with self.step("choose"), state_kept(self.recorded):
                self._time({one: self.executables[one] for one in (best, name)})
            if self._best(kinds) == name or self._spent(0.8, time.perf_counter() - start):
                break
        return checks

    def _heavy(self, name: str) -> bool:
        """Whether it holds much more than eager, and than one stream of the same kernels."""
        return self.candidates[name].nbytes > self._light(name) + _HEAVY_NBYTES

    def _light(self, name: str) -> int:
        """Bytes that this plan may hold without being much; all that it does if there is nothing to compare it with."""
        single = self._single(name)
        if not single:
            return self.candidates[name].nbytes
        light = int(_HEAVY * self._eager_total(single)) - self._owned()
        return max(light - self.beside_nbytes, single)

    def _single(self, name: str) -> int:
        """Bytes that one stream of the same kernels holds; 0 if that is not known."""
        single = self.candidates.get(_named(self.candidates[name].fuse, "single"))
        return single.nbytes if single is not None else 0

    def _owned(self) -> int:
        storages = self.recorded.recording.program.storages
        return sum(storage.nbytes for storage in storages if storage.role in ("parameter", "buffer"))

    def _eager_total(self, single: int) -> int:
        """All that eager holds, parameters and their like included; what one stream holds counts as eager's, too."""
        return max(self.eager_nbytes, single) + self._owned()

    def _price(self, name: str, than: str, worth: float) -> float:
        """How many times as fast as ``than`` a plan has to be for what it holds more, beyond what is not much.

        ``worth``, less if that is little, and at least what is more than a tie.
        """
        lighter = max(self.candidates[than].nbytes, self._light(name))
        excess = (self.candidates[name].nbytes - lighter) / self._eager_total(self._single(name))
        return max(SAME, min(worth, 1 + _RATE * excess))

    def _made(self, kind: Fuse) -> bool:
        """Whether there are kernels of this kind: made now, if they can be and the budget allows."""
        if kind == "none":
            self.variants[kind] = self.recorded
            return True
        start = time.perf_counter()
        expected_s = _compile_s(self.recorded) if kind == "inductor" else 0.0
        left_s = self.options.budget_s - (start - self.began)
        if self.options.fuse == "auto" and expected_s > left_s:
            self._leave_out(
                kind,
                kind,
                f"not {'compiled' if kind == 'inductor' else 'rewritten'}: about {expected_s:.0f} s expected, "
                f"{max(left_s, 0):.0f} s left of budget_s={self.options.budget_s:g}",
            )
            return False
        try:
            self.variants[kind] = fuse(
                self.device,
                self.recorded,
                kind,
                measure=self.options.tune != "off",
                thorough=self.options.tune == "full",
                step=self.step,
            )
        finally:
            self.fuse_s[kind] = time.perf_counter() - start
        return True

    @contextmanager
    def _or_left_out(self, name: str, kind: str, *, optional: bool = False) -> Iterator[None]:
        """What goes wrong inside leaves out a candidate, or all of one kind of kernels, with the reason.

        Not so with eager's own, for which nothing else could run, unless this one is ``optional`` and there is too
        little memory for it; and under ``strict`` only what kernels may meet is no error.
        """
        try:
            yield
        except Exception as error:
            if kind == "none":
                expected = optional and isinstance(error, DeviceError)
            else:
                expected = not self.options.strict or isinstance(error, (CaptureError, DeviceError))
            if not expected:
                raise
            self._leave_out(name, kind, f"left out: {_reason(error)}")

    def _leave_out(self, name: str, kind: str, note: str) -> None:
        """Close ``name``, or what runs such kernels if it is the name of a kind, and say why."""
        tried = [one for one, made in self.candidates.items() if name in (one, made.fuse)]
        for one in tried:
            if one in self.executables:
                self.executables.pop(one).close()
            self.candidates[one] = replace(self.candidates[one], note=note)
        if not tried:
            self.candidates[name] = Candidate(name, 0, 0, fuse=kind, fuse_s=self.fuse_s.get(kind, 0.0), note=note)
        self.notes.append(f"{name}: {note}")

    def _planned(self, kind: str, search: bool, measure_single: bool) -> dict[str, Schedule]:
        """Schedules to capture, the most promising first."""
        options, device, recorded = self.options, self.device, self.variants[kind]
        costs = _known_costs(self.observed.get(kind))
        cap = device.stream_cap(options.max_streams)
        single = _named(kind, "single")
        if not search:
            policy = options.policy
            if policy == "auto":
                policy = "nimble" if device.kind != "cpu" or measure_single else "single"
            if policy == "single" and single in self.executables:
                return {}
            schedule = schedule_by(recorded, policy, costs, cap)
            if schedule.policy in _TAKEN and schedule.policy != policy:
                schedule = replace(schedule, policy=f"{schedule.policy} of your own")
            name = _named(kind, schedule.policy)
            self._note(name, kind, schedule)
            return {name: replace(schedule, policy=name)}
        wanted: list[tuple[str, int | None]] = [(policy, cap) for policy in _POLICIES]
        if options.tune == "full":
            wanted += [(policy, fewer) for policy in _POLICIES for fewer in _CAPS if cap is None or fewer < cap]
        seen = {_essence(self.executables[single].schedule)}
        found: dict[str, Schedule] = {}
        for policy, fewer in wanted:
            schedule = schedule_by(recorded, policy, costs, fewer)
            name = _named(kind, policy if fewer == cap else f"{policy}, {fewer} streams")
            if _essence(schedule) not in seen:
                seen.add(_essence(schedule))
                found[name] = replace(schedule, policy=name)
        simulated = {name: self._simulated(recorded, schedule, costs) for name, schedule in found.items()}
        kept = len(found) if options.tune == "full" else _CAPTURED.get(device.kind, 1)
        certain = [_named(kind, policy) for policy in _POLICIES[: kept - 1]]
        ranked = sorted(found, key=lambda name: (name not in certain, simulated[name]))
        for name in ranked:
            self._note(name, kind, found[name], simulated[name])
        for name in ranked[kept:]:
            self.candidates[name] = replace(self.candidates[name], note="not captured: simulated slower")
        return {name: found[name] for name in ranked[:kept]}

    def _promising(self, planned: dict[str, tuple[str, Schedule]]) -> dict[str, tuple[str, Schedule]]:
        """Plans of kernels that may win; the best first."""
        best: dict[str, float] = {}
        for kind in {kind for kind, _ in planned.values()}:
            times = [self.candidates[name].simulated_ns for name, (one, _) in planned.items() if one == kind]
            costs = _known_costs(self.observed.get(kind))
            if costs is not None:
                single = self.executables[_named(kind, "single")].schedule
                times.append(self._simulated(self.variants[kind], single, costs))
            best[kind] = min(times)
        limit = _HOPELESS * min(best.values(), default=0.0)
        kept = {}
        for name in sorted(planned, key=lambda name: best[planned[name][0]]):
            if best[planned[name][0]] <= limit or self.options.tune == "full":
                kept[name] = planned[name]
            else:
                self.candidates[name] = replace(self.candidates[name], note="not captured: other kernels are faster")
        return kept

    def _simulated(self, recorded: Recorded, schedule: Schedule, costs: Costs | None) -> float:
        if costs is None:
            return 0.0
        return simulate(recorded.graph, schedule, costs, self.device.model).length_ns

    def _note(self, name: str, kind: str, schedule: Schedule, simulated_ns: float = 0.0) -> None:
        self.candidates[name] = Candidate(
            name, schedule.streams, len(schedule.syncs), simulated_ns, fuse=kind, fuse_s=self.fuse_s.get(kind, 0.0)
        )

    def _capture(
        self, name: str, kind: str, schedule: Schedule, costs: Costs | None, *, optional: bool = False
    ) -> None:
        start = time.perf_counter()
        schedule = replace(schedule, policy=name)
        if name not in self.candidates:
            self._note(name, kind, schedule)
        with self._or_left_out(name, kind, optional=optional):  # out of memory, most often
            executable = capture(
                self.device, self.variants[kind], schedule, memory_limit=self.options.memory_limit, costs=costs
            )
            self._add(name, kind, executable, start)

    def _add(self, name: str, kind: str, executable: Executable, start: float) -> None:
        self.executables[name] = executable
        simulated = self.candidates[name].simulated_ns if name in self.candidates else 0.0
        self._note(name, kind, executable.schedule, simulated)
        self.candidates[name] = replace(
            self.candidates[name], nbytes=executable.nbytes, capture_s=time.perf_counter() - start
        )

    def _spent(self, share: float, more_s: float) -> bool:
        """Whether a share of the budget is gone, and ``more_s`` counts beside it."""
        budget_s = self.options.budget_s
        return time.perf_counter() - self.began > share * budget_s and more_s > _NEGLIGIBLE * budget_s

    def _check(self, kind: str = "") -> tuple[EqualityCheck, ...]:
        """Judge those (of one kind of kernels) that were not judged yet; others than eager's that fail are left out."""
        candidates = {name: self.candidates[name] for name in self.executables}
        unchecked = [name for name, one in candidates.items() if one.check is None and kind in ("", one.fuse)]
        fused = any(self.candidates[name].fuse != "none" for name in unchecked)
        if not unchecked:
            return ()
        self.judge.expect(fused=fused)
        checks = []
        for name in unchecked:
            fused_by = self.candidates[name].fuse
            with self._or_left_out(name, fused_by):
                check = self.judge.judged(name, self.variants[fused_by], self.executables[name])
                checks.append(check)
                self.candidates[name] = replace(self.candidates[name], check=check, note=check.reason)
        return tuple(checks)

    def _time(self, executables: Mapping[str, Executable]) -> None:
        budget_s = self.options.budget_s
        self.timed += 1
        taken = interleave(
            {name: executable.replay for name, executable in executables.items()},
            clock_ns=self.device.clock_ns,
            synchronize=self.device.synchronize,
            budget_s=max(budget_s - (time.perf_counter() - self.began), 0.1 * budget_s),
            patience_s=min(_PATIENCE_S[self.options.tune], 0.1 * budget_s),
            open_names=lambda taken: undecided(taken, [name for name in taken if not self._wrong(name)]),
            interruptions=self.device.interruptions,
            rehearse=True,
            first_round=self.timed * 100_000,  # more than one timing has: samples of two are never paired
            on_interrupt=_interrupt,
        )
        for name, measurement in taken.items():
            self.candidates[name] = replace(self.candidates[name], measurement=measurement)

    def _best(self, wanted: Sequence[Fuse], worth: float | None = None) -> str:
        """The fastest candidate of ``wanted`` kernels that is right; what was asked for where nothing was measured.

        One that holds much memory has to be ``worth`` times as fast as what holds less (None: as many as this tuning
        wants), or less (``_price``).
        """
        worth = self.worth if worth is None else worth
        taken: dict[str, Measurement] = {}
        for name in self.executables:
            measurement = self.candidates[name].measurement
            if measurement is not None and not self._wrong(name):
                taken[name] = measurement
        taken = {name: one for name, one in taken.items() if self._asked(name, wanted)} or taken
        if taken:
            return self._worth_it(taken, worth)
        right = [name for name in self.executables if not self._wrong(name)]
        asked_right = [name for name in right if self.candidates[name].fuse in wanted]
        return (asked_right or right or [next(iter(self.executables))])[-1]

    def _worth_it(self, taken: Mapping[str, Measurement], worth: float) -> str:
        """The simplest of the best of those that do not hold much, or what is worth holding more, from the lightest on.

        Args:
            taken: measurements by name.
            worth: as of ``_best``.
        """
        found = self.candidates
        heavy = [name for name in taken if worth > 1 and self._heavy(name)]
        heavy.sort(key=lambda name: (found[name].nbytes, found[name].streams, taken[name].median_ns))
        light = {name: taken[name] for name in taken if name not in heavy} or {name: taken[name] for name in heavy[:1]}
        close = not_slower(light)
        beside = [ratio(light[close[0]], light[name]).decided for name in light if name != close[0]]
        self.decided = all(beside)
        some = any(beside) or not beside
        best = min(close, key=lambda name: simplicity(found[name])) if some else self._usual(light)
        for name in heavy:
            if ratio(taken[name], taken[best]).low > self._price(name, best, worth):
                best = name
        return best

    def _usual(self, names: Collection[str]) -> str:
        """What to run where nothing is decided: what was kept last, else on CUDA the simplest compiled kernels."""
        kept = recall(self._key()) if self.options.policy == "auto" else None
        if kept is not None and kept.policy in names:
            return kept.policy
        compiled = ("inductor", "library") if self.device.kind == "cuda" else ()
        ranked = sorted(names, key=lambda name: simplicity(self.candidates[name]))
        of_kind = (name for kind in compiled for name in ranked if self.candidates[name].fuse == kind)
        return next(of_kind, ranked[0])

    def _choose(self, wanted: Sequence[Fuse]) -> str:
        """Mark the best."""
        if self._wrong("single"):
            self._object(self.candidates["single"].note)
        best = self._best(wanted)
        if self._wrong(best):
            self._object(self.candidates[best].note)
        self.candidates[best] = replace(self.candidates[best], chosen=True)
        return best

    def _asked(self, name: str, kinds: Sequence[str]) -> bool:
        """Whether the options ask for this one, and not only for what it is compared with."""
        alone = name == _named(self.candidates[name].fuse, "single")
        return self.candidates[name].fuse in kinds and (not alone or self.options.policy in ("auto", "single"))

    def _right(self, kinds: Sequence[Fuse]) -> bool:
        """Whether something that runs such kernels may be chosen."""
        return any(self.candidates[name].fuse in kinds and not self._wrong(name) for name in self.executables)

    def _say_what_is_wrong(self, kinds: Sequence[Fuse]) -> None:
        for kind in kinds:
            reasons = [self.candidates[name].note for name in self.executables if self.candidates[name].fuse == kind]
            if kind != "none" and reasons and not self._right((kind,)):
                self.notes.append(f"{kind}: left out: {reasons[0]}")

    def _wrong(self, name: str) -> bool:
        check = self.candidates[name].check if name in self.candidates else None
        # Other kernels have to be shown right; eager's own may run where nothing can be shown.
        return check is not None and (check.differs or (self.candidates[name].fuse != "none" and not check.passed))

    def _object(self, reason: str) -> None:
        if self.options.strict:
            raise CaptureError(f"a one-stream replay is not what eager computes: {reason}", fix="report this model")
        self.wrong = f"a one-stream replay is not what eager computes: {reason}"

    def _close_losers(self, best: str) -> None:
        """Keep eager's kernels on one stream; of the best kernels one stream, the best, and the fastest of several."""
        kind = self.candidates[best].fuse
        single = _named(kind, "single")
        several = [name for name in self.executables if self.candidates[name].fuse == kind and name != single]
        times = {name: one.median_ns if (one := self.candidates[name].measurement) else 0.0 for name in several}
        kept = {"single", single, best, min(several, key=lambda name: times[name], default=best)}
        for name in list(self.executables):
            if name not in kept:
                self.executables.pop(name).close()


def _reason(error: Exception) -> str:
    """What an error says, and where; of one that nobody raised on purpose also its type."""
    if isinstance(error, NimbleError):
        return error.what + (f" ({error.where})" if error.where else "")
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def _named(kind: str, policy: str) -> str:
    return policy if kind == "none" else f"{kind}, {policy}"


def _compile_s(recorded: Recorded) -> float:
    """What compiling is expected to take on this machine."""
    least, each = _COMPILE_S
    return least + each * len(recorded.recording.program.calls) * max(8 / (os.cpu_count() or 1), 1.0)


def _known_costs(observed: Observation | None) -> Costs | None:
    return observed.costs if observed and any(observed.costs.ns) else None


def _essence(schedule: Schedule) -> tuple[object, ...]:
    """What two schedules have to share to be the same plan; priority counts where calls differ in it."""
    priority = schedule.priority if len(set(schedule.priority)) > 1 else ()
    return schedule.stream, schedule.order, schedule.syncs, priority


def _interrupt() -> None:
    raise KeyboardInterrupt
