"""The measured choice: candidates are captured, checked against eager and timed in turn; the fastest right one wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nimble_core.candidates import Candidate, EqualityCheck
from nimble_core.costs import Costs
from nimble_core.devices.base import Device, Executable, Observation
from nimble_core.equality import check_equality
from nimble_core.errors import CaptureError, DeviceError
from nimble_core.measurement import TIE, Measurement, interleave
from nimble_core.options import Options
from nimble_core.pipeline import Recorded, capture, observe, schedule_by, state_kept
from nimble_core.preserve import preserved
from nimble_core.schedule import Schedule
from nimble_core.simulate import simulate
from nimble_core.static import other_values
from nimble_core.structure import builder, flatten

__all__ = ["Cases", "Tuned", "eager_cases", "from_same_state", "tune"]

Step = Callable[[str], AbstractContextManager[Any]]
Cases = Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""Fresh inputs, and what eager makes of them."""

_POLICIES = ("contention", "nimble", "critical_path", "opara", "torchsched")
"""In the order of promise where simulation cannot tell: it knows neither launch priorities nor issue order."""
_CAPS = (2, 3, 4, 6, 8)
_TAKEN = ("single", "eager", "whole")
"""Names in reports that a policy of the user's cannot have."""
_CAPTURED = {"cuda": 3}
"""Candidates beside one stream that ``tune="fast"`` captures: the first two policies above and the most promising of
the others; only the most promising one where not listed."""
_ROUNDS = {"fast": 15, "full": 101}


@dataclass(slots=True)
class Tuned:
    """What tuning found. The executables are open: the caller closes them.

    Args:
        best: what the engine should run.
        executables: those still open by name: ``single`` if it was captured, the fastest of several streams, ``best``.
        candidates: what was tried.
        checks: each captured candidate's outputs against eager's.
        observed: the one-stream replay, watched; None if nothing was measured.
        notes: what the user should know.
        wrong: how even one stream's outputs differ from eager's; empty if they do not.
    """

    best: Executable
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


def tune(device: Device, recorded: Recorded, options: Options, *, step: Step, measure_single: bool = False) -> Tuned:
    """Find the plan to run.

    With ``tune="off"`` nothing is measured: ``policy="auto"`` then means ``nimble`` on CUDA and ``single`` elsewhere.
    Else one stream is captured and watched first: what each call costs decides the rest. ``policy="auto"`` plans by
    every policy, simulates the plans, captures the most promising ones as long as the budget lasts (``"full"``: all,
    with several caps on streams), compares their outputs with eager's, and times them in turn with one stream. The
    fastest whose outputs are right wins; ties within 1% go to fewer streams. A policy given by name is not compared
    with others.

    Args:
        device: where.
        recorded: the model. What replays write of it is the caller's to keep (``state_kept``).
        options: policy, tune, budget_s, max_streams, memory_limit, strict.
        step: times the steps.
        measure_single: capture and watch one stream whatever the options say.

    Raises:
        CaptureError: a call that cannot be issued again; under ``strict`` also outputs that differ from eager's.
        ScheduleError, DeviceError, InputError: as ``capture`` and ``schedule_by``.
    """
    run = _Tuning(device, recorded, options, step)
    try:
        return run.tuned(measure_single)
    except BaseException:
        for executable in run.executables.values():
            executable.close()
        raise


def eager_cases(recorded: Recorded) -> Cases:
    """Two fresh sets of inputs and eager's outputs; the model and random state are left as they were."""
    build = builder(recorded.signature.structure)
    cases = []
    for seed in (1, 2):
        inputs = other_values(recorded.signature.tensors, seed)
        # Clones: a model that writes its inputs must not spoil the case for the replays.
        args, kwargs = build([tensor.clone() for tensor in inputs])
        with preserved(recorded.model), state_kept(recorded), torch.no_grad():
            outputs, _ = flatten(recorded.model(*args, **kwargs), what="output")
            cases.append((inputs, [output.detach().clone() for output in outputs]))
    return cases


