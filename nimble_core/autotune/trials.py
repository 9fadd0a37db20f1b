"""The candidates of one tuning: their kernels, what runs them, and what was found of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nimble_core.autotune.plans import Planned, variant_name
from nimble_core.ir.candidates import Candidate, EqualityCheck
from nimble_core.ir.costs import Costs
from nimble_core.ir.timeline import Observation
from nimble_core.runtime.device import Executable
from nimble_core.tracing.recorded import Recorded
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError, first_line

__all__ = ["Trials", "known_costs", "reason_of"]


@dataclass(slots=True)
class Trials:
    """Candidates by name, and their kernels by kind (``Program.fuse``).

    Args:
        strict: whether what goes wrong with other kernels than eager's is an error.
        variants: what runs each kind of kernels.
        fuse_s: what each kind cost to make.
        observed: one stream of each kind, watched.
        executables: those that are open.
        candidates: what was tried.
        checks: the last check of each.
        notes: what the user should know.
    """

    strict: bool
    variants: dict[str, Recorded] = field(default_factory=dict)
    fuse_s: dict[str, float] = field(default_factory=dict)
    observed: dict[str, Observation] = field(default_factory=dict)
    executables: dict[str, Executable] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    checks: dict[str, EqualityCheck] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def costs(self, kind: str) -> Costs | None:
        """Return the isolated time of each call of these kernels, None if unknown."""
        return known_costs(self.observed.get(kind))

    def singles_nbytes(self) -> dict[str, int]:
        """Return the bytes that one stream of each kind of kernels holds."""
        singles = ((kind, self.candidates.get(variant_name(kind, "single"))) for kind in self.variants)
        return {kind: one.nbytes for kind, one in singles if one is not None and one.nbytes}

    def amend(self, name: str, **changes: Any) -> None:
        """Change what is known of a candidate."""
        self.candidates[name] = replace(self.candidates[name], **changes)

    def enter(self, plan: Planned) -> None:
        """Write down a plan as a candidate."""
        schedule, kind = plan.schedule, plan.kind
        self.candidates[schedule.policy] = Candidate(
            schedule.policy,
            schedule.streams,
            len(schedule.syncs),
            plan.simulated_ns,
            fuse=kind,
            fuse_s=self.fuse_s.get(kind, 0.0),
            note=plan.note,
        )

    def add(self, plan: Planned, executable: Executable, capture_s: float) -> None:
        """Take what runs a plan, in place of what ran it before."""
        name = plan.schedule.policy
        if name in self.executables:
            self.executables.pop(name).close()
        self.executables[name] = executable
        self.enter(replace(plan, schedule=replace(executable.schedule, policy=name)))
        self.amend(name, nbytes=executable.nbytes, capture_s=capture_s)

    def unchecked(self, kind: str = "") -> list[str]:
        """Return candidates that run and were not checked, of one kind of kernels or of all."""
        found = ((name, self.candidates[name]) for name in self.executables)
        return [name for name, one in found if one.check is None and kind in ("", one.fuse)]

    def judged(self, name: str, check: EqualityCheck) -> None:
        """Write down the check of a candidate."""
        self.checks[name] = check
        self.amend(name, check=check, note=check.reason)

    def wrong(self, name: str) -> bool:
        """Tell whether a candidate must not run: other kernels than eager's have to be shown right."""
        check = self.candidates[name].check
        return check is not None and (check.differs or (self.candidates[name].fuse != "none" and not check.passed))

    def right(self, kinds: Collection[str]) -> list[str]:
        """Return open candidates of these kinds of kernels that may run."""
        return [name for name in self.executables if self.candidates[name].fuse in kinds and not self.wrong(name)]

    @contextmanager
    def or_left_out(self, kind: str, name: str = "", *, optional: bool = False) -> Iterator[None]:
        """Leave out a candidate, or all of one kind of kernels, if something goes wrong inside.

        Not so with eager's own, for which nothing else could run, unless this one is ``optional`` and there is too
        little memory for it; and under ``strict`` only what kernels may meet is no error.
        """
        try:
            yield
        except Exception as error:
            if kind == "none":
                expected = optional and isinstance(error, DeviceError)
            else:
                expected = not self.strict or isinstance(error, (CaptureError, DeviceError))
            if not expected:
                raise
            self.leave_out(kind, name, note=f"left out: {reason_of(error)}")

    def leave_out(self, kind: str, name: str = "", *, note: str) -> None:
        """Close a candidate, or all of one kind of kernels, and say why."""
        tried = [name] if name else [other for other, one in self.candidates.items() if one.fuse == kind]
        for one in tried:
            if one in self.executables:
                self.executables.pop(one).close()
            self.amend(one, note=note)
        if not tried:
            self.candidates[kind] = Candidate(kind, 0, 0, fuse=kind, fuse_s=self.fuse_s.get(kind, 0.0), note=note)
        self.notes.append(f"{name or kind}: {note}")

    def say_what_is_wrong(self, kinds: Sequence[str]) -> None:
        """Note which kinds of kernels are left out because their outputs are wrong."""
        for kind in kinds:
            reasons = [self.candidates[name].note for name in self.executables if self.candidates[name].fuse == kind]
            if kind != "none" and reasons and not self.right((kind,)):
                self.notes.append(f"{kind}: left out: {reasons[0]}")

    def forget(self, kind: str) -> None:
        """Close and forget all candidates of one kind of kernels, which are made anew."""
        for name in [name for name, one in self.candidates.items() if one.fuse == kind]:
            if name in self.executables:
                self.executables.pop(name).close()
            del self.candidates[name]
            self.checks.pop(name, None)
        self.observed.pop(kind, None)

    def shown(self, best: str) -> set[str]:
        """Return what stays open: one stream of eager's and of the best kernels, the best, the fastest of several."""
        found = self.candidates
        kind = found[best].fuse
        single = variant_name(kind, "single")
        several = [name for name in self.executables if found[name].fuse == kind and name != single]
        times = {name: one.median_ns if (one := found[name].measurement) else 0.0 for name in several}
        return {"single", single, best, min(several, key=lambda name: times[name], default=best)}

    def close(self, keep: Collection[str] = ()) -> None:
        """Close all that runs but what is named."""
        for name in [one for one in self.executables if one not in keep]:
            self.executables.pop(name).close()

    def clear(self) -> None:
        """Forget all candidates."""
        self.close()
        self.candidates.clear()
        self.checks.clear()


def known_costs(observed: Observation | None) -> Costs | None:
    """Return the isolated time of each call, None if nobody watched."""
    return observed.costs if observed and any(observed.costs.ns) else None


def reason_of(error: Exception) -> str:
    """Return what an error says, and where; of one that nobody raised on purpose also its type."""
    if isinstance(error, NimbleError):
        return error.what + (f" ({error.where})" if error.where else "")
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
