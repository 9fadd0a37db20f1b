"""The Program's effectful twin: the tensors and operators that re-issue its calls.

Tensors live in numbered slots. A recording holds the steps (calls, and the views and allocations between them) as
templates over slots; an ``Issuer`` runs them, in any order that a schedule allows, on whatever stream or thread the
device has made current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nimble_core.ir.allocations import Ask
from nimble_core.ir.program import Program, TensorRef
from nimble_core.tracing.pytree import Structure
from nimble_core.tracing.strides import widened

__all__ = [
    "Issuer",
    "Recording",
    "Slot",
    "Step",
    "fill",
    "flat_tensors",
    "issuing",
    "places_of",
    "slots_in",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in a step's arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operator as it was called.

    Args:
        func: the operator; called with ``args`` and ``kwargs`` after slots are replaced by tensors.
        args: positional arguments; ``Slot`` stands for a tensor, lists may hold slots.
        kwargs: keyword arguments, likewise.
        outputs: slot of each tensor returned (flattened), -1 where it is an argument returned.
        reads: slots among the arguments.
        call: index of the call it is, None for a host step.
        places: where each tensor lies in what is returned, as ``places_of``: operators leave out results that nobody
            asked for.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    reads: tuple[int, ...]
    call: int | None
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """What one run of a model did, ready to be re-issued.

    Args:
        program: the calls as values.
        steps: all steps in program order, host steps among them.
        slots: number of slots.
        storage_of: storage index of each slot.
        given: tensors that exist before the first step (parameters, buffers, constants), by slot. They are aliases:
            the memory stays valid even if the model lets go of it.
        inputs: slot of each input tensor.
        outputs: slot of each output tensor.
        output_structure: what is around the outputs.
        written_inputs: positions of inputs that the model writes in place.
        unseen: launches seen in the recording capture that belong to no call, on the host memory that was written and
            values that were computed by no call: the Program is incomplete.
        unseen_where: where they were, in words.
        refs: the window that each slot's tensor is, by slot.
        asks: what each call asks of the device's allocator, its results and what it frees again, such as libraries'
            workspaces; empty where that is not known.
        changed: attributes of the model that the run changed, and which were put back.
        handed_out: where memory that may follow the inputs was given to numpy or the like, or its numbers were read,
            in words; empty if nowhere.
        unset: slots of results that hold whatever was in their memory: seeds of dropout where nothing is dropped.
    """

    program: Program
    steps: tuple[Step, ...]
    slots: int
    storage_of: tuple[int, ...]
    given: dict[int, torch.Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_structure: Structure
    written_inputs: tuple[int, ...] = ()
    unseen: int = 0
    unseen_where: str = ""
    changed: tuple[str, ...] = ()
    asks: tuple[tuple[Ask, ...], ...] = ()
    refs: tuple[TensorRef, ...] = ()
    unset: frozenset[int] = frozenset()
    handed_out: str = ""

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The user's own, that operators were given to draw random numbers from."""
        given = (arg for step in self.steps for name, arg in step.kwargs if name == "generator" and arg is not None)
        return tuple(dict.fromkeys(given))


def slots_in(args: Sequence[Any]) -> Iterator[int]:
    """Slot numbers in a template, in order."""
    for arg in args:
        if type(arg) is Slot:
            yield arg.index
        elif isinstance(arg, (list, tuple)):
            yield from slots_in(arg)


