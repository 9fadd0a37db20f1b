"""Memory that the model writes in place, but never with anything that depends on its inputs or weights.

Masks of shifted windows are made so: zeros, and a number written into each of nine parts. Their numbers are computed
once, and what writes them is left out; what is computed of them is then a constant like others.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from nimble_core.compiler.to_fx import written_slots
from nimble_core.ir.program import TensorRef
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.operator_traits import fills, only_metadata
from nimble_core.tracing.recording import Recording, Step, run_step

__all__ = ["with_fixed_memory"]

_LIMIT_NBYTES = 64 << 20


def with_fixed_memory(recording: Recording, device: torch.device) -> Recording:
    """Return the recording with such memory given, instead of written.

    Args:
        recording: of eager's calls.
        device: on which they run.
    """
    fixed = _fixed(recording)
    chosen = _chosen(recording, fixed)
    storages = recording.program.storages
    if not chosen or sum(storages[home].nbytes for home in chosen) > _LIMIT_NBYTES:
        return recording
    rest = tuple(step for step in recording.steps if not _homes(recording, _touched(step)) & chosen)
    read = {slot for step in rest for slot in step.reads if recording.storage_of[slot] in chosen}
    values = _computed(recording, chosen, device)
    return replace(recording, steps=rest, given=recording.given | {slot: values[slot] for slot in sorted(read)})


def _touched(step: Step) -> tuple[int, ...]:
    """Find the slots whose memory a step makes, writes or shows."""
    return (*(slot for slot in step.outputs if slot >= 0), *written_slots(step))


def _homes(recording: Recording, slots: Iterable[int]) -> frozenset[int]:
    return frozenset(recording.storage_of[slot] for slot in slots)


def _fixed(recording: Recording) -> frozenset[int]:
    """Find the storages whose numbers never depend on inputs or the model's tensors; literals are not these."""
    literals = {
        slot for step in recording.steps if step.func is torch.ops.aten.lift_fresh.default for slot in step.reads
    }
    literals -= {slot for step in recording.steps for slot in written_slots(step)}
    varying = set(_homes(recording, (*recording.inputs, *recording.outputs, *(recording.given.keys() - literals))))
    before = -1
    while before != len(varying):
        before = len(varying)
        for step in recording.steps:
            homes = _homes(recording, _touched(step))
            if not homes <= varying and not (_repeats(step) and _homes(recording, _depends(step)).isdisjoint(varying)):
                varying |= homes
    return frozenset(range(len(recording.program.storages))) - varying


def _repeats(step: Step) -> bool:
    """Whether a step does the same each time, given the same."""
    func = step.func
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded not in func.tags and not fills(func)


def _depends(step: Step) -> Sequence[int]:
    """Find the slots whose numbers a step reads."""
    return step.reads[1:] if only_metadata(step.func) else step.reads


def _chosen(recording: Recording, fixed: frozenset[int]) -> frozenset[int]:
    """Find the fixed storages that are written in place, and read by others only when all is written."""
    last: dict[int, int] = {}
    for position, step in enumerate(recording.steps):
        last.update(dict.fromkeys(_homes(recording, written_slots(step)) & fixed, position))
    chosen, before = set(last), -1
    while before != len(chosen):
        before = len(chosen)
        for position, step in enumerate(recording.steps):
            touched = _homes(recording, _touched(step))
            if not touched <= chosen:
                early = {home for home in _homes(recording, _depends(step)) if last.get(home, -1) > position}
                chosen -= touched | early
    return frozenset(chosen)


def _computed(recording: Recording, chosen: frozenset[int], device: torch.device) -> dict[int, torch.Tensor]:
    """Run what writes the chosen storages, and what that reads; return its tensors by slot."""
    needed, steps = set(chosen), list[Step]()
    for step in reversed(recording.steps):
        if _homes(recording, _touched(step)) & needed:
            needed |= _homes(recording, _depends(step))
            steps.append(step)
    tensors = dict(recording.given)
    with torch.inference_mode(False), torch.no_grad():
        for step in reversed(steps):
            shown = {slot: _like(recording.refs[slot], device) for slot in step.reads if slot not in tensors}
            run_step(step, ChainMap(tensors, shown))
    return tensors


def _like(ref: TensorRef, device: torch.device) -> torch.Tensor:
    """Return memory of that form, for what asks only for that."""
    return torch.empty_strided(ref.sizes, ref.strides, dtype=getattr(torch, ref.dtype), device=device)
