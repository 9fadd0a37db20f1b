"""Is a replay right? What eager makes of fresh inputs, and how replays are held against it.

Outputs and gradients are compared by ``equality``, what a step has written by ``rounding_noise``. Some training steps
amplify rounding until no digit is left: two honest libraries do not agree on the gradients of a fresh ResNet-50 on
noise in TF32. Nothing can be shown there at once, so it is shown in parts: that the kernels compute what eager's do in
full precision (in half precision, which is part of the program, at least gradients of the same sizes), and that
replays do what the same kernels do one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.runtime.device import Device, Executable
from nimble_core.tracing.pytree import Structure, builder, flatten, leaf_paths
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording import Issuer, issuing
from nimble_core.tracing.side_effects import preserved
from nimble_core.tracing.static_check import on_other_values
from nimble_core.tracing.strides import restrided
from nimble_core.utils.errors import NimbleError, first_line
from nimble_core.validation.distances import gaps
from nimble_core.validation.equality import DROWNED, check_equality, doubt, lowest_precision, working_precision
from nimble_core.validation.float64_reference import reference_outputs
from nimble_core.validation.rounding_noise import Update, check_updates, perturbed

__all__ = ["Cases", "Judge", "doubted", "eager_cases", "from_same_state", "full_precision", "issued"]

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_SAME_KERNELS = 32.0
"""How much less than a rounding of each result may differ between two runs of the same kernels: sums in another order
(atomic additions) are a thousandth of TF32's last place; of half precision's they seldom are one, and then a whole."""

_SIZES_APART = 0.1
"""How far sizes of gradients without a digit may be apart, beyond what rounding does to them."""

_MORE_SEEDS = (3, 4, 5, 6)
"""Of further runs with moved results, before a replay is called wrong."""


@dataclass(frozen=True, slots=True)
class Cases:
    """What outputs are compared on.

    Args:
        eager: pairs of fresh inputs and what eager makes of them.
        truth: what the model computes in float64 for each, where it can; None where nobody asked.
        lowest: the least precise type that eager computes in.
        why: why there is no truth; empty otherwise.
        moved: of a training step: what eager makes of each with its results moved by their last place.
        names: what the outputs are called; empty where nobody said.
        written: what is written of parameters, buffers and other state, before and after the first case.
    """

    eager: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    truth: Sequence[Sequence[torch.Tensor] | None] | None
    lowest: str
    why: str = ""
    moved: Sequence[Sequence[torch.Tensor]] | None = None
    names: tuple[str, ...] = ()
    written: Sequence[Update] = ()

    def judged(self, name: str, recorded: Recorded, run: Run, *, by_truth: bool = True) -> EqualityCheck:
        """Whether runs, each from the state that eager started from, do what eager does.

        Args:
            name: of what runs.
            recorded: whose state runs write.
            run: from input tensors to output tensors.
            by_truth: float64 decides where it is known; else eager.

        Raises:
            DeviceError: a run failed.
        """
        truth = self.truth if by_truth else None
        check = check_equality(
            name,
            from_same_state(recorded, run),
            self.eager,
            references=truth,
            lowest=self.lowest,
            perturbed=self.moved,
            names=self.names,
        )
        return (check.passed and self.miswritten(name, recorded, run)) or check

    def miswritten(self, name: str, recorded: Recorded, run: Run) -> EqualityCheck | None:
        """How what a run writes differs from what eager writes; None if it does not."""
        if not self.written:
            return None
        _, after = _stepped(recorded, run, self.eager[0][0])
        updates = [replace(one, after=tensor) for one, tensor in zip(self.written, after, strict=True)]
        check = check_updates(name, updates, lowest=self.lowest)
        return None if check.passed or check.reason.startswith("void") else check


def eager_cases(recorded: Recorded, *, truth: bool = False) -> Cases:
    """Two fresh sets of inputs and eager's outputs; the model and random state are left as they were.

    Args:
        recorded: the model, or what it was rewritten to.
        truth: also what the model computes in float64.
    """
    build = builder(recorded.signature.structure)
    eager = _Eager(recorded)
    before = [one.tensor.clone() for one in eager.state]
    cases: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []
    truths: list[Sequence[torch.Tensor] | None] = []
    moved: list[Sequence[torch.Tensor]] = []
    written: list[Update] = []
    why = ""
    for seed in (1, 2):
        inputs, (outputs, after) = on_other_values(eager.run, recorded.signature.tensors, seed)
        cases.append((inputs, outputs))
        if recorded.trained or (eager.state and not written):
            outputs, after_moved = eager.run(inputs, seed)
            if recorded.trained:
                moved.append(outputs)
            if not written:
                known = zip(eager.state, before, after, after_moved, strict=True)
                written = [Update(one.name, was, now, now, other, one.jumps) for one, was, now, other in known]
        if truth and not recorded.trained:
            args, kwargs = build(_copies(inputs))
            found = reference_outputs(recorded.model, args, kwargs)
            truths.append(found.outputs)
            why = why or found.reason
    program, structure = (recorded.eager or recorded).recording.program, eager.structure
    return Cases(
        eager=tuple(cases),
        truth=tuple(truths) if truths else None,
        lowest=lowest_precision(program),
        why=why,
        moved=tuple(moved) or None,
        names=tuple(f"output {path.lstrip('.')}" for path in leaf_paths(structure)) if structure and moved else (),
        written=tuple(written),
    )


def doubted(recorded: Recorded, cases: Cases) -> Cases:
    """Cases of a training step with more of what rounding may do: of each tensor what moved it furthest.

    Whether it decides a branch otherwise is chance: that it did not in one run convicts no replay in which it did.
    """
    if cases.moved is None:
        return cases
    eager = _Eager(recorded)
    moved = [list(outputs) for outputs in cases.moved]
    written = list(cases.written)
    for case, (inputs, outputs) in enumerate(cases.eager):
        for seed in _MORE_SEEDS:
            others, after = eager.run(inputs, seed)
            moved[case] = _further(outputs, moved[case], others)
            if case == 0 and written:
                furthest = _further([one.eager for one in written], [one.perturbed for one in written], after)
                written = [replace(one, perturbed=now) for one, now in zip(written, furthest, strict=True)]
    return replace(cases, moved=moved, written=tuple(written))


def _further(
    tensors: Sequence[torch.Tensor], some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Of each two the one that is further from the tensor; what is not finite says nothing."""
    pairs = zip(some, others, gaps(some, tensors), gaps(others, tensors), strict=True)
    return [
        other if one.is_floating_point() and near.norm < far.norm < math.inf else one for one, other, near, far in pairs
    ]


