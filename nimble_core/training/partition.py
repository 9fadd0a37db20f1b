"""A recording of forward and backward, cut in two that share what the forward saves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nimble_core.ir.allocations import Ask
from nimble_core.ir.program import Access, Call, Program, Storage, TensorRef
from nimble_core.tracing.pytree import Constant
from nimble_core.tracing.recording import Recording, Step
from nimble_core.utils.errors import CaptureError

__all__ = ["Halves", "halve"]


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward of one recording.

    Args:
        forward: from the first ``inputs`` inputs to the first ``outputs`` outputs, followed by what is saved.
        backward: from the other inputs, followed by what is saved, to the other outputs.
        saved_outputs: how many of the saved tensors the forward makes: its last outputs.
        saved_inputs: positions of the forward's inputs that the backward reads as well, saved last.
    """

    forward: Recording
    backward: Recording
    saved_outputs: int
    saved_inputs: tuple[int, ...]

    def with_saved(self, saved: Sequence[torch.Tensor]) -> Recording:
        """Put ``saved`` tensors, at their fixed addresses, in the place of the backward's last inputs."""
        recording = self.backward
        count = len(saved)
        slots = recording.inputs[len(recording.inputs) - count :]
        storages = list(recording.program.storages)
        for slot in slots:
            home = recording.storage_of[slot]
            storages[home] = replace(storages[home], role="constant")
        kept = len(recording.inputs) - count
        program = replace(recording.program, storages=tuple(storages), inputs=recording.program.inputs[:kept])
        return replace(
            recording,
            program=program,
            given={**recording.given, **dict(zip(slots, saved, strict=True))},
            inputs=recording.inputs[:kept],
        )


def halve(recording: Recording, inputs: int, outputs: int) -> Halves:
    """Cut where the first call of the phase ``"backward"`` is. O(steps).

    Args:
        recording: of a function whose first ``inputs`` inputs and first ``outputs`` outputs are the forward's.
        inputs: how many.
        outputs: how many.

    Raises:
        CaptureError: the forward reads an input of the backward, or a call of the forward follows the backward's first.
    """
    calls = recording.program.calls
    cut = next((call.index for call in calls if call.phase == "backward"), len(calls))
    late = next((call for call in calls[cut:] if call.phase != "backward"), None)
    if late is not None:
        raise CaptureError("a call of the forward follows the backward's first", where=str(late))
    position_of = {slot: position for position, slot in enumerate(recording.inputs)}
    ahead, behind = ([one for one in recording.steps if _is_call(one, *of)] for of in ((0, cut), (cut, len(calls))))

    wanted_behind = [*_reads(behind), *recording.outputs[outputs:]]
    used, between = _traced_back(recording, wanted_behind, cut)
    made = [slot for slot in used if slot not in position_of]
    also = [slot for slot in used if position_of.get(slot, inputs) < inputs]
    wanted_ahead = [*_reads(ahead), *recording.outputs[:outputs], *made]
    reads_ahead, before = _traced_back(recording, wanted_ahead, 0)
    if any(position_of.get(slot, 0) >= inputs for slot in reads_ahead):
        raise CaptureError("the forward reads the gradient of an output")
    forward = _part(
        recording,
        [step for step in recording.steps if _is_call(step, 0, cut) or id(step) in before],
        recording.inputs[:inputs],
        (*recording.outputs[:outputs], *made),
    )
    backward = _part(
        recording,
        [step for step in recording.steps if _is_call(step, cut, len(calls)) or id(step) in between],
        (*recording.inputs[inputs:], *made, *also),
        recording.outputs[outputs:],
    )
    return Halves(forward, backward, len(made), tuple(position_of[slot] for slot in also))


def _reads(steps: Iterable[Step]) -> Iterator[int]:
    return (slot for step in steps for slot in step.reads)


def _traced_back(recording: Recording, wanted: Iterable[int], first: int) -> tuple[list[int], set[int]]:
    """Trace slots back to where they come from, through steps that are no calls.

    Args:
        recording: of forward and backward.
        wanted: slots that are read.
        first: what calls before this one make is found; what later ones make is left out.

    Returns:
        Slots that inputs and calls before ``first`` make, in order, and the ids of the steps between.
    """
    maker = {slot: step for step in recording.steps for slot in step.outputs if slot >= 0}
    filled = {ref.storage for call in recording.program.calls[:first] for ref in call.writes}
    found: dict[int, None] = {}
    steps: set[int] = set()
    pending, seen = list(wanted), set()
    while pending:
        slot = pending.pop()
        if slot in seen or slot in recording.given:
            continue
        seen.add(slot)
        step = maker.get(slot)
        if step is None or (step.call is not None and step.call < first):
            found[slot] = None
        elif step.call is None:
            fresh = all(recording.storage_of[read] != recording.storage_of[slot] for read in step.reads)
            if fresh and recording.storage_of[slot] in filled:
                found[slot] = None  # memory that the forward has filled
            else:
                steps.add(id(step))
                pending += step.reads
    return sorted(found), steps


def _is_call(step: Step, first: int, end: int) -> bool:
    """Whether this step is one of the calls from ``first`` to before ``end``."""
    return step.call is not None and first <= step.call < end


def _part(recording: Recording, steps: Sequence[Step], inputs: Sequence[int], outputs: Sequence[int]) -> Recording:
    """Make a recording of some of the steps; calls and storages are numbered anew, slots are not."""
    program = recording.program
    old = [step.call for step in steps if step.call is not None]
    touched = [access.ref.storage for call in old for access in program.calls[call].accesses]
    slots = dict.fromkeys(slot for step in steps for slot in (*step.reads, *step.outputs) if slot >= 0)
    homes = [recording.storage_of[slot] for slot in (*slots, *inputs, *outputs)]
    number = {storage: index for index, storage in enumerate(sorted({*touched, *homes}))}
    storages = [program.storages[storage] for storage in number]
    for slot in inputs:
        home = number[recording.storage_of[slot]]
        if storages[home].role == "intermediate":
            storages[home] = Storage(storages[home].nbytes, "input", f"saved {slot}")
    calls = tuple(_renumbered(program.calls[call], index, number) for index, call in enumerate(old))
    anew = {call: index for index, call in enumerate(old)}
    refs = tuple(_moved(ref, number) if ref.storage in number else ref for ref in recording.refs)
    part = Program(
        calls=calls,
        storages=tuple(storages),
        inputs=tuple(refs[slot] for slot in inputs),
        outputs=tuple(refs[slot] for slot in outputs),
        host_steps=sum(step.call is None for step in steps),
        device=program.device,
        notes=program.notes,
        fuse=program.fuse,
        choices=program.choices,
    )
    written = {ref.storage for call in calls for ref in call.writes}
    return Recording(
        program=part,
        steps=tuple(replace(step, call=None if step.call is None else anew[step.call]) for step in steps),
        slots=recording.slots,
        storage_of=tuple(number.get(home, -1) for home in recording.storage_of),
        given={slot: tensor for slot, tensor in recording.given.items() if slot in slots or slot in outputs},
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        output_structure=Constant(None),
        written_inputs=tuple(
            position for position, slot in enumerate(inputs) if number[recording.storage_of[slot]] in written
        ),
        unseen=recording.unseen,
        unseen_where=recording.unseen_where,
        changed=recording.changed,
        asks=tuple(_renamed(recording.asks[call], number) for call in old) if recording.asks else (),
        refs=refs,
        unset=recording.unset,
    )


def _renamed(asks: Sequence[Ask], number: Mapping[int, int]) -> tuple[Ask, ...]:
    return tuple(ask if ask.storage is None else replace(ask, storage=number.get(ask.storage)) for ask in asks)


def _renumbered(call: Call, index: int, number: Mapping[int, int]) -> Call:
    def named(text: str) -> str:
        return re.sub(r"%(\d+)", lambda found: f"%{number.get(int(found[1]), found[1])}", text)

    return replace(
        call,
        index=index,
        arguments=tuple((name, named(text)) for name, text in call.arguments),
        accesses=tuple(Access(_moved(access.ref, number), access.write) for access in call.accesses),
    )


def _moved(ref: TensorRef, number: Mapping[int, int]) -> TensorRef:
    return replace(ref, storage=number[ref.storage])
