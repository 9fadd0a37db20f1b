"""What was tried before one plan was chosen: how fast each was, whether it was right, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nimble_core.ir.measurement import Measurement

__all__ = ["Candidate", "EqualityCheck", "simplicity"]


_KERNELS = ("none", "library", "inductor")


@dataclass(frozen=True, slots=True)
class EqualityCheck:
    """Outputs of a replay against eager, on fresh inputs.

    Args:
        name: which replay.
        relative_error: worst over the outputs of ``‖out - eager‖ / ‖eager‖``, in float64.
        tolerance: bound on ``error``. Against eager it follows from the lowest precision at work; against float64
            from eager's own error.
        input_effect: how far eager's own outputs move between two inputs, same measure: what makes the check
            meaningful. Below ten times the tolerance, and ten times the error, the check is void and does not pass.
        passed: error within tolerance, outputs finite, and the check not void.
        reason: why it did not pass; empty otherwise.
        eager_error: ``‖eager - truth‖ / ‖truth‖``, where truth is the model's output in float64, for the output that
            uses up most of its tolerance; 0 if ``reference`` is ``"eager"``.
        reference_error: ``‖out - truth‖ / ‖truth‖`` of the same output; 0 likewise.
        reference: what decided.
    """

    name: str
    relative_error: float
    tolerance: float
    input_effect: float
    passed: bool
    reason: str = ""
    eager_error: float = 0.0
    reference_error: float = 0.0
    reference: Literal["float64", "eager"] = "eager"

    @property
    def error(self) -> float:
        """What ``tolerance`` bounds: the error against ``reference``."""
        return self.reference_error if self.reference == "float64" else self.relative_error

    @property
    def void(self) -> bool:
        """Whether nothing could be shown either way: outputs that hardly move with the input, or are not finite."""
        return self.reason.startswith("void")

    @property
    def differs(self) -> bool:
        """Whether the replay's outputs are wrong."""
        return not self.passed and not self.void


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that preparation considered.

    Args:
        name: of its policy, with the cap on streams where one binds (``"nimble, 4 streams"``).
        streams: streams it uses.
        syncs: waits between them.
        simulated_ns: what the simulation expects of a replay; 0 if it was not simulated.
        measurement: its replays, timed in turn with the other candidates'; None if it was not measured.
        check: its outputs against eager's; None if it was not checked.
        nbytes: memory it holds; 0 if it was not captured.
        capture_s: what it cost to capture.
        fuse: whose kernels it runs (``Program.fuse``).
        fuse_s: what these kernels cost to make (rewriting, compiling, recording again), shared by all candidates that
            run them; 0 for eager's own.
        chosen: whether the engine runs it.
        note: why it was not measured or not chosen; empty otherwise.
    """

    name: str
    streams: int
    syncs: int
    simulated_ns: float = 0.0
    measurement: Measurement | None = None
    check: EqualityCheck | None = None
    nbytes: int = 0
    capture_s: float = 0.0
    fuse: str = "none"
    fuse_s: float = 0.0
    chosen: bool = False
    note: str = ""


def simplicity(one: Candidate) -> tuple[bool, int, int, int]:
    """Sort key, the simplest first: eager's kernels on one stream, compiled ones on one stream, several streams."""
    return one.streams > 1, one.streams, _KERNELS.index(one.fuse), one.syncs