def from_same_state(
    recorded: Recorded, executable: Executable
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Runs of ``executable`` that start from the buffers and random numbers that eager started from."""

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with state_kept(recorded):
            return executable.run(inputs)

    return run


@dataclass(slots=True)
class _Tuning:
    device: Device
    recorded: Recorded
    options: Options
    step: Step
    executables: dict[str, Executable] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wrong: str = ""
    began: float = field(default_factory=time.perf_counter)

    def tuned(self, measure_single: bool) -> Tuned:
        options, auto = self.options, self.options.policy == "auto"
        measured = options.tune != "off" and options.policy != "single"
        observed = None
        if measured or measure_single:
            with self.step("capture single"):
                self._capture("single", schedule_by(self.recorded, "single", None, 1), None)
            with self.step("measure calls"):
                observed = observe(self.device, self.recorded, self.executables["single"])
        costs = _known_costs(observed)
        with self.step("schedule"):
            planned = self._planned(auto and measured, costs)
        for name, schedule in planned.items():
            if len(self.executables) > 1 and auto and measured and self._spent(0.5):
                self.candidates[name] = replace(self.candidates[name], note="not captured: the budget was spent")
                continue
            with self.step(f"capture {name}"):
                self._capture(name, schedule, costs, optional="single" in self.executables and (auto or measure_single))
        checks: tuple[EqualityCheck, ...] = ()
        if auto and measured and len(self.executables) > 1:
            with self.step("check equality"):
                checks = self._check()
            with self.step("choose"):
                self._time()
        best = self._choose()
        self._close_losers(best)
        return Tuned(
            self.executables[best],
            self.executables,
            tuple(self.candidates.values()),
            checks,
            observed,
            tuple(self.notes),
            self.wrong,
        )

    def _planned(self, search: bool, costs: Costs | None) -> dict[str, Schedule]:
        """Schedules to capture, the most promising first."""
        options, device = self.options, self.device
        cap = device.stream_cap(options.max_streams)
        if not search:
            policy = options.policy
            if policy == "auto":
                policy = "nimble" if device.kind != "cpu" or "single" in self.executables else "single"
            schedule = schedule_by(self.recorded, policy, costs, cap)
            if policy in self.executables:
                return {}
            if schedule.policy in _TAKEN and schedule.policy != policy:
                schedule = replace(schedule, policy=f"{schedule.policy} of your own")
            self._note(schedule.policy, schedule)
            return {schedule.policy: schedule}
        wanted: list[tuple[str, int | None]] = [(policy, cap) for policy in _POLICIES]
        if options.tune == "full":
            wanted += [(policy, fewer) for policy in _POLICIES for fewer in _CAPS if cap is None or fewer < cap]
        single = self.executables["single"].schedule
        seen = {_essence(single)}
        found: dict[str, Schedule] = {}
        for policy, fewer in wanted:
            schedule = schedule_by(self.recorded, policy, costs, fewer)
            name = policy if fewer == cap else f"{policy}, {fewer} streams"
            if _essence(schedule) not in seen:
                seen.add(_essence(schedule))
                found[name] = replace(schedule, policy=name)
        simulated = {name: self._simulated(schedule, costs) for name, schedule in found.items()}
        kept = len(found) if options.tune == "full" else _CAPTURED.get(device.kind, 1)
        certain = _POLICIES[: kept - 1]
        ranked = sorted(found, key=lambda name: (name not in certain, simulated[name]))
        for name in ranked:
            self._note(name, found[name], simulated[name])
        for name in ranked[kept:]:
            self.candidates[name] = replace(self.candidates[name], note="not captured: simulated slower")
        return {name: found[name] for name in ranked[:kept]}

    def _simulated(self, schedule: Schedule, costs: Costs | None) -> float:
        if costs is None:
            return 0.0
        return simulate(self.recorded.graph, schedule, costs, self.device.model).length_ns

    def _note(self, name: str, schedule: Schedule, simulated_ns: float = 0.0) -> None:
        self.candidates[name] = Candidate(name, schedule.streams, len(schedule.syncs), simulated_ns)

    def _capture(self, name: str, schedule: Schedule, costs: Costs | None, *, optional: bool = False) -> None:
        start = time.perf_counter()
        try:
            executable = capture(
                self.device, self.recorded, schedule, memory_limit=self.options.memory_limit, costs=costs
            )
        except DeviceError as error:  # out of memory, most often: what is known without it is still of use
            if not optional:
                raise
            self.notes.append(f"{name} was left out: {error.what}")
            self.candidates[name] = replace(self.candidates[name], note=f"left out: {error.what}")
            return
        self.executables[name] = executable
        self._note(name, executable.schedule, self.candidates[name].simulated_ns if name in self.candidates else 0.0)
        self.candidates[name] = replace(
            self.candidates[name], nbytes=executable.nbytes, capture_s=time.perf_counter() - start
        )

    def _spent(self, share: float) -> bool:
        return time.perf_counter() - self.began > share * self.options.budget_s

    def _check(self) -> tuple[EqualityCheck, ...]:
        cases = eager_cases(self.recorded)
        checks = []
        for name, executable in self.executables.items():
            check = check_equality(name, from_same_state(self.recorded, executable), cases)
            checks.append(check)
            self.candidates[name] = replace(self.candidates[name], check=check, note=check.reason)
        return tuple(checks)

    def _time(self) -> None:
        taken = interleave(
            {name: executable.replay for name, executable in self.executables.items()},
            clock_ns=self.device.clock_ns,
            synchronize=self.device.synchronize,
            rounds=_ROUNDS[self.options.tune],
            budget_s=max(self.options.budget_s - (time.perf_counter() - self.began), 0.1 * self.options.budget_s),
            rehearse=True,
            on_interrupt=_interrupt,
        )
        for name, measurement in taken.items():
            self.candidates[name] = replace(self.candidates[name], measurement=measurement)

    def _choose(self) -> str:
        """The fastest candidate that is right; what was asked for where nothing was measured."""
        if self._wrong("single"):
            self._object(self.candidates["single"].note)
        taken: dict[str, Measurement] = {}
        for name in self.executables:
            measurement = self.candidates[name].measurement
            if measurement is not None and not self._wrong(name):
                taken[name] = measurement
        if taken:
            fastest = min(one.median_ns for one in taken.values())
            close = [name for name, one in taken.items() if one.median_ns <= fastest * TIE]
            best = min(close, key=lambda name: (self.candidates[name].streams, taken[name].median_ns))
        else:
            best = "single" if self._wrong("single") else list(self.executables)[-1]
        self.candidates[best] = replace(self.candidates[best], chosen=True)
        return best

    def _wrong(self, name: str) -> bool:
        check = self.candidates[name].check if name in self.candidates else None
        return check is not None and check.differs

    def _object(self, reason: str) -> None:
        if self.options.strict:
            raise CaptureError(f"a one-stream replay is not what eager computes: {reason}", fix="report this model")
        self.wrong = f"a one-stream replay is not what eager computes: {reason}"

    def _close_losers(self, best: str) -> None:
        """Keep one stream, the best, and the fastest of several streams."""
        several = [name for name in self.executables if name != "single"]
        times = {name: one.median_ns if (one := self.candidates[name].measurement) else 0.0 for name in several}
        kept = {"single", best, min(several, key=lambda name: times[name], default=best)}
        for name in several:
            if name not in kept:
                self.executables.pop(name).close()


def _known_costs(observed: Observation | None) -> Costs | None:
    return observed.costs if observed and any(observed.costs.ns) else None


def _essence(schedule: Schedule) -> tuple[object, ...]:
    """What two schedules have to share to be the same plan; priority counts where calls differ in it."""
    priority = schedule.priority if len(set(schedule.priority)) > 1 else ()
    return schedule.stream, schedule.order, schedule.syncs, priority


def _interrupt() -> None:
    raise KeyboardInterrupt
