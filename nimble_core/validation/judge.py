"""Is a replay right? Its outputs, gradients and what it writes, against eager; if need be in parts.

Some training steps amplify rounding until no digit is left: two honest libraries do not agree on the gradients of a
fresh ResNet-50 on noise in TF32. Nothing can be shown there at once, so it is shown in parts: that the kernels compute
what eager's do in full precision (in half precision, which is part of the program, at least gradients of the same
sizes), and that replays do what the same kernels do one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.runtime.device import Device, Executable
from nimble_core.tracing.recorded import Recorded
from nimble_core.tracing.recording import Issuer, issuing
from nimble_core.utils.errors import NimbleError, first_line
from nimble_core.validation.bounds import allowed_noise, product_settings, working_precision
from nimble_core.validation.distances import gaps
from nimble_core.validation.eager_cases import Cases, Run, eager_cases, from_same_state, run_and_state
from nimble_core.validation.equality import DROWNED, storable
from nimble_core.validation.kernel_check import KernelCheck, check_kernels

__all__ = ["Judge", "full_precision", "issued", "judged_again"]

_SAME_KERNELS = 32.0
"""How much less than a rounding of each result may differ between two runs of the same kernels: sums in another order
(atomic additions) are a thousandth of TF32's last place; of half precision's they seldom are one, and then a whole."""

_ADDED_UP, _ADDED_UP_KNOWN = 4.0, 2.0
"""How many tolerances outputs of kernels that are all right may be from eager's, in half precision; or, where float64
tells how far eager itself is off, how many times what is allowed there. Weights that batch norm is folded into are
rounded once more: through the 94 convolutions of Inception-v3 that makes four times eager's error."""

_SIZES_APART = 0.1
"""How far sizes of gradients without a digit may be apart, beyond what rounding does to them."""


