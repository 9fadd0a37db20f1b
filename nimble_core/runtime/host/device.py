"""The host as a device: recorded ATen calls issued again, directly, one after the other.

Called what it is: host replay. There is no graph to launch; what is saved is the framework's work around the calls
(see ``codegen``). Whatever the streams of a schedule, calls run in program order on the caller's thread, since each
operator already uses all cores. So replays agree with eager bit for bit, and a call that raises leaves parameters,
buffers, inputs and random state as eager leaves them.

Memory: results that calls can be told to fill lie in one arena, at planned offsets (``memory_planner``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import quantile
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Lane, Observation, Span, Timeline
from nimble_core.profiling.machine import cpu_name, interruptions
from nimble_core.profiling.nvtx import capture_range, replays_marked
from nimble_core.runtime.device import Executable, Timed
from nimble_core.runtime.host.buffers import lay_out_buffers
from nimble_core.runtime.host.codegen import Code
from nimble_core.runtime.host.executable import HostExecutable, WholeExecutable
from nimble_core.runtime.host.prepared_steps import PreparedSteps
from nimble_core.scheduling.memory_planner import MemoryPlan, check_memory, plan_memory
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Recording, Rewritten, issuing
from nimble_core.tracing.rng_state import random_state_kept
from nimble_core.tracing.side_effects import rehearse
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError, first_line

if TYPE_CHECKING:
    from nimble_core.tracing.signature import Signature

__all__ = ["HostDevice", "HostExecutable", "WholeExecutable"]

_SETTLE_S = 0.02
"""Wait before observing: threads that spin for work after others computed have gone to sleep by then."""


class HostDevice:
    """Runs models on the CPU."""

    kind = "cpu"
    model = DeviceModel("host", per_call=1.0, crowd=sys.maxsize)
    """Calls side by side would take as long as one after the other, which is how they run."""

    def __init__(self) -> None:
        self.name = cpu_name()

    def stream_cap(self, asked: int | None) -> int | None:
        """Plan one stream unless more are asked for: calls run one after the other."""
        return asked or 1

    def clock_ns(self) -> float:
        """Read a monotonic clock, ns."""
        return float(time.perf_counter_ns())

    def interruptions(self) -> int:
        """Count how often another program took a core from this process since it started."""
        return interruptions()

    def synchronize(self) -> None:
        """Do nothing: a host replay has finished when it returns."""

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model; leave no trace in its state."""
        rehearse(model, args, kwargs)

    def record(
        self,
        model: Callable[..., Any],
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rewritten: Rewritten | None = None,
        *,
        traced: bool = True,
    ) -> Recording:
        """Record one live run. Raises CaptureError."""
        return record(model, signature, args=args, kwargs=kwargs, rewritten=rewritten)

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout:
        """Lay out what calls can fill; other results, outputs among them, are allocated by their operators."""
        return lay_out_buffers(recording)

    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> HostExecutable:
        """Compile: run each call once on copies of what it writes, plan memory if what is given is for another order.

        Raises:
            CaptureError: a call that cannot be issued again.
            DeviceError: out of memory.
        """
        in_turn = tuple(range(len(schedule.order)))
        if memory is None or schedule.order != in_turn:
            serial = Schedule(schedule.policy, (0,) * len(in_turn), in_turn, ())
            place = (layout or self.lay_out(recording, schedule)).arena
            memory = check_memory(recording.program, serial, plan_memory(recording.program, serial, place=place))
        try:
            with (
                random_state_kept(torch.device("cpu"), recording.generators, recording.draws),
                capture_range(recording.program, schedule),
                torch.inference_mode(False),
                issuing("cpu"),
                no_torch_function(),
            ):
                code = Code(PreparedSteps(recording, schedule, inputs, memory))
                executable = HostExecutable(code, schedule, inputs)
                return replays_marked(executable, recording.program, schedule)
        except NimbleError:
            raise
        except MemoryError as error:
            raise DeviceError("out of memory while preparing", fix="prepare smaller inputs") from error
        except Exception as error:
            raise CaptureError(
                f"a recorded call cannot be issued again: {first_line(error)}",
                fix="keep that operator out of the prepared module",
            ) from error

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> WholeExecutable:
        """Wrap the model itself, called without autograd, where calls cannot be issued one by one."""
        executable = WholeExecutable(model, recording, signature)
        return replays_marked(executable, recording.program, executable.schedule)

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Time each call in ``replays`` replays, with as many unobserved ones between them.

        Raises:
            DeviceError: ``executable`` is no host replay of single calls, or was closed.
        """
        if not isinstance(executable, HostExecutable):
            raise DeviceError(
                f"the calls of a {type(executable).__name__} cannot be observed",
                fix="observe what capture() returned",
            )
        executable.replay()
        time.sleep(_SETTLE_S)
        plain: list[float] = []
        seen: list[tuple[float, list[int], list[int]]] = []
        for _ in range(max(replays, 1)):
            start = time.perf_counter_ns()
            executable.replay()
            plain.append(time.perf_counter_ns() - start)
            seen.append(executable.timed_replay())
        return _observation(executable, recording, plain, seen)

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """Time each call as the fastest of a few runs; None for calls side by side."""
        return [None if isinstance(call, tuple) else _fastest_ns(call) for call in calls]

    def libraries_tuned(self) -> AbstractContextManager[None]:
        """Do nothing: oneDNN chooses by shape."""
        return nullcontext()

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Measure the peak of this process's resident memory during ``run`` above what it was before.

        0 where the system keeps no count that can be reset (Linux does).
        """
        before = _resident_peak(reset=True)
        run()
        return max(_resident_peak(reset=False) - before, 0) if before else 0


def _resident_peak(*, reset: bool) -> int:
    """Read the peak, bytes; after a reset, what is resident now. 0 if unknown."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as control:
                control.write("5")
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def _observation(
    executable: HostExecutable,
    recording: Recording,
    plain_ns: Sequence[float],
    seen: Sequence[tuple[float, list[int], list[int]]],
) -> Observation:
    """Return the timeline of the replay of median length, and the median time of each call.

    Args:
        executable: what was replayed.
        recording: of its calls.
        plain_ns: unobserved replays.
        seen: observed replays, ``(wall ns, begins, ends)`` by call.
    """
    schedule, calls = executable.schedule, recording.program.calls
    wall, begins, ends = sorted(seen, key=lambda one: one[0])[(len(seen) - 1) // 2]
    zero = min(begins, default=0)
    spans = [
        Span(schedule.stream[call.index], float(begin - zero), float(end - zero), call.index, call.label)
        for call, begin, end in zip(calls, begins, ends, strict=True)
    ]
    taken = [[float(ends[call] - begins[call]) for _, begins, ends in seen] for call in range(len(calls))]
    return Observation(
        Timeline(
            run=schedule.policy,
            source="measured",
            clock="host clock",
            lanes=tuple(Lane(f"worker {index}", "worker") for index in range(schedule.streams or 1)),
            spans=tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns))),
            profiled_ns=wall,
            unprofiled_ns=median(plain_ns),
        ),
        Costs(
            ns=tuple(median(one) for one in taken),
            source="host clock, one-worker replay",
            spread_ns=tuple(quantile(one, 0.75) - quantile(one, 0.25) for one in taken),
            observed=len(seen),
            expected=len(calls),
            seen=len(spans),
        ),
    )


def _fastest_ns(call: Callable[[], object]) -> float | None:
    times = []
    try:
        with torch.no_grad():
            call()
            for _ in range(3):
                start = time.perf_counter_ns()
                call()
                times.append(float(time.perf_counter_ns() - start))
    except RuntimeError:
        return None
    return min(times)