def _copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides, which the model may branch on."""
    return [restrided(tensor.clone(), tensor.stride()) for tensor in inputs]


class _Eager:
    """Runs of eager that leave model, random numbers and what a step writes as they were.

    Args:
        recorded: the model, or what it was rewritten to.
    """

    def __init__(self, recorded: Recorded) -> None:
        self.state = _state_of(recorded)
        self.structure: Structure | None = None
        self._recorded = replace(recorded, lender=None)  # which eager leaves alone
        self._build = builder(recorded.signature.structure)

    def run(
        self, inputs: Sequence[torch.Tensor], seed: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs, and what was written; with a ``seed``, every result moved by about its last place."""
        # Clones: a model that writes its inputs must not spoil the case for the replays.
        args, kwargs = self._build(_copies(inputs))
        model = self._recorded.model
        # On these inputs it may take another branch, and write what the recorded calls do not.
        with preserved(model, draws=()) as guard, state_kept(self._recorded), torch.no_grad():
            with guard.watching(), nullcontext() if seed is None else perturbed(seed):
                outputs, self.structure = flatten(model(*args, **kwargs), what="output")
            made = _with_nothing_unset(self._recorded, [one.detach().clone() for one in outputs])
            return made, [one.tensor.clone() for one in self.state]


@dataclass(frozen=True, slots=True)
class _State:
    name: str
    tensor: torch.Tensor
    jumps: bool


def _state_of(recorded: Recorded) -> list[_State]:
    """Floating tensors that live outside of a program and that it writes, each storage once.

    They are those of eager's program: another program of the same model writes the same ones.
    """
    recording = (recorded.eager or recorded).recording
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    divides = getattr(recorded.model, "divides", False)
    found: dict[int, _State] = {}
    for slot, tensor in recording.given.items():
        home = recording.storage_of[slot]
        if home in written and tensor.is_floating_point():
            storage = recording.program.storages[home]
            jumps = divides and storage.role == "parameter"
            found.setdefault(home, _State(storage.name or f"constant {slot}", tensor.detach(), jumps))
    return list(found.values())


