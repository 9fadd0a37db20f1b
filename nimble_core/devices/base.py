"""What a device must do: record, capture, replay, observe. Each is called what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nimble_core.costs import Costs
from nimble_core.schedule import Schedule, SyncCounts
from nimble_core.timeline import Timeline

if TYPE_CHECKING:
    import torch

    from nimble_core.recording import Recording
    from nimble_core.signature import Signature

__all__ = ["Device", "Executable", "Observation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of the replays of one executable: when each call ran, and what each costs."""

    timeline: Timeline
    costs: Costs


class Executable(Protocol):
    """A schedule made ready to run, again and again."""

    schedule: Schedule
    nbytes: int
    """Memory it holds, bytes, the model's own tensors not counted."""
    counts: SyncCounts
    """The schedule's counts, with what was emitted where that can be read back."""

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Run on ``inputs`` (shapes and dtypes as recorded) and return the outputs.

        Asynchronous where the device is. With ``static`` the outputs are the executable's own buffers, overwritten by
        the next run, where it has such buffers; otherwise they belong to the caller.
        """

    def replay(self) -> None:
        """Run once more on the inputs it holds, outputs left in place: what the schedule costs by itself."""

    def close(self) -> None:
        """Free what it holds. Using it afterwards raises DeviceError; closing twice does nothing."""


class Device(Protocol):
    """Where a model runs."""

    kind: str
    """``"cuda"``, ``"cpu"`` or ``"fake"``."""
    name: str
    """As people call it, e.g. ``"NVIDIA H200"``."""

    def stream_cap(self, asked: int | None) -> int | None:
        """How many streams a schedule may use here: ``asked`` (None for no cap), or fewer."""

    def clock_ns(self) -> float:
        """Time in nanoseconds, monotonic."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model once as it is, so that libraries are loaded and tuned; leaves no trace in its state."""

    def record(
        self, model: Callable[..., Any], signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Recording:
        """One recording of the model. Raises CaptureError."""

    def capture(self, recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> Executable:
        """Make ``schedule`` ready to run. ``inputs`` are example values. Raises CaptureError, DeviceError."""

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> Executable:
        """One-stream capture of the model itself, for programs with launches that were not seen."""

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Watch ``replays`` replays: a timeline of the median one, and the cost of every call."""

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Call ``run`` once; device memory at its peak above what was held before, bytes; 0 if unknown."""
