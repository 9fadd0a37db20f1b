"""What eager makes of fresh inputs, and how a run is held against that: its outputs, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.tracing.pytree import Structure, builder, flatten, leaf_paths
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.side_effects import preserved
from nimble_core.tracing.static_check import on_other_values
from nimble_core.tracing.strides import restrided
from nimble_core.validation.bounds import lowest_precision
from nimble_core.validation.distances import gaps, infinities, without
from nimble_core.validation.equality import check_equality
from nimble_core.validation.float64_reference import reference_outputs
from nimble_core.validation.rounding_noise import perturbed
from nimble_core.validation.updates import Update, wrong_updates

__all__ = ["Cases", "Run", "eager_cases", "from_same_state", "run_and_state"]

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_MORE_SEEDS = (3, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class Cases:
    """What runs are compared on.

    Args:
        eager: pairs of fresh inputs and what eager makes of them.
        truth: what the model computes in float64 for each, where it can; None if that was not asked for.
        lowest: the lowest precision that eager computes in.
        why: why there is no truth; empty otherwise.
        moved: of a training step: what eager makes of each with its results perturbed.
        names: what the outputs are called; empty if they have no names.
        written: parameters, buffers and other state that is written, before and after the first case.
    """

    eager: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    truth: Sequence[Sequence[torch.Tensor] | None] | None
    lowest: str
    why: str = ""
    moved: Sequence[Sequence[torch.Tensor]] | None = None
    names: tuple[str, ...] = ()
    written: Sequence[Update] = ()

    def judged(
        self, name: str, recorded: Recorded, run: Run, *, by_truth: bool = True, slack: float = 1.0
    ) -> EqualityCheck:
        """Check whether runs, each from the state that eager started from, do what eager does.

        Args:
            name: of what runs.
            recorded: whose state runs write.
            run: from input tensors to output tensors.
            by_truth: float64 decides where it is known; else eager.
            slack: how many times what is allowed an output may be off.

        Raises:
            DeviceError: a run failed.
        """
        check = check_equality(
            name,
            from_same_state(recorded, run),
            self.eager,
            references=self.truth if by_truth else None,
            lowest=self.lowest,
            perturbed=self.moved,
            names=self.names,
            slack=slack,
        )
        return (check.passed and self.wrong_state(name, recorded, run)) or check

    def wrong_state(self, name: str, recorded: Recorded, run: Run) -> EqualityCheck | None:
        """Say how what a run writes differs from what eager writes; None if it does not."""
        if not self.written:
            return None
        _, after = run_and_state(recorded, run, self.eager[0][0])
        updates = [replace(one, after=tensor) for one, tensor in zip(self.written, after, strict=True)]
        return wrong_updates(name, updates, lowest=self.lowest)


def eager_cases(recorded: Recorded, *, truth: bool = False, thorough: bool = False) -> Cases:
    """Run eager on two fresh sets of inputs; the model and random state are left as they were.

    Args:
        recorded: the model, or what it was rewritten to.
        truth: also compute what the model makes of them in float64; not of training steps.
        thorough: perturb a training step more often, and keep what moved each tensor furthest. Whether rounding decides
            a branch otherwise is chance: that it did not in one run convicts no replay in which it did.
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
            noisy, noisy_after = outputs, after
            for one in (seed, *_MORE_SEEDS) if thorough else (seed,):
                other, other_after = eager.run(inputs, one)
                noisy, noisy_after = _further(outputs, noisy, other), _further(after, noisy_after, other_after)
            if recorded.trained:
                moved.append(noisy)
            if not written:
                tensors = zip(eager.state, before, after, noisy_after, strict=True)
                written = [Update(one.name, was, now, now, noise, one.jumps) for one, was, now, noise in tensors]
        if truth and not recorded.trained:
            args, kwargs = build(_copies(inputs))
            found = reference_outputs(recorded.model, args, kwargs)
            truths.append(found.outputs)
            why = why or found.reason
    structure = eager.structure
    return Cases(
        eager=tuple(cases),
        truth=tuple(truths) if truths else None,
        lowest=lowest_precision((recorded.eager or recorded).recording.program),
        why=why,
        moved=tuple(moved) or None,
        names=tuple(f"output {path.lstrip('.')}" for path in leaf_paths(structure)) if structure and moved else (),
        written=tuple(written),
    )


