"""Decide which iterations of a loop are timed, profiled, or left alone. Pure: times are given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Literal

from nimble_core.utils.errors import InputError

__all__ = ["KIND_WORDS", "Action", "Counts", "Kind", "Sampler"]

Kind = Literal["step", "loader", "optimizer", "module"]
"""What an iteration can be, the most telling first."""

Action = Literal["", "found", "start", "tick", "stop", "forget"]

KIND_WORDS: dict[Kind, str] = {
    "step": "what lies between two calls of step()",
    "loader": "one batch of the data loader",
    "optimizer": "one step of the optimizer",
    "module": "one call of the outermost module",
}

_TELLING, _PATIENCE = 3, 30
_PROFILER_WARM_UPS = 1
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Counts:
    """How many iterations of a loop are looked at.

    Args:
        warmup: iterations before any is looked at.
        timed: iterations timed without the profiler.
        profiled: iterations profiled after that; one more goes before, for the profiler to warm up.
    """

    warmup: int = 3
    timed: int = 10
    profiled: int = 3

    def __post_init__(self) -> None:
        for one in fields(self):
            given, least = getattr(self, one.name), int(one.name == "profiled")
            if not isinstance(given, int) or given < least:
                raise InputError(f"{one.name}={given!r}", fix=f"a whole number, {least} or more")

    @property
    def before(self) -> int:
        """Iterations before the profiler starts: at least the one in which all other hooks are removed."""
        return max(1, self.warmup + self.timed)

    @property
    def at_once(self) -> int:
        """How many iterations are profiled as soon as one is found, to be shown if the loop ends early.

        They end before the last warm-up, so that what is timed follows an iteration without the profiler. The very
        first iteration is never among them: it makes what is made only once, such as an optimizer's state.
        """
        return max(0, min(_AT_ONCE, self.warmup - 1))

    @property
    def calls(self) -> int:
        """How many iterations a loop needs from the one that is found on, the last for source lines."""
        return self.before + _PROFILER_WARM_UPS + self.profiled + 1


@dataclass
class Sampler:
    """Told of each tick (an iteration begins), say what to do.

    Once some kind of tick has come three times, the most telling kind that came more than once is what an iteration is.
    If a more telling kind came once, its second tick is waited for, up to 30 ticks of another kind.
    """

    counts: Counts
    chosen: tuple[Kind, int] | None = None
    seen: int = 0
    times_ns: list[float] = field(default_factory=list)
    waits_ns: list[float] = field(default_factory=list)
    _ticks_of: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    _found_at: int = 0
    _ticks: int = 0
    _last_ns: int = 0
    _waited_ns: int = 0

    def tick(self, kind: Kind, who: int, now_ns: int) -> Action:
        """Note that an iteration of ``kind`` begins. ``who`` tells loaders and optimizers apart."""
        if self.chosen is None:
            self._ticks_of[kind, who] += 1
            self.chosen = self._choice()
            if self.chosen is None:
                return ""
            self.seen = self._found_at = self._ticks_of[self.chosen]
            self._last_ns, self._waited_ns = now_ns, 0
            return "found"
        if (kind, who) != self.chosen:
            return ""
        self.seen += 1
        self._ticks += 1
        if self.counts.warmup < self._ticks <= self.counts.warmup + self.counts.timed:
            self.times_ns.append(float(now_ns - self._last_ns))
            self.waits_ns.append(float(self._waited_ns))
        self._last_ns, self._waited_ns = now_ns, 0
        return self._action(self._ticks)

    def waited(self, ns: int) -> None:
        """Note how long the data loader took."""
        self._waited_ns += ns

    @property
    def enough(self) -> int:
        """How many iterations a loop needs for one to be profiled warm; 0 while none was found."""
        return self._found_at + self.counts.before + _PROFILER_WARM_UPS + 1 if self.chosen else 0

    def _action(self, at: int) -> Action:
        if at <= self.counts.at_once:
            return "tick" if at < self.counts.at_once else "stop"
        profiling = at - self.counts.before
        last = _PROFILER_WARM_UPS + self.counts.profiled
        if profiling == 0:
            return "start"
        if profiling >= last:
            return {last: "stop", last + 1: "forget"}.get(profiling, "")  # type: ignore[return-value]  # both are Actions
        return "tick" if profiling >= _PROFILER_WARM_UPS else ""

    def _choice(self) -> tuple[Kind, int] | None:
        if any(kind == "step" for kind, _ in self._ticks_of):
            return next(one for one in self._ticks_of if one[0] == "step")
        most = max(self._ticks_of.values())
        if most < _TELLING:
            return None
        for kind in KIND_WORDS:
            own = {one: count for one, count in self._ticks_of.items() if one[0] == kind}
            if own and max(own.values()) > 1:
                return max(own, key=lambda one: own[one])
            if own and most < _PATIENCE:
                return None
        return None
