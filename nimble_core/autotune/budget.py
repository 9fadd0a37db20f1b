"""How long tuning may take, and what is still worth doing in the time that is left."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from nimble_core.ir.program import Program

__all__ = ["Budget", "compile_s"]

_NEGLIGIBLE = 0.02
"""What costs less than this share of the budget is done even when it is gone."""
_TO_CHOOSE = 0.1
_COMPILE_S = (2.0, 0.03)
"""What compiling is expected to take on eight cores: at least, and for each call."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that tuning may take, from when this was made."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """What is left; negative if more was taken."""
        return self.seconds - (time.perf_counter() - self.began)

    @property
    def to_make_s(self) -> float:
        """What is left for making kernels: the last of a budget is for choosing among them."""
        return self.left_s - _TO_CHOOSE * self.seconds

    @property
    def to_choose_s(self) -> float:
        """What is left for choosing; not less than was kept for it."""
        return max(self.left_s, _TO_CHOOSE * self.seconds)

    def spent(self, more_s: float) -> bool:
        """Tell whether most of it is gone, and ``more_s`` counts beside it."""
        return self.left_s < 0.2 * self.seconds and more_s > _NEGLIGIBLE * self.seconds


def compile_s(program: Program) -> float:
    """Return what compiling is expected to take on this machine."""
    least, each = _COMPILE_S
    return least + each * len(program.calls) * max(8 / (os.cpu_count() or 1), 1.0)