class Issuer:
    """Runs the steps of one recording over its own tensors.

    Args:
        recording: what to run.
        inputs: one tensor per program input, or its corner: the rest is zeros then.
    """

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> None:
        self.recording = recording
        self.tensors: list[torch.Tensor | None] = [None] * recording.slots
        for slot, tensor in recording.given.items():
            self.tensors[slot] = tensor
        for slot, ref, tensor in zip(recording.inputs, recording.program.inputs, inputs, strict=True):
            self.tensors[slot] = widened(tensor, ref.sizes)
        self._calls: list[Step] = [step for step in recording.steps if step.call is not None]
        self._maker = {
            slot: step for step in recording.steps if step.call is None for slot in step.outputs if slot >= 0
        }
        self._slots_of_storage: dict[int, list[int]] = {}
        for slot, storage in enumerate(recording.storage_of):
            self._slots_of_storage.setdefault(storage, []).append(slot)

    def issue(self, call: int) -> None:
        """Run one call, after the host steps it needs."""
        step = self._calls[call]
        self._ready(step)
        self._run(step)

    def skip(self, call: int) -> None:
        """Zeros for what one call would make or write; what exists outside of the program stays as it is."""
        step, recording = self._calls[call], self.recording
        refs, written = recording.refs, recording.program.calls[call].writes
        self._ready(step)
        outside = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)}
        for slot in step.reads:
            tensor = self.tensors[slot]
            if tensor is not None and refs[slot] in written and recording.storage_of[slot] not in outside:
                tensor.zero_()
        device = next(tensor.device for slot in step.reads if (tensor := self.tensors[slot]) is not None)
        for slot in step.outputs:
            if slot >= 0:
                self.tensors[slot] = _zeros(refs[slot], device)

    def _ready(self, step: Step) -> None:
        for slot in sorted(step.reads):  # in the order in which they were made: memory is planned in it
            if self.tensors[slot] is None:
                self._make(slot)

    def outputs(self) -> list[torch.Tensor]:
        """The output tensors; valid once all calls were issued."""
        for slot in self.recording.outputs:
            if self.tensors[slot] is None:
                self._make(slot)
        found = [self.tensors[slot] for slot in self.recording.outputs]
        return [tensor for tensor in found if tensor is not None]

    def release(self, storage: int) -> None:
        """Let go of every tensor on ``storage``."""
        for slot in self._slots_of_storage.get(storage, ()):
            self.tensors[slot] = None

    def tensor_on(self, storage: int) -> torch.Tensor | None:
        """Any tensor on ``storage`` that exists now."""
        slots = self._slots_of_storage.get(storage, ())
        return next((tensor for slot in slots if (tensor := self.tensors[slot]) is not None), None)

    def _make(self, slot: int) -> None:
        pending = [self._maker[slot]]
        while pending:
            step = pending[-1]
            missing = [need for need in step.reads if self.tensors[need] is None]
            if missing:
                pending.extend(self._maker[need] for need in missing)
            else:
                self._run(step)
                pending.pop()

    def _run(self, step: Step) -> None:
        tensors = self.tensors
        result = step.func(*[fill(arg, tensors) for arg in step.args], **{k: fill(v, tensors) for k, v in step.kwargs})
        if not step.outputs:
            return
        returned = [result] if isinstance(result, torch.Tensor) else flat_tensors(result)
        for slot, tensor in zip(step.outputs, returned, strict=True):
            if slot >= 0:
                tensors[slot] = tensor


def _zeros(ref: TensorRef, device: torch.device) -> torch.Tensor:
    """Zeros that lie as ``ref`` does, in memory of their own."""
    reach = sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides, strict=True))
    length = 0 if 0 in ref.sizes else 1 + reach
    return torch.zeros(length, dtype=getattr(torch, ref.dtype), device=device).as_strided(ref.sizes, ref.strides)


def fill(arg: Any, tensors: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]) -> Any:
    """``arg`` with tensors for its slots."""
    if type(arg) is Slot:
        return tensors[arg.index]
    if type(arg) in (list, tuple):
        return type(arg)(fill(item, tensors) for item in arg)
    return arg


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """Tensors of an operator's result, in order; ``None`` and numbers left out."""
    if isinstance(result, torch.Tensor):
        return [result]
    found: list[torch.Tensor] = []
    if isinstance(result, (list, tuple)):
        for item in result:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += flat_tensors(item)
    return found


def places_of(result: Any) -> tuple[tuple[int, ...], ...]:
    """Where each of ``flat_tensors`` lies in an operator's result: the index to take, and of a list in it the next.

    >>> places_of((None, torch.ones(1), [torch.ones(1), torch.ones(1)]))
    ((1,), (2, 0), (2, 1))
    >>> places_of(torch.ones(1))
    ((),)
    """
    if isinstance(result, torch.Tensor):
        return ((),)
    if isinstance(result, (list, tuple)):
        return tuple((at, *place) for at, item in enumerate(result) for place in places_of(item))
    return ()


@contextmanager
def issuing(device_type: str) -> Iterator[None]:
    """Modes under which recorded operators run again: no autograd, no autocast (its casts were recorded)."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield
