"""Which storages of a recording are buffers of the replay, in one arena at planned offsets."""

from __future__ import annotations

from collections.abc import Collection

from nimble_core.runtime.host.constants import find_constants, output_storages
from nimble_core.runtime.host.out_variants import can_fill
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.tracing.recording import Recording

__all__ = ["lay_out_buffers", "made_by_step"]


def lay_out_buffers(recording: Recording) -> Layout:
    """Return the storages that calls can fill, and those allocated between calls, as a layout.

    Calls are given their results and allocate none of these: there are no blocks. Constants keep their memory.

    Complexity:
        Linear in steps.
    """
    program = recording.program
    constants = find_constants(recording)
    calls = len(program.calls)
    buffers = _buffers(recording, output_storages(recording) | constants.storages)
    return Layout(
        blocks=((),) * calls,
        arena={storage: program.storages[storage].nbytes for storage in buffers},
        scratch=(0,) * calls,
        beside_nbytes=constants.nbytes + sum(program.inputs[position].nbytes for position in recording.written_inputs),
    )


def made_by_step(recording: Recording) -> list[set[int]]:
    """Return the storages that each step makes."""
    storage_of = recording.storage_of
    known = {storage_of[slot] for slot in (*recording.given, *recording.inputs)}
    made = []
    for step in recording.steps:
        fresh = {storage_of[slot] for slot in step.outputs if slot >= 0} - known
        known |= fresh
        made.append(fresh)
    return made


def _buffers(recording: Recording, others: Collection[int]) -> list[int]:
    """Return the storages whose memory can be given to the step that makes them, but for ``others``."""
    found: set[int] = set()
    for step, fresh in zip(recording.steps, made_by_step(recording), strict=True):
        if step.call is None:
            found |= fresh - set(others)
        elif fresh and fresh.isdisjoint(others) and can_fill(step):
            found |= fresh
    storages = recording.program.storages
    return sorted(one for one in found if storages[one].nbytes and storages[one].role == "intermediate")
