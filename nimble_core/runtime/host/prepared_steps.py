"""What each step of a recording becomes in a replay, found by running every step once.

A tensor is fixed if it is the same object in every replay: the model's own, buffers, and views of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.profiling.nvtx import call_ranges
from nimble_core.runtime.host.buffers import can_fill, direct, filling_step, made_by_step
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.tracing.recording import Recording, Step, fill, flat_tensors

__all__ = ["PreparedStep", "PreparedSteps"]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step ready to be written down.

    Args:
        step: with a direct entry into its operator.
        filling: the step as a call that fills a tensor given to it; None if it cannot be one.
        shape: of what it returns: ``"tensor"``, ``"flat"`` (a tuple or list of tensors) or ``"nested"``.
        allocates: whether it is a step between calls whose results are new memory.
    """

    step: Step
    filling: Step | None
    shape: str
    allocates: bool


class PreparedSteps:
    """The steps of a recording, its fixed tensors, and the arena that buffers lie in.

    Runs every call once, on copies of what it writes.

    Args:
        recording: what to prepare.
        schedule: of its program, for names of ranges.
        inputs: example values.
        memory: where buffers lie; what it does not place is allocated in every run.
    """

    def __init__(
        self, recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor], memory: MemoryPlan
    ) -> None:
        self.recording = recording
        self.schedule = schedule
        self.memory = memory
        self.fixed: dict[int, torch.Tensor] = dict(recording.given)
        self.steps = list(self._run_each(inputs))
        self.arena = torch.UntypedStorage(memory.nbytes)
        self._fix_buffers()
        self._fix_views()
        self.maker = {slot: one for one in self.steps for slot in one.step.outputs if slot >= 0}

    def _run_each(self, inputs: Sequence[torch.Tensor]) -> Iterator[PreparedStep]:
        """Run every step in program order; each tensor lives until its last use."""
        recording = self.recording
        last: dict[int, int] = {}
        for index, step in enumerate(recording.steps):
            last |= dict.fromkeys((*step.reads, *step.outputs), index)
        tensors = _tensors_without_effect(recording, inputs)
        range_of = call_ranges(recording.program, self.schedule)
        for index, (step, fresh) in enumerate(zip(recording.steps, made_by_step(recording), strict=True)):
            args, kwargs = fill(list(step.args), tensors), {name: fill(value, tensors) for name, value in step.kwargs}
            with range_of(step.call):
                result = step.func(*args, **kwargs)
            returned = flat_tensors(result)
            for slot, tensor in zip(step.outputs, returned, strict=True):
                if slot >= 0:
                    tensors[slot] = tensor
            placed = any(self.memory.offsets[storage] >= 0 for storage in fresh)
            fills = placed and can_fill(step) and not returned[0].is_quantized
            yield PreparedStep(
                step=replace(step, func=direct(step.func)),
                filling=filling_step(step) if fills else None,
                shape=_shape(result),
                allocates=step.call is None and bool(fresh),
            )
            del args, kwargs, result, returned
            for slot in {*step.reads, *step.outputs} - {-1}:
                if last[slot] == index:
                    tensors.pop(slot, None)

    def _fix_buffers(self) -> None:
        """Make the tensors that calls fill, and those allocated between calls, where the plan has them."""
        for one in self.steps:
            if one.filling is None and not one.allocates:
                continue
            for slot in one.step.outputs:
                offset = self.memory.offsets[self.recording.storage_of[slot]] if slot >= 0 else -1
                if offset >= 0 and slot not in self.fixed:
                    ref = self.recording.refs[slot]
                    start = (offset + ref.offset) // ref.itemsize
                    made = torch.empty(0, dtype=getattr(torch, ref.dtype))
                    self.fixed[slot] = made.set_(self.arena, start, ref.sizes, ref.strides)

    def _fix_views(self) -> None:
        """Make every view of fixed tensors."""
        for one in self.steps:
            step = one.step
            if step.call is not None or one.allocates or not step.outputs:
                continue
            if not all(slot in self.fixed for slot in step.reads):
                continue
            result = step.func(*fill(list(step.args), self.fixed), **{n: fill(v, self.fixed) for n, v in step.kwargs})
            for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True):
                if slot >= 0:
                    self.fixed.setdefault(slot, tensor)


def _shape(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return "tensor"
    flat = isinstance(result, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in result)
    return "flat" if flat else "nested"


def _tensors_without_effect(recording: Recording, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors from before the first step, by slot; copies of those that calls write."""
    tensors = dict(recording.given) | dict(zip(recording.inputs, inputs, strict=True))
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    copies: dict[int, torch.UntypedStorage] = {}
    for slot, tensor in tensors.items():
        storage = recording.storage_of[slot]
        if storage in written:
            copy = copies.setdefault(storage, tensor.untyped_storage().clone())
            empty = torch.empty(0, dtype=tensor.dtype)
            tensors[slot] = empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensors
