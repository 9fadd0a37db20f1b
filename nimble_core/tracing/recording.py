"""The tensors and operators that re-issue the calls of a Program.

Tensors live in numbered slots. A recording holds the steps (calls, and the views and allocations between them) as
templates over slots; an ``Issuer`` runs them, in any order that a schedule allows, on whatever stream or thread the
device has made current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.allocations import Ask
from nimble_core.ir.program import Fuse, Origin, Program, Role, TensorRef
from nimble_core.torch_compat.dispatch import foreach_copy_
from nimble_core.tracing.pytree import Structure
from nimble_core.tracing.strides import widened
from nimble_core.utils.errors import NotStaticError

__all__ = [
    "Held",
    "Issuer",
    "Provenance",
    "Recording",
    "Rewritten",
    "Slot",
    "Step",
    "fill",
    "flat_tensors",
    "issuing",
    "places_of",
    "rewinding",
    "run_step",
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
class Held:
    """A read on the host of values that every run finds: they come from parameters, buffers and constants alone.

    Args:
        steps: those that lead to it, itself the last.
        given: tensors that they start from, by slot.
        where: the read, in words.
        fix: what to do where a replay cannot rely on it.
        found: what was read, as text.
        sources: name and tensor of each that was there before the run.
    """

    steps: tuple[Step, ...]
    given: Mapping[int, torch.Tensor]
    where: str
    fix: str
    found: str = ""
    sources: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def names(self) -> str:
        """The tensors that it reads, in words."""
        return ", ".join(dict.fromkeys(name or "a tensor without a name" for name, _ in self.sources))

    def again(self) -> tuple[Any, str]:
        """Return what the read finds now, also as text with all numbers of tensors."""
        tensors, result = dict(self.given), None
        for step in self.steps:
            result = run_step(step, tensors)
        return result, repr([one.tolist() for one in flat_tensors(result)] or result)


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
        unseen: launches seen in the recording capture that come from no call, on the host memory that was written and
            values that were computed by no call: the Program is incomplete.
        unseen_where: where they were, in words.
        refs: the window that each slot's tensor is, by slot.
        asks: what each call asks of the device's allocator, its results and what it frees again, such as libraries'
            workspaces; empty where that is not known.
        changed: attributes of the model that the run changed, and which were put back.
        counters: those of them that are no tensors before and after: numbers, flags, what is made in a first run.
        not_carried_on: why a replay computes something else than the model's next run, which reads a tensor that this
            run put in place of another; None where it replaced none that it reads.
        drawn: generators of Python and numpy that the run drew from, by name.
        handed_out: where memory that may follow the inputs was given to numpy or the like, or its numbers were read,
            in words; empty if nowhere.
        unset: slots of results that hold whatever was in their memory: seeds of dropout where nothing is dropped.
        held: reads on the host of values that come from the model's own tensors: replays repeat none.
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
    counters: tuple[str, ...] = ()
    not_carried_on: NotStaticError | None = None
    asks: tuple[tuple[Ask, ...], ...] = ()
    refs: tuple[TensorRef, ...] = ()
    unset: frozenset[int] = frozenset()
    handed_out: str = ""
    held: tuple[Held, ...] = ()
    drawn: tuple[str, ...] = ()

    @property
    def draws(self) -> tuple[str, ...]:
        """Generators that all threads share and that a run draws from, by name."""
        return (*self.drawn, *("torch" for one in self.program.storages if one.role == "generator"))

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The user's own, that operators were given to draw random numbers from."""
        given = (arg for step in self.steps for name, arg in step.kwargs if name == "generator" and arg is not None)
        return tuple(dict.fromkeys(given))


def rewinding(recording: Recording, inputs: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that puts counters back: integers that a run writes; None if there are none.

    Positions in a cache are counters: many replays of one input would count them out of range, which ends the process's
    use of a GPU. Of the model's own tensors only those count that other calls read.
    """
    calls = recording.program.calls
    counters = {recording.program.inputs[at].storage: inputs[at] for at in recording.written_inputs}
    own = {recording.storage_of[slot]: tensor for slot, tensor in recording.given.items() if not _floats(tensor)}
    written = {ref.storage for call in calls for ref in call.writes if ref.storage in own} if own else set()
    for call in calls if written else ():
        others = written - {ref.storage for ref in call.writes}
        counters |= {ref.storage: own[ref.storage] for ref in call.reads if ref.storage in others}
    live = [tensor for tensor in counters.values() if not _floats(tensor)]
    return partial(foreach_copy_, live, [tensor.clone() for tensor in live]) if live else None


def _floats(tensor: torch.Tensor) -> bool:
    """Whether it holds no counter that can be put back: inference tensors cannot be written here."""
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_inference()


def slots_in(args: Sequence[Any]) -> Iterator[int]:
    """Slot numbers in a template, in order."""
    for arg in args:
        if type(arg) is Slot:
            yield arg.index
        elif isinstance(arg, (list, tuple)):
            yield from slots_in(arg)


class Issuer:
    """Runs the steps of one recording over its own tensors. An input may be a corner of what was: the rest is zeros."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor]) -> None:
        self.recording = recording
        self.tensors: list[torch.Tensor | None] = [None] * recording.slots
        for slot, tensor in recording.given.items():
            self.tensors[slot] = tensor
        for slot, ref, tensor in zip(recording.inputs, recording.program.inputs, inputs, strict=True):
            self.tensors[slot] = widened(tensor, ref.sizes)
        self.steps: list[Step] = [step for step in recording.steps if step.call is not None]
        """The step of each call."""
        self._maker = {
            slot: step for step in recording.steps if step.call is None for slot in step.outputs if slot >= 0
        }
        self._slots_of_storage: dict[int, list[int]] = {}
        for slot, storage in enumerate(recording.storage_of):
            self._slots_of_storage.setdefault(storage, []).append(slot)

    def issue(self, call: int) -> None:
        """Run one call, after the host steps that it needs."""
        self.ready(call)
        self._run(self.steps[call])

    def skip(self, call: int) -> None:
        """Put zeros in place of what one call would make or write; what exists outside of the program stays."""
        step, recording = self.steps[call], self.recording
        refs, written = recording.refs, recording.program.calls[call].writes
        self.ready(call)
        outside = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)}
        for slot in step.reads:
            tensor = self.tensors[slot]
            if tensor is not None and refs[slot] in written and recording.storage_of[slot] not in outside:
                tensor.zero_()
        device = next(tensor.device for slot in step.reads if (tensor := self.tensors[slot]) is not None)
        for slot in step.outputs:
            if slot >= 0:
                self.tensors[slot] = _zeros(refs[slot], device)

    def ready(self, call: int) -> None:
        """Run the host steps that a call needs."""
        for slot in sorted(self.steps[call].reads):  # in the order in which they were made: memory is planned in it
            if self.tensors[slot] is None:
                self._make(slot)

    def outputs(self) -> list[torch.Tensor]:
        """Return the output tensors; valid once all calls were issued."""
        found = map(self.output, self.recording.outputs)
        return [tensor for tensor in found if tensor is not None]

    def output(self, slot: int) -> torch.Tensor | None:
        """Return the output tensor of one slot; valid once the calls that make it were issued."""
        if self.tensors[slot] is None:
            self._make(slot)
        return self.tensors[slot]

    def release(self, storage: int) -> None:
        """Drop every tensor on ``storage``."""
        for slot in self._slots_of_storage.get(storage, ()):
            self.tensors[slot] = None

    def tensor_on(self, storage: int) -> torch.Tensor | None:
        """Return any tensor on ``storage`` that exists now."""
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
        run_step(step, self.tensors)


def run_step(step: Step, tensors: Any) -> Any:
    """Run one step on ``tensors``, by slot, and add its results to them; returns what the operator does."""
    result = step.func(*[fill(arg, tensors) for arg in step.args], **{k: fill(v, tensors) for k, v in step.kwargs})
    if not step.outputs:
        return result
    returned = [result] if isinstance(result, torch.Tensor) else flat_tensors(result)
    for slot, tensor in zip(step.outputs, returned, strict=True):
        if slot >= 0:
            tensors[slot] = tensor
    return result


def _zeros(ref: TensorRef, device: torch.device) -> torch.Tensor:
    """Return zeros with the layout of ``ref``, in memory of their own."""
    reach = sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides, strict=True))
    length = 0 if 0 in ref.sizes else 1 + reach
    return torch.zeros(length, dtype=getattr(torch, ref.dtype), device=device).as_strided(ref.sizes, ref.strides)


def fill(arg: Any, tensors: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]) -> Any:
    """Return ``arg`` with tensors in place of its slots."""
    if type(arg) is Slot:
        return tensors[arg.index]
    if type(arg) in (list, tuple):
        return type(arg)(fill(item, tensors) for item in arg)
    return arg


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's result, in order, without ``None`` and numbers."""
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
    """Return where each of ``flat_tensors`` lies in an operator's result, as indices to take one after the other.

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
    """Run recorded operators inside without autograd and autocast, whose casts were recorded."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield


Provenance = Callable[[Any, FrameType], tuple[tuple[Origin, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A function that computes the same as the model by other calls.

    Args:
        fuse: whose kernels it runs.
        run: from input tensors to output tensors, in the order of the eager Program's.
        provenance: ``(origins, eager calls)`` of the call that is being issued, from the operator and the frame that
            issues it.
        owned: ``(role, name, tensor)`` of constants, and of what the model is known to own.
    """

    fuse: Fuse
    run: Callable[..., Sequence[torch.Tensor]]
    provenance: Provenance
    owned: Sequence[tuple[Role, str, torch.Tensor]] = ()
