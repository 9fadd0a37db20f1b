"""From a recorded model to an executable: schedule → check → memory → capture → check, one step a line.

``Nimble`` and ``compare`` both go this way; ``autotune`` says how often.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from operator import gt
from typing import Any

import torch

from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Observation
from nimble_core.runtime.device import Device, Executable, PlacementError
from nimble_core.scheduling.memory_limit import limit_memory
from nimble_core.scheduling.memory_planner import MemoryPlan, Needs, check_memory, plan_memory, reuse_hazards
from nimble_core.scheduling.memory_requirements import SMALL_NBYTES, Layout
from nimble_core.scheduling.policies import resolve_policy
from nimble_core.scheduling.verify_capture import check_emitted
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.recorded import MATERIALISE, Recorded, may_be_spoilt, written_or_returned
from nimble_core.utils.errors import DeviceError, InputError, ScheduleError
from nimble_core.utils.units import format_bytes

__all__ = [
    "capture",
    "device_for",
    "observe",
    "schedule_by",
]

_OBSERVED_CALLS = 6_000
_PLANNED_STORAGES = 20_000
"""Above this, planning memory would take longer than recording: the device reuses it on each stream instead."""
_LIMIT_ATTEMPTS = 3


def device_for(device: torch.device) -> Device:
    """Return the Device that runs tensors on ``device``. Raises InputError for kinds that are not supported."""
    if device.type == "cuda":
        from nimble_core.runtime.cuda.device import CudaDevice

        return CudaDevice(device)
    if device.type == "cpu":
        from nimble_core.runtime.host.device import HostDevice

        return HostDevice()
    raise InputError(
        f"inputs are on {device}: only cuda and cpu are supported",
        fix=MATERIALISE if device.type == "meta" else "move model and inputs",
    )


def schedule_by(recorded: Recorded, policy: Any, costs: Costs | None, max_streams: int | None) -> Schedule:
    """Schedule by ``policy`` (name or callable); without costs every call counts the same."""
    known = costs or uniform_costs(recorded.graph.size)
    schedule = resolve_policy(policy)(recorded.graph, known, max_streams=max_streams)
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"policy {policy!r} returned a {type(schedule).__name__}",
            fix="return what nimble_core.scheduling.policies.plan_streams does",
        )
    return schedule


def capture(
    device: Device,
    recorded: Recorded,
    schedule: Schedule,
    *,
    memory_limit: int | None = None,
    costs: Costs | None = None,
) -> Executable:
    """Check ``schedule``, plan its memory, capture it, and prove on the captured graph that nothing races.

    Args:
        device: where.
        recorded: the model.
        schedule: what a policy made.
        memory_limit: bytes the engine may hold; order is added where that saves enough, so that the executable's
            schedule may be another.
        costs: duration of each call, for choosing where to add order.

    Raises:
        ScheduleError: the schedule, its memory or the captured graph would race.
        CaptureError: a call that cannot be issued again.
        DeviceError: out of memory, or more than the limit.
    """
    check_schedule(recorded.graph, schedule, recorded.recording.program)
    if memory_limit is None:
        return _captured(device, recorded, schedule, None, 0, costs)[0]
    held = unplanned = 0
    for _ in range(_LIMIT_ATTEMPTS):
        executable, planned = _captured(device, recorded, schedule, memory_limit, unplanned, costs)
        if executable.nbytes <= memory_limit:
            return executable
        # What torch's allocator keeps beside the plan is known only now.
        held, unplanned = executable.nbytes, executable.nbytes - planned
        executable.close()
        if not planned:
            break
    raise DeviceError(
        f"the engine holds {format_bytes(held)}, more than memory_limit={format_bytes(memory_limit)}",
        fix="raise the limit, or prepare smaller inputs",
    )


def _captured(
    device: Device,
    recorded: Recorded,
    schedule: Schedule,
    limit: int | None,
    unplanned: int,
    costs: Costs | None,
) -> tuple[Executable, int]:
    """Plan memory, capture, and look for races in the captured graph; also the bytes that were planned."""
    recording, inputs = recorded.recording, recorded.signature.tensors
    program = recording.program
    while True:
        ordered, layout, memory = _with_memory(device, recorded, schedule, limit, unplanned, costs)
        try:
            with device.libraries_tuned() if program.fuse != "none" else nullcontext():
                executable = device.capture(recording, ordered, inputs, layout, memory)
        except PlacementError:
            continue  # the device asks for less now
        break
    try:
        if executable.raw is not None and executable.raw.owner:
            reused = reuse_hazards(layout.sized(program), ordered, memory) if layout and memory else ()
            shared = (pair for chain in (layout.chains if layout else ()) for pair in pairwise(chain))
            check_emitted(ordered, executable.raw, (*recorded.graph.edges, *reused, *shared), program)
    except BaseException:
        executable.close()
        raise
    return executable, memory.held_nbytes + _beside(layout) if layout and memory else 0


def _beside(layout: Layout) -> int:
    """Return the bytes that a layout asks for beside arena and scratch."""
    kept = layout.front_nbytes + layout.kept_nbytes
    return kept + layout.cells_nbytes + layout.staggered_nbytes + layout.beside_nbytes


def _with_memory(
    device: Device,
    recorded: Recorded,
    schedule: Schedule,
    limit: int | None,
    unplanned: int,
    costs: Costs | None,
    *,
    stagger: bool = True,
) -> tuple[Schedule, Layout | None, MemoryPlan | None]:
    """Plan where storages lie, and add order if a limit asks for it: checked.

    ``unplanned`` bytes are known to be held beside all that is planned. Workspaces are staggered if there is room.
    """
    program = recorded.recording.program
    layout = device.lay_out(recorded.recording, schedule, stagger=stagger)
    if layout is None or len(program.storages) > _PLANNED_STORAGES:
        return schedule, None, plan_memory(program, schedule, place=())
    layout = _borrowing(layout, recorded)
    program = layout.sized(program)
    memory = plan_memory(program, schedule, needs=layout.needs, place=layout.arena)
    beside = _beside(layout) + unplanned
    if limit is not None and memory.held_nbytes + beside > limit:
        if layout.staggered_nbytes:
            return _with_memory(device, recorded, schedule, limit, unplanned, costs, stagger=False)
        schedule, layout, memory = _with_less_memory(device, recorded, schedule, layout, limit, beside, costs)
    check_memory(program, schedule, memory)
    return schedule, layout, memory


def _with_less_memory(
    device: Device,
    recorded: Recorded,
    schedule: Schedule,
    layout: Layout,
    limit: int,
    beside: int,
    costs: Costs | None,
) -> tuple[Schedule, Layout, MemoryPlan]:
    """Add order to ``schedule`` until its memory, and ``beside`` bytes, stay within the limit."""
    program = layout.sized(recorded.recording.program)
    try:
        schedule, memory = limit_memory(
            recorded.graph,
            program,
            schedule,
            max(limit - beside, 0),
            costs=costs or uniform_costs(recorded.graph.size),
            device=device.model,
            needs=layout.needs,
            place=layout.arena,
        )
    except ScheduleError as error:
        raise DeviceError(
            f"memory_limit={format_bytes(limit)} is too little: {error.what}; beside it there are "
            f"{format_bytes(beside)} of inputs, constants and what the allocator keeps",
            fix="raise the limit, or prepare smaller inputs",
        ) from error
    check_schedule(recorded.graph, schedule, program)
    layout = _borrowing(device.lay_out(recorded.recording, schedule, stagger=False) or layout, recorded)
    too_small = any(
        memory.offsets[storage] < 0 or program.storages[storage].nbytes < nbytes
        for storage, nbytes in layout.arena.items()
    )
    if too_small or any(map(gt, layout.workspaces, memory.needs.workspaces)):
        raise DeviceError(
            f"memory_limit={format_bytes(limit)} cannot be kept: in the order that it asks for, a call allocates "
            "its results in another order",
            fix="raise the limit, or prepare without one",
        )
    scratch = plan_memory(program, schedule, needs=Needs(layout.scratch), place=())
    memory = replace(
        memory,
        needs=replace(memory.needs, scratch=layout.scratch),
        scratch_offsets=scratch.scratch_offsets,
        scratch_nbytes=scratch.scratch_nbytes,
    )
    return schedule, layout, memory


def _borrowing(layout: Layout, recorded: Recorded) -> Layout:
    """Return the layout with lent memory, if there is any; buffers for inputs may lie there as well."""
    program, lender = recorded.recording.program, recorded.lender
    if lender is None:
        return layout
    stays = written_or_returned(program)
    uses = Counter(ref.storage for ref in program.inputs)
    inputs = {
        ref.storage: ref.nbytes
        for ref, tensor in zip(program.inputs, recorded.signature.tensors, strict=True)
        if program.storages[ref.storage].nbytes == ref.nbytes > SMALL_NBYTES
        and may_be_spoilt(tensor)
        and uses[ref.storage] == 1
        and ref.storage not in stays
    }
    return replace(
        layout,
        lent=lender.to(recorded.recording),
        lent_address=lender.memory.data_ptr(),
        inputs=tuple(sorted(inputs)),
        beside_nbytes=layout.beside_nbytes - sum(inputs.values()),
    )


def observe(device: Device, recorded: Recorded, executable: Executable, *, seconds: float = 1.0) -> Observation:
    """Watch replays for about ``seconds``: 3 to 11 of them, fewer of a large model, whose records take time to read.

    Where kernels are launched ahead, as many again without, for what calls cost.
    """
    executable.replay()
    device.synchronize()
    start = device.clock_ns()
    executable.replay()
    device.synchronize()
    once_s = max(device.clock_ns() - start, 1) / 1e9
    replays = min(11, seconds / once_s, _OBSERVED_CALLS / max(recorded.graph.size, 1))
    return device.observe(executable, recorded.recording, max(int(replays), 3))
