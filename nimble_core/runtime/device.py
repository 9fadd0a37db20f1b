"""The protocols of a device and of what it captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Observation
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.tracing.recorded import Records
from nimble_core.utils.errors import NimbleError

if TYPE_CHECKING:
    import torch

    from nimble_core.tracing.recording import Recording
    from nimble_core.tracing.signature import Signature

__all__ = ["Device", "Executable", "PlacementError", "Quick", "Ready", "Timed"]

Timed = Callable[[], object] | tuple[Callable[[], object], ...]
"""A call; or several, side by side."""


class PlacementError(NimbleError):
    """A call did not allocate what was planned; the device has learned not to place it: plan again."""


Ready = Callable[[Callable[[Sequence["torch.Tensor"]], bool], tuple[Any, ...], dict[str, Any]], bool]
"""Says whether a call, given as its inputs, is as usual, and hands its tensors to what reads them."""
Quick = Callable[[tuple[Any, ...], dict[str, Any]], "list[torch.Tensor] | None"]
"""Returns the outputs of a call; None, without having run, where it is not as usual."""


class Executable(Protocol):
    """A schedule made ready to run, again and again."""

    schedule: Schedule
    nbytes: int
    """Memory it holds, bytes, the model's own tensors not counted."""
    counts: SyncCounts
    """The schedule's counts, with what was emitted where that can be read back."""

    @property
    def raw(self) -> RawGraph | None:
        """The captured graph, read back; None where there is none."""

    @property
    def memory(self) -> MemoryPlan | None:
        """Where its storages lie; None where the device looks after its memory itself."""

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Run on ``inputs`` (shapes and dtypes as recorded) and return the outputs.

        Asynchronous where the device is. With ``static`` the outputs are the executable's own buffers, overwritten by
        the next run, where it has such buffers; otherwise they belong to the caller.
        """

    def quick(self, ready: Ready, *, static: bool) -> Quick | None:
        """Return what runs calls that are as usual, in fewer steps than ``run``; None if there is no such way."""

    def replay(self) -> None:
        """Run once more on the inputs it holds, outputs left in place: what the schedule costs by itself."""

    def paused(self) -> AbstractContextManager[None]:
        """Keep it from running inside.

        Where the device is asynchronous, work issued inside on the current stream follows the last run and precedes the
        next.
        """

    def close(self) -> None:
        """Free what it holds. Using it afterwards raises DeviceError; closing twice does nothing."""


class Device(Records, Protocol):
    """Where a model runs."""

    name: str
    """As people call it, e.g. ``"NVIDIA H200"``."""
    model: DeviceModel
    """What simulations for this device assume."""

    def stream_cap(self, asked: int | None) -> int | None:
        """Cap the streams that a schedule may use here: ``asked`` (None for no cap), or fewer."""

    def clock_ns(self) -> float:
        """Read a monotonic clock, ns."""

    def interruptions(self) -> int:
        """Count how often another program took a core from this process since it started."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model once as it is, so that libraries are loaded and tuned; leave no trace in its state."""

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout | None:
        """Lay out what of the calls' memory can be planned; None if the device looks after its memory itself.

        Without ``stagger`` workspaces take less memory and more time, on devices that stagger them.
        """

    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> Executable:
        """Make ``schedule`` ready to run.

        Args:
            recording: the calls.
            schedule: checked.
            inputs: example values.
            layout: what ``lay_out`` said for this schedule, and
            memory: the plan made of it; None: reuse is left to the device.

        Raises:
            CaptureError: a call that cannot be issued again.
            DeviceError: out of memory.
            PlacementError: memory could not be placed as planned; ``lay_out`` will ask for less next time.
        """

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> Executable:
        """Capture the model itself on one stream, for programs with launches that were not seen."""

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Watch ``replays`` replays: a timeline of the median one, and the cost of every call."""

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """Time each of ``calls`` on the device when nothing else runs, ns; None for one that fails.

        Those of a tuple begin together, and the time is that until the last of them has ended; None, too, where a
        device cannot time that.
        """

    def libraries_tuned(self) -> AbstractContextManager[None]:
        """Have libraries time their routines inside, the first time they see a shape, and take the fastest."""

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Call ``run`` once; device memory at its peak above what was held before, bytes; 0 if unknown."""
