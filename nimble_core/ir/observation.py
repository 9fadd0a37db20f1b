"""What was seen of the replays of one executable."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_core.ir.costs import Costs
from nimble_core.ir.timeline import Timeline

__all__ = ["Observation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of the replays of one executable: when each call ran, and what each costs."""

    timeline: Timeline
    costs: Costs
