"""A device with real values and a simulated clock: times on it can be asserted exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import Call, Program
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Observation, Timeline
from nimble_core.runtime.device import Executable, Ready, Timed
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import Layout, lay_out
from nimble_core.scheduling.simulator import EXACT, DeviceModel, simulate
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, Rewritten, issuing
from nimble_core.tracing.side_effects import rehearse
from nimble_core.utils.errors import DeviceError

if TYPE_CHECKING:
    from nimble_core.tracing.signature import Signature

__all__ = ["FakeDevice", "FakeExecutable"]


class FakeDevice:
    """Issues calls on the CPU for their values; its time moves by simulation alone.

    A replay takes as long as ``simulate`` says for its schedule and these costs. An eager run made through
    ``eager(model)`` takes the sum of the costs and the overhead of each call. Nothing else takes time, so
    ``compare(model, x, device=fake)`` gives the same numbers on any machine, provided that it runs ``eager(model)``
    where it would run ``model``.

    Args:
        cost_ns: duration of each call: one number for all, or a function of the call.
        model: gaps, waits and crowding of its simulated time.
        overhead_ns_per_call: what the framework adds to each call of an eager run.
    """

    kind = "fake"
    name = "fake device"

    def __init__(
        self,
        cost_ns: Callable[[Call], float] | float = 1000.0,
        *,
        model: DeviceModel = EXACT,
        overhead_ns_per_call: float = 0.0,
    ) -> None:
        self.model = model
        self.overhead_ns_per_call = overhead_ns_per_call
        self._cost_ns = cost_ns
        self._now_ns = 0.0
        self._eager_ns = 0.0

    def stream_cap(self, asked: int | None) -> int | None:
        """Return ``asked``."""
        return asked

    def clock_ns(self) -> float:
        """Read the simulated time; only ``advance``, replays and ``eager`` runs move it."""
        return self._now_ns

    def interruptions(self) -> int:
        """Return 0: nothing but ``advance`` takes time."""
        return 0

    def advance(self, ns: float) -> None:
        """Let ``ns`` nanoseconds pass."""
        self._now_ns += ns

    def synchronize(self) -> None:
        """Do nothing: whatever was issued has finished."""

    def costs(self, program: Program) -> Costs:
        """Return what each call of ``program`` costs here; exact."""
        cost = self._cost_ns
        ns = tuple(float(cost(call)) if callable(cost) else float(cost) for call in program.calls)
        return Costs(ns=ns, source="fake device", spread_ns=(0.0,) * len(ns), expected=len(ns), seen=len(ns))

    def eager(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Make ``model`` a function whose runs take time here; how much is known once it was recorded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = model(*args, **kwargs)
            self.advance(self._eager_ns)
            return result

        return run

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model once; leaves no trace in its state and takes no time."""
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
        """Record one live run, in no time. Raises CaptureError."""
        recording = record(model, signature, args=args, kwargs=kwargs, rewritten=rewritten)
        calls = len(recording.program.calls)
        self._eager_ns = self.costs(recording.program).total_ns + calls * self.overhead_ns_per_call
        return recording

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout | None:
        """Lay out all results of all calls; none needs memory only while it runs."""
        return lay_out(recording.program, schedule)

    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> FakeExecutable:
        """Simulate the time that a replay of ``schedule`` takes. Raises ScheduleError if it deadlocks."""
        timeline = simulate(
            build_graph(recording.program),
            schedule,
            self.costs(recording.program),
            self.model,
            names=[call.label for call in recording.program.calls],
        )

        def issue(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            issuer = Issuer(recording, tensors)
            with issuing("cpu"):
                for call in schedule.order:
                    issuer.issue(call)
                return issuer.outputs()

        return FakeExecutable(self, schedule, timeline, memory, issue, _held(recording, inputs))

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> FakeExecutable:
        """Wrap the model itself, on one stream; a replay takes the sum of its calls' costs."""
        build = builder(signature.structure)
        size = len(recording.program.calls)
        schedule = Schedule("whole", (0,) * size, tuple(range(size)), ())

        def issue(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            args, kwargs = build(tensors)
            with torch.no_grad():
                return flatten(model(*args, **kwargs), what="output")[0]

        timeline = simulate(build_graph(recording.program), schedule, self.costs(recording.program))
        return FakeExecutable(self, schedule, timeline, None, issue, _held(recording, signature.tensors))

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Return the simulated timeline and the given costs; watching takes as long as the replays."""
        if not isinstance(executable, FakeExecutable):
            raise DeviceError(f"a fake device cannot observe a {type(executable).__name__}", fix="pass its own")
        for _ in range(max(replays, 1)):
            executable.replay()
        length = executable.timeline.length_ns
        timeline = replace(executable.timeline, profiled_ns=length, unprofiled_ns=length)
        return Observation(timeline, replace(self.costs(recording.program), observed=max(replays, 1)))

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """Return the same time for every call; none is run."""
        return [1_000.0] * len(calls)

    def libraries_tuned(self) -> AbstractContextManager[None]:
        """Do nothing: there are no libraries."""
        return nullcontext()

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Call ``run``; return 0, unknown."""
        run()
        return 0


class FakeExecutable:
    """A schedule on a fake device."""

    def __init__(
        self,
        device: FakeDevice,
        schedule: Schedule,
        timeline: Timeline,
        memory: MemoryPlan | None,
        issue: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self.schedule = schedule
        self.memory = memory
        self.nbytes = memory.nbytes if memory else 0
        self.raw: RawGraph | None = None
        self.counts: SyncCounts = schedule.counts
        self.timeline = timeline
        self._device = device
        self._issue: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = issue
        self._inputs = inputs

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Issue every call, in issue order; the clock moves by the schedule's length."""
        issue = self._issue
        if issue is None:
            raise DeviceError("this executable was closed", fix="prepare again")
        outputs = issue(inputs)
        self._device.advance(self.timeline.length_ns)
        return outputs

    def quick(self, ready: Ready, *, static: bool) -> None:
        """Return None: nothing is run."""

    def replay(self) -> None:
        """Run once more on the inputs of preparation."""
        self.run(self._inputs)

    def close(self) -> None:
        """Let go of the recording."""
        self._issue = None
        self._inputs = ()


def _held(recording: Recording, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    written = recording.written_inputs
    return [tensor.detach().clone() if position in written else tensor for position, tensor in enumerate(inputs)]