@dataclass(slots=True)
class Judge:
    """Judges replays of one model; what that takes is computed once.

    Args:
        device: where.
        recorded: the model, in eager's kernels. What replays write of it is the caller's to keep (``state_kept``).
        truth: whether to compute the model in float64, for kernels other than eager's.
        notes: what the user should know.
    """

    device: Device
    recorded: Recorded
    truth: bool = True
    notes: list[str] = field(default_factory=list)
    _cases: Cases | None = None
    _precise: Cases | None = None
    _kernels: dict[str, EqualityCheck] = field(default_factory=dict)
    _each_kernel: dict[str, KernelCheck] = field(default_factory=dict)
    _issued: dict[str, Cases] = field(default_factory=dict)
    _thorough: bool = False

    def cases(self) -> Cases:
        """Return what eager makes of fresh inputs; it runs the first time."""
        if self._cases is None:
            self._cases = eager_cases(self.recorded, truth=self.truth)
            if self._cases.why:
                self.notes.append(f"compared with eager, not with float64: {self._cases.why}")
        return self._cases

    def judged(self, name: str, variant: Recorded, executable: Executable) -> EqualityCheck:
        """Check whether replays of ``variant`` do what eager does.

        Raises:
            DeviceError: a replay failed.
        """
        cases, fused = self.cases(), variant.recording.program.fuse != "none"
        check = cases.judged(name, variant, executable.run, by_truth=fused)
        if check.differs and self.recorded.trained and not self._thorough:
            self._cases = cases = eager_cases(self.recorded, thorough=True)
            self._thorough = True
            check = cases.judged(name, variant, executable.run)
        if not (check.differs or check.reason.startswith(DROWNED)):
            return check
        if fused and not self.recorded.trained:
            return self._by_kernels(check, variant, executable)
        if check.differs or not _is_whole_step(variant):
            if fused and check.differs:
                self._one_by_one(variant, check)
            return check
        try:
            return self._in_parts(name, variant, executable, cases, check)
        except NimbleError:
            raise
        except RuntimeError as error:  # of calls outside of a capture: a replay plans its memory, these keep it all
            self.notes.append(f"{name} could not be judged in parts: {first_line(error)}")
            return check

    def faults(self, kind: str) -> KernelCheck | None:
        """Return what was found of kernels of which some are wrong or not shown; None if none are to blame."""
        found = self._each_kernel.get(kind)
        return found if found is not None and found.faults else None

    def forget(self, kind: str) -> None:
        """Forget what was found of kernels of this kind, which are made anew."""
        for one in (self._kernels, self._each_kernel, self._issued):
            one.pop(kind, None)

    def _by_kernels(self, check: EqualityCheck, variant: Recorded, executable: Executable) -> EqualityCheck:
        """Judge outputs that hardly move with inputs by the kernels that made them, each on values that show it.

        Of outputs that differ, find the kernels to blame.
        """
        found = self._one_by_one(variant, check)
        if check.differs:
            return self._rounding(check, variant, executable) if found.passed else check
        if found.wrong:
            return replace(check, reason=f"a kernel does not compute what eager does: {found.wrong}")
        reason = f"{check.reason}; nor is it shown of {found.unshown}" if found.unshown else ""
        return replace(check, passed=not reason, reason=reason)

    def _one_by_one(self, variant: Recorded, check: EqualityCheck) -> KernelCheck:
        """Check each kernel, once, and note how many are right: those that are not give way to eager's calls.

        Of a training step nothing is said to be right by this: a branch that rounding decides otherwise (ReLU) moves
        what kernels far behind it make.
        """
        kind = variant.recording.program.fuse
        if kind not in self._each_kernel:
            found = self._each_kernel[kind] = check_kernels(variant, self.cases().eager[0][0])
            why = "outputs differ from eager's" if check.differs else "outputs hardly move with inputs"
            compared = f"{found.shown} of its {found.calls} kernels were shown right one by one"
            self.notes.append(f"{kind}: {why}; {compared}")
        return self._each_kernel[kind]

    def _rounding(self, check: EqualityCheck, variant: Recorded, executable: Executable) -> EqualityCheck:
        """Take what differs by little for rounding that added up, in half precision, where all kernels are right."""
        cases = self.cases()
        if working_precision(cases.eager[0][1], cases.lowest) not in ("float16", "bfloat16"):
            return check
        slack = _ADDED_UP if cases.why else _ADDED_UP_KNOWN
        wide = cases.judged(check.name, variant, executable.run, slack=slack)
        if not wide.passed and not wide.reason.startswith(DROWNED):
            return check
        self.notes.append(
            f"{check.name}: {check.reason}; it passes, since each kernel is right and rounding adds up to {slack:g} "
            "times that at most"
        )
        return replace(wide, passed=True, reason="")

    def _in_parts(
        self, name: str, variant: Recorded, executable: Executable, cases: Cases, check: EqualityCheck
    ) -> EqualityCheck:
        kind = variant.recording.program.fuse
        if kind != "none":
            if kind not in self._kernels:
                self._kernels[kind] = self._kernels_judged(variant, cases)
            if not self._kernels[kind].passed:
                return replace(self._kernels[kind], name=name)
        if kind not in self._issued:
            self._issued[kind] = _issued_cases(cases, variant, issued(self.device, variant))
        replayed = self._issued[kind].judged(name, variant, executable.run)
        # Eager's kernels one after the other need not be those of its replay: libraries choose by memory, too.
        return replayed if replayed.passed or (kind != "none" and replayed.differs) else check

    def _kernels_judged(self, variant: Recorded, cases: Cases) -> EqualityCheck:
        """Check whether the kernels compute what eager's do, one after the other."""
        kind = variant.recording.program.fuse
        # In another precision libraries would try all of their kernels anew, which takes most of the time.
        run, how = issued(self.device, variant, tuned=False), "in full precision"
        found = None
        with full_precision(variant.signature.device.type):
            if working_precision(cases.eager[0][1], cases.lowest) == "float32":
                self._precise = self._precise or eager_cases(self.recorded)
                found = self._precise.judged(kind, variant, run)
                if found.differs:
                    self._precise = eager_cases(self.recorded, thorough=True)
                    found = self._precise.judged(kind, variant, run)
        if found is None or found.reason.startswith(DROWNED):
            run, how = issued(self.device, variant), "by the sizes of gradients"
            found = check_sizes(kind, cases, from_same_state(variant, run))
            found = (found.passed and cases.wrong_state(kind, variant, run)) or found
        self.notes.append(
            f"{kind}: rounding alone changes this step's gradients as much as inputs do: kernels were compared {how}"
        )
        if found.differs:
            self._one_by_one(variant, found)
        return found


def judged_again(name: str, recorded: Recorded, variant: Recorded, executable: Executable) -> EqualityCheck | None:
    """Hold kernels that were shown to be right before against eager alone, on the weights of now.

    Args:
        name: of what runs them.
        recorded: the model, in eager's kernels.
        variant: the kernels, the very code that was shown to be right.
        executable: runs them.

    Returns:
        A check that passes; None where it takes more than eager to decide.

    Raises:
        DeviceError: a replay failed.
    """
    if recorded.trained:
        return None
    check = eager_cases(recorded).judged(name, variant, executable.run)
    if check.reason.startswith(DROWNED):  # within its tolerance; that kernels follow inputs was shown
        check = replace(check, passed=True, reason="")
    return check if check.passed else None


