"""From a model to executables: record → graph → costs → schedule → check → capture, one step a line.

``Nimble`` and ``compare`` both go this way; each step is timed under the name it has here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.check import check_schedule
from nimble_core.costs import Costs, uniform_costs
from nimble_core.devices.base import Device, Executable, Observation
from nimble_core.errors import CaptureError, DeviceError, InputError, NotStaticError
from nimble_core.graph import CallGraph, build_graph
from nimble_core.measurement import Measurement, interleave
from nimble_core.options import Options
from nimble_core.policies import resolve_policy
from nimble_core.preserve import random_state_kept
from nimble_core.record import announced
from nimble_core.schedule import Schedule
from nimble_core.signature import Signature
from nimble_core.static import changed_constant, check_static, other_values
from nimble_core.structure import builder
from nimble_core.units import format_bytes

if TYPE_CHECKING:
    from nimble_core.recording import Recording

__all__ = [
    "Plan",
    "Recorded",
    "Stopwatch",
    "capture",
    "choose",
    "device_for",
    "observe",
    "plan",
    "record_static",
    "state_kept",
]

_OBSERVED_CALLS = 6_000
_OTHER_SEED = 20_001

Step = Callable[[str], AbstractContextManager[Any]]


@dataclass(slots=True)
class Stopwatch:
    """Times named steps: ``with watch("record"): …``; ``seconds`` keeps them in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside under ``name``; the same name adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Recorded:
    """A model on example inputs: its recording and hazards."""

    model: Callable[..., Any]
    signature: Signature
    recording: Recording
    graph: CallGraph

    @property
    def whole(self) -> bool:
        """Whether the Program is incomplete, so that only the module as a whole can be captured."""
        return self.recording.unseen > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked schedule and what it runs as."""

    schedule: Schedule
    executable: Executable


def device_for(device: torch.device) -> Device:
    """The Device that runs tensors on ``device``. Raises InputError for kinds that are not supported."""
    if device.type == "cuda":
        from nimble_core.devices.cuda import CudaDevice

        return CudaDevice(device)
    if device.type == "cpu":
        from nimble_core.devices.host import HostDevice

        return HostDevice()
    raise InputError(f"inputs are on {device}: only cuda and cpu are supported", fix="move model and inputs")


def require_callable(model: object) -> None:
    """Raise InputError unless ``model`` is a module or another callable (a class does not count)."""
    if not callable(model) or isinstance(model, type):
        raise InputError(
            f"expected a torch.nn.Module or a function, given {type(model).__name__}"
            + (f" {model.__name__} itself" if isinstance(model, type) else ""),
            fix="pass an instance: model = Model(); prepare or compare that",
        )


def check_inputs(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Signature of the inputs. Raises InputError for what is no model, no input, or mixed devices."""
    require_callable(model)
    signature = Signature(args, kwargs)
    for name, parameter in getattr(model, "named_parameters", lambda: ())():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise InputError(f"parameter {name} is not initialised", fix="run the model once on an example input first")
        if parameter.device != signature.device:
            raise InputError(
                f"mixed devices: parameter {name} is on {parameter.device}, {signature.paths[0]} on {signature.device}",
                fix=f"model.to({str(signature.device)!r}), or move the inputs to {parameter.device}",
            )
    return signature


def record_static(
    device: Device,
    model: Callable[..., Any],
    signature: Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    strict: bool,
    step: Step,
) -> Recorded:
    """Record twice, on other input values the second time, and build the hazards.

    Raises:
        NotStaticError: the recordings differ.
        CaptureError: a call that cannot be captured; under ``strict`` also launches that were not seen.
    """
    with step("record"):
        recording, capturing = _record_as_eager(device, model, signature, args, kwargs)
    with step("record again"):
        build = builder(signature.structure)
        again_args, again_kwargs = build(other_values(signature.tensors))
        again = Signature(again_args, again_kwargs)
        with random_state_kept(signature.device), announced(capturing):
            random.seed(_OTHER_SEED)  # a branch on Python's random numbers shows as well
            second = device.record(model, again, again_args, again_kwargs)
        check_static(recording.program, second.program)
        recording = _hold_to_seen(device, recording, second)
    if recording.unseen and strict:
        raise CaptureError(
            f"{recording.unseen} launches belong to no call that was seen",
            where=recording.unseen_where,
            fix="Options(strict=False) captures the module as a whole, on one stream",
        )
    with step("hazards"):
        graph = build_graph(recording.program)
    return Recorded(model, signature, recording, graph)