def from_same_state(recorded: Recorded, run: Run) -> Run:
    """Runs that start from the buffers and random numbers that eager started from."""

    def kept(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with state_kept(recorded):
            return _with_nothing_unset(recorded, run(inputs))

    return kept


def _with_nothing_unset(recorded: Recorded, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, with zeros for those that nothing was written to: what is in their memory is nobody's mistake."""
    recording = (recorded.eager or recorded).recording
    found = list(outputs)
    for at, slot in enumerate(recording.outputs):
        if slot in recording.unset:
            found[at] = torch.zeros_like(found[at])
    return found


def _stepped(
    recorded: Recorded, run: Run, inputs: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    """What a run makes of ``inputs``, and what it leaves of the state, which then is as it was."""
    with state_kept(recorded):
        # Clones: a model that writes its inputs must not spoil the case for the next run.
        outputs = run(_copies(inputs))
        return outputs, [one.tensor.clone() for one in _state_of(recorded)]


def issued(device: Device, recorded: Recorded, *, tuned: bool = True) -> Run:
    """The calls of a recording one after the other, as eager would make them; results are the caller's.

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
    """Inside, float32 products are computed in float32, whatever the user allowed."""
    backends: Any = torch.backends
    if device_type == "cuda":
        settings = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    else:
        settings = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    before = [_own_precision(one) for one in settings]
    try:
        for one in settings:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(settings, before, strict=True):
            one.fp32_precision = precision


def _own_precision(setting: Any) -> str:
    """What was set for these operators; ``"none"`` where they follow what is set for all."""
    precision: str = setting.fp32_precision
    setting.fp32_precision = "none"
    inherited = setting.fp32_precision
    setting.fp32_precision = precision
    return "none" if inherited == precision else precision


@dataclass(slots=True)
class Judge:
    """Judges replays of one model; what that takes is computed once.

    Args:
        device: where.
        recorded: the model, in eager's kernels. What replays write of it is the caller's to keep (``state_kept``).
        notes: what the user should know.
    """

    device: Device
    recorded: Recorded
    notes: list[str] = field(default_factory=list)
    _cases: Cases | None = None
    _precise: Cases | None = None
    _kernels: dict[str, EqualityCheck] = field(default_factory=dict)
    _beside: dict[str, Cases] = field(default_factory=dict)
    _doubted: bool = False

    def expect(self, *, fused: bool) -> Cases:
        """Make ready to judge; other kernels than eager's also by float64."""
        if self._cases is None or (fused and self._cases.truth is None and not self.recorded.trained):
            self._cases = eager_cases(self.recorded, truth=fused)
            if self._cases.why:
                self.notes.append(f"compared with eager, not with float64: {self._cases.why}")
        return self._cases

    def judged(self, name: str, variant: Recorded, executable: Executable) -> EqualityCheck:
        """Whether replays of ``variant`` do what eager does.

        Raises:
            DeviceError: a replay failed.
        """
        kind = variant.recording.program.fuse
        cases = self.expect(fused=kind != "none")
        check = cases.judged(name, variant, executable.run, by_truth=kind != "none")
        if check.differs and not self._doubted:
            self._cases = cases = doubted(self.recorded, cases)
            self._doubted = True
            check = cases.judged(name, variant, executable.run, by_truth=kind != "none")
        if not (check.reason.startswith(DROWNED) and _is_whole_step(variant)):
            return check
        try:
            return self._in_parts(name, variant, executable, cases, check)
        except NimbleError:
            raise
        except RuntimeError as error:  # of calls outside of a capture: a replay plans its memory, these keep it all
            self.notes.append(f"{name} could not be judged in parts: {first_line(error)}")
            return check

    def _in_parts(
        self, name: str, variant: Recorded, executable: Executable, cases: Cases, check: EqualityCheck
    ) -> EqualityCheck:
        kind = variant.recording.program.fuse
        if kind != "none":
            kernels = self._kernels_judged(variant, cases)
            if not kernels.passed:
                return replace(kernels, name=name)
        if kind not in self._beside:
            self._beside[kind] = _beside(cases, variant, issued(self.device, variant))
        replayed = self._beside[kind].judged(name, variant, executable.run)
        # Eager's kernels one after the other need not be those of its replay: libraries choose by memory, too.
        return replayed if replayed.passed or (kind != "none" and replayed.differs) else check

    def _kernels_judged(self, variant: Recorded, cases: Cases) -> EqualityCheck:
        """Whether the kernels compute what eager's do, one after the other."""
        kind = variant.recording.program.fuse
        if kind in self._kernels:
            return self._kernels[kind]
        # In another precision libraries would try all of their kernels anew, which takes most of the time.
        run, how = issued(self.device, variant, tuned=False), "in full precision"
        found = None
        with full_precision(variant.signature.device.type):
            if working_precision(cases.eager[0][1], cases.lowest) == "float32":
                self._precise = self._precise or eager_cases(self.recorded)
                found = self._precise.judged(kind, variant, run)
                if found.differs:
                    self._precise = doubted(self.recorded, self._precise)
                    found = self._precise.judged(kind, variant, run)
        if found is None or found.reason.startswith(DROWNED):
            run, how = issued(self.device, variant), "by the sizes of gradients"
            found = _of_same_sizes(kind, cases, from_same_state(variant, run))
            found = (found.passed and cases.miswritten(kind, variant, run)) or found
        self.notes.append(
            f"{kind}: rounding alone changes this step's gradients as much as inputs do: kernels were compared {how}"
        )
        self._kernels[kind] = found
        return found


def _is_whole_step(recorded: Recorded) -> bool:
    """Whether a recording holds forward and backward: alone, neither amplifies rounding as both do."""
    return {"forward", "backward"} <= {call.phase for call in recorded.recording.program.calls}


def _beside(cases: Cases, variant: Recorded, run: Run) -> Cases:
    """What the same kernels make of these cases one after the other, and how far from that a replay may be."""
    assert cases.moved is not None
    steps = [_stepped(variant, run, inputs) for inputs, _ in cases.eager]
    eager, moved = [], []
    for (inputs, outputs), others, (mine, _) in zip(cases.eager, cases.moved, steps, strict=True):
        eager.append((inputs, mine))
        moved.append([_moved(*three) for three in zip(mine, outputs, others, strict=True)])
    written = [
        replace(one, after=now, eager=now, perturbed=_moved(now, one.eager, one.perturbed))
        for one, now in zip(cases.written, steps[0][1], strict=True)
    ]
    return replace(cases, eager=eager, truth=None, moved=moved, written=written)


def _moved(mine: torch.Tensor, eager: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """``mine``, moved by a small part of what rounding does to eager's."""
    if not mine.is_floating_point():
        return mine
    return mine + (moved.to(mine) - eager.to(mine)) / _SAME_KERNELS


def _of_same_sizes(name: str, cases: Cases, run: Run) -> EqualityCheck:
    """Whether gradients without a single digit have the sizes of eager's, as far as rounding leaves these alone.

    Sizes are norms, relative to the greatest of eager's. They may be apart by what rounding does to eager's
    (``equality.doubt``), or by three times what chance does: norms of n random numbers scatter by 1/√n. Void if not
    even gradients of zeros would be noticed.
    """
    assert cases.moved is not None
    runs = [run(_copies(inputs)) for inputs, _ in cases.eager]
    outputs_of = [outputs for _, outputs in cases.eager]
    norms = [[gaps(outputs) for outputs in lists] for lists in (outputs_of, cases.moved, runs)]
    moves = [gaps(moved, outputs) for moved, outputs in zip(cases.moved, outputs_of, strict=True)]
    worst, allowed, where, telling = 0.0, _SIZES_APART, "", False
    for at, tensor in enumerate(cases.eager[0][1]):
        count = tensor.numel()
        if not tensor.is_floating_point() or not count:
            continue
        sizes, others, mine = ([case[at].norm for case in lists] for lists in norms)
        # What rounding made infinite says nothing of it.
        others = [other if other < math.inf else size for other, size in zip(others, sizes, strict=True)]
        scale = max(sizes) or max(others) or 1.0
        noise = sum(abs(a - b) for a, b in zip(others, sizes, strict=True)) / len(sizes) / scale
        apart = max((move[at].norm for move in moves if move[at].norm < math.inf), default=0.0) / scale
        error = max(abs(a - b) for a, b in zip(mine, sizes, strict=True)) / scale
        bound = _SIZES_APART + max(doubt(noise, count, 1.0, "float32"), 3 * apart / math.sqrt(count))
        telling = telling or max(sizes) / scale > bound
        if error / bound >= worst / allowed:
            worst, allowed, where = error, bound, cases.names[at] if cases.names else f"output {at}"
    reason = "" if telling else "void: rounding alone decides the sizes of gradients"
    if worst > allowed:
        reason = f"{where} is not of the size of eager's: {worst:.1e} off, at most {allowed:.1e} would pass"
    return EqualityCheck(name, min(worst, 1e300), allowed, 0.0, not reason, reason)
