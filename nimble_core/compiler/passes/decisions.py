"""What was decided by measurement while rewriting, so that the same rewrite can be made again without measuring."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import fx

from nimble_core.compiler.to_fx import calls_of
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.device import Timed

__all__ = ["Decisions", "Timer"]

Timer = Callable[[Sequence[Timed]], Sequence[float | None]]
"""Time of each call, or of each few side by side, on an otherwise idle device, ns; None for one that fails."""


@dataclass(slots=True)
class Decisions:
    """Choices by eager call: those that are given, else those that measurements make.

    Args:
        timer: measures; None: nothing is measured, and what would need it stays as it is.
        given: choices made before for the same program; None: there are none.
        made: what was decided, in order.
        times: what was measured, ns, by what and how: nothing is measured twice.
    """

    timer: Timer | None = None
    given: frozenset[KernelChoice] | None = None
    made: list[KernelChoice] = field(default_factory=list)
    times: dict[Hashable, dict[str, float]] = field(default_factory=dict)

    def take(self, node: fx.Node, kernel: str, *, wanted: bool) -> bool:
        """Whether ``node`` gets ``kernel``: as it was given, else as it is wanted. Noted if it does."""
        choice = KernelChoice(min(calls_of(node), default=0), kernel)
        taken = wanted if self.given is None else choice in self.given
        if taken:
            self.made.append(choice)
        return taken