def _record_as_eager(
    device: Device, model: Callable[..., Any], signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Recording, bool]:
    """A recording of eager's branch if it can be captured, else of the one that libraries keep for captures.

    Also whether the model was told that it is being captured.
    """
    try:
        with announced(False):
            return device.record(model, signature, args, kwargs), False
    except CaptureError as error:
        refused = error
    with announced(True):
        recording = device.record(model, signature, args, kwargs)
    note = f"a replay takes the branch that the model keeps for captures: in eager {refused.what} ({refused.where})"
    program = replace(recording.program, notes=(*recording.program.notes, note))
    return replace(recording, program=program), True


def _hold_to_seen(device: Device, recording: Recording, second: Recording) -> Recording:
    """Refuse, or on the host mark as incomplete, a recording with a value that was computed out of sight."""
    where = "" if recording.unseen else changed_constant(recording, second)
    if not where:
        return recording
    if device.kind == "cuda":
        raise NotStaticError(
            "a value that was computed outside of torch changes from run to run",
            where=where,
            fix="compute it with torch on the device, or pass it as an input",
        )
    return replace(recording, unseen=1, unseen_where=f"before {where}")


def whole_note(device: Device, recorded: Recorded) -> str:
    """Why the model is not replayed call by call, and what is done instead."""
    done = "captured as a whole, on one stream" if device.kind == "cuda" else "called as it is, without autograd"
    return f"{done}: not every launch or value was seen ({recorded.recording.unseen_where})"


@contextmanager
def state_kept(recorded: Recorded) -> Iterator[None]:
    """Put back, at the end, what replays inside write: parameters, buffers, example inputs, random state.

    Replays run for real on the model's own tensors (BatchNorm in training mode updates its statistics).
    """
    recording = recorded.recording
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    live = [tensor for slot, tensor in recording.given.items() if recording.storage_of[slot] in written]
    live += [recorded.signature.tensors[position] for position in recording.written_inputs]
    saved = [(tensor.detach(), tensor.detach().clone()) for tensor in live]
    with random_state_kept(recorded.signature.device):
        try:
            yield
        finally:
            for tensor, value in saved:
                tensor.copy_(value)


def capture(device: Device, recorded: Recorded, schedule: Schedule, *, memory_limit: int | None = None) -> Plan:
    """Check ``schedule`` and capture it. Raises ScheduleError, CaptureError, DeviceError."""
    check_schedule(recorded.graph, schedule, recorded.recording.program)
    executable = device.capture(recorded.recording, schedule, recorded.signature.tensors)
    if memory_limit is not None and executable.nbytes > memory_limit:
        nbytes = executable.nbytes
        executable.close()
        raise DeviceError(
            f"the engine holds {format_bytes(nbytes)}, more than memory_limit={format_bytes(memory_limit)}",
            fix="raise the limit, or cap streams with Options(max_streams=...)",
        )
    return Plan(schedule, executable)


def plan(recorded: Recorded, policy: Any, costs: Costs | None, max_streams: int | None) -> Schedule:
    """Schedule by ``policy`` (name or callable); without costs every call counts the same."""
    known = costs or uniform_costs(recorded.graph.size)
    schedule = resolve_policy(policy)(recorded.graph, known, max_streams=max_streams)
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"policy {policy!r} returned a {type(schedule).__name__}",
            fix="return what nimble_core.policies.plan_streams does",
        )
    return schedule


def observe(device: Device, recorded: Recorded, executable: Executable, *, seconds: float = 1.0) -> Observation:
    """Watch replays for about ``seconds``: 3 to 11 of them, fewer of a large model, whose records take time to read."""
    executable.replay()
    device.synchronize()
    start = device.clock_ns()
    executable.replay()
    device.synchronize()
    once_s = max(device.clock_ns() - start, 1) / 1e9
    replays = min(11, seconds / once_s, _OBSERVED_CALLS / max(recorded.graph.size, 1))
    return device.observe(executable, recorded.recording, max(int(replays), 3))


def _interrupt() -> None:
    raise KeyboardInterrupt


def choose(device: Device, plans: Sequence[Plan], options: Options) -> tuple[Plan, Mapping[str, Measurement]]:
    """The fastest plan by measured replays; ties within 1% go to fewer streams."""
    if len(plans) == 1 or options.tune == "off":
        return plans[-1], {}
    rounds = 9 if options.tune == "fast" else 101
    taken = interleave(
        {one.schedule.policy: one.executable.replay for one in plans},
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        rounds=rounds,
        budget_s=options.budget_s,
        on_interrupt=_interrupt,
    )
    fastest = min(one.median_ns for one in taken.values())
    close = [one for one in plans if taken[one.schedule.policy].median_ns <= fastest * 1.01]
    return min(close, key=lambda one: one.schedule.streams), taken