def _further(
    tensors: Sequence[torch.Tensor], some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return of each two the one that is further from the tensor, where that is finite.

    One that is infinite elsewhere says nothing.
    """
    where = infinities(tensors)
    finite, near, far = (without(where, one) for one in (tensors, some, others))
    pairs = zip(some, others, gaps(near, finite), gaps(far, finite), strict=True)
    return [other if near.norm < far.norm < math.inf else one for one, other, near, far in pairs]


def _copies(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy inputs with their strides, which the model may branch on."""
    return [restrided(tensor.clone(), tensor.stride()) for tensor in inputs]


class _Eager:
    """Runs of eager that leave the model, random numbers and what is written as they were.

    Args:
        recorded: the model, or what it was rewritten to.
    """

    def __init__(self, recorded: Recorded) -> None:
        self.state = _state_of(recorded)
        self.structure: Structure | None = None
        self._recorded = replace(recorded, lender=None)  # eager leaves lent memory alone
        self._build = builder(recorded.signature.structure)

    def run(
        self, inputs: Sequence[torch.Tensor], seed: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs, and what was written; with a ``seed``, every result is perturbed."""
        # Clones: a model that writes its inputs must not spoil the case for the replays.
        args, kwargs = self._build(_copies(inputs))
        model = self._recorded.model
        # On these inputs it may take another branch, and write what the recorded calls do not.
        with preserved(model, draws=()) as guard, state_kept(self._recorded), torch.no_grad():
            with guard.watching(), nullcontext() if seed is None else perturbed(seed):
                outputs, self.structure = flatten(model(*args, **kwargs), what="output")
            made = _zeros_for_unset(self._recorded, [one.detach().clone() for one in outputs])
            return made, [one.tensor.clone() for one in self.state]


@dataclass(frozen=True, slots=True)
class _State:
    name: str
    tensor: torch.Tensor
    jumps: bool


def _state_of(recorded: Recorded) -> list[_State]:
    """Return floating-point tensors that live outside of a program and that it writes, one for each storage.

    They are those of eager's program: another program of the same model writes the same ones.
    """
    recording = (recorded.eager or recorded).recording
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    divides = getattr(recorded.model, "divides", False)
    found: dict[int, _State] = {}
    for slot, tensor in recording.given.items():
        home = recording.storage_of[slot]
        if home in written and tensor.is_floating_point() and tensor.numel():
            storage = recording.program.storages[home]
            jumps = divides and storage.role == "parameter"
            found.setdefault(home, _State(storage.name or f"constant {slot}", tensor.detach(), jumps))
    return list(found.values())


def from_same_state(recorded: Recorded, run: Run) -> Run:
    """Return ``run`` such that each starts from the buffers and random numbers that eager started from."""

    def kept(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with state_kept(recorded):
            return _zeros_for_unset(recorded, run(inputs))

    return kept


def _zeros_for_unset(recorded: Recorded, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return outputs, with zeros for those that nothing was written to: they are uninitialised."""
    recording = (recorded.eager or recorded).recording
    found = list(outputs)
    for at, slot in enumerate(recording.outputs):
        if slot in recording.unset:
            found[at] = torch.zeros_like(found[at])
    return found


def run_and_state(
    recorded: Recorded, run: Run, inputs: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    """Return what a run makes of ``inputs``, and what it leaves of the state, which then is as it was."""
    with state_kept(recorded):
        # Clones: a model that writes its inputs must not spoil the case for the next run.
        outputs = run(_copies(inputs))
        return outputs, [one.tensor.clone() for one in _state_of(recorded)]