def _is_whole_step(recorded: Recorded) -> bool:
    """Tell whether a recording holds forward and backward: alone, neither amplifies rounding as both do."""
    return {"forward", "backward"} <= {call.phase for call in recorded.recording.program.calls}


def issued(device: Device, recorded: Recorded, *, tuned: bool = True) -> Run:
    """Return a run that makes the calls of a recording one after the other, as eager would; results are the caller's.

    Args:
        device: where.
        recorded: whose calls.
        tuned: kernels other than eager's are those that a capture takes: libraries try theirs out where they have not.
    """
    tuned = tuned and recorded.recording.program.fuse != "none"

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        where = recorded.signature.device
        issuer = Issuer(recorded.recording, inputs)
        with issuing(where.type), device.libraries_tuned() if tuned else nullcontext():
            for call in range(len(recorded.recording.program.calls)):
                issuer.issue(call)
            # In eager some operators keep on the host what a capture keeps on the device: seeds of dropout masks.
            return [one.to(where, copy=True) for one in issuer.outputs()]

    return run


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Compute float32 products in float32 inside, whatever the user allowed."""
    settings = product_settings(device_type)
    before = [_own_precision(one) for one in settings]
    try:
        for one in settings:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(settings, before, strict=True):
            one.fp32_precision = precision


def _own_precision(setting: Any) -> str:
    """Return what was set for these operators; ``"none"`` where they follow what is set for all."""
    precision: str = setting.fp32_precision
    setting.fp32_precision = "none"
    inherited = setting.fp32_precision
    setting.fp32_precision = precision
    return "none" if inherited == precision else precision


def _issued_cases(cases: Cases, variant: Recorded, run: Run) -> Cases:
    """Return what the same kernels make of these cases one after the other, and how far from that a replay may be."""
    assert cases.moved is not None
    steps = [run_and_state(variant, run, inputs) for inputs, _ in cases.eager]
    eager, moved = [], []
    for (inputs, outputs), others, (mine, _) in zip(cases.eager, cases.moved, steps, strict=True):
        eager.append((inputs, mine))
        moved.append([_nearly(*three) for three in zip(mine, outputs, others, strict=True)])
    written = [
        replace(one, after=now, eager=now, perturbed=_nearly(now, one.eager, one.perturbed))
        for one, now in zip(cases.written, steps[0][1], strict=True)
    ]
    return replace(cases, eager=eager, truth=None, moved=moved, written=written)


def _nearly(mine: torch.Tensor, eager: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return ``mine``, moved by a small part of what rounding does to eager's."""
    if not mine.is_floating_point():
        return mine
    return mine + (moved.to(mine) - eager.to(mine)) / _SAME_KERNELS


def check_sizes(name: str, cases: Cases, run: Run) -> EqualityCheck:
    """Check whether gradients without a single digit have the sizes of eager's, as far as rounding leaves these alone.

    Sizes are norms, relative to the greatest of eager's. They may be apart by what rounding does to eager's
    (``allowed_noise``), or by three times what chance does: norms of n random numbers scatter by 1/√n. Void if not even
    gradients of zeros would be noticed.
    """
    assert cases.moved is not None
    runs = [run([tensor.clone() for tensor in inputs]) for inputs, _ in cases.eager]
    outputs_of = [outputs for _, outputs in cases.eager]
    norms = [[gaps(outputs) for outputs in lists] for lists in (outputs_of, cases.moved, runs)]
    moves = [gaps(moved, outputs) for moved, outputs in zip(cases.moved, outputs_of, strict=True)]
    worst, allowed, where, telling = 0.0, _SIZES_APART, "", False
    for at, tensor in enumerate(outputs_of[0]):
        count = tensor.numel()
        if not tensor.is_floating_point() or not count:
            continue
        sizes, others, mine = ([case[at].norm for case in lists] for lists in norms)
        scale = max(sizes) or max(others) or 1.0
        noise = sum(abs(a - b) for a, b in zip(others, sizes, strict=True)) / len(sizes) / scale
        apart = max(move[at].norm for move in moves) / scale
        error = max(abs(a - b) for a, b in zip(mine, sizes, strict=True)) / scale
        bound = _SIZES_APART + max(allowed_noise(noise, count, 1.0, "float32"), 3 * apart / math.sqrt(count))
        telling = telling or max(sizes) / scale > bound
        if error / bound >= worst / allowed:
            worst, allowed, where = error, bound, cases.names[at] if cases.names else f"output {at}"
    reason = "" if telling else "void: rounding alone decides the sizes of gradients"
    if worst > allowed:
        reason = f"{where} is not of the size of eager's: {worst:.1e} off, at most {allowed:.1e} would pass"
    return EqualityCheck(name, storable(worst), allowed, 0.0, not reason, reason)
