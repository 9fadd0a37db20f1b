"""Which measured candidate to run: the simplest of the fastest, unless what it holds in memory is not worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nimble_core.ir.candidates import Candidate, simplicity
from nimble_core.ir.measurement import SAME, Measurement, not_slower, ratio

__all__ = ["Choice", "MemoryPrice", "choose"]

_HEAVY, _HEAVY_NBYTES = 1.22, 8 << 20
"""A plan that holds this many times as much as eager does, parameters and their like included, and this much more, has
to be worth it."""
_APART = 1.05
"""How much longer than another a replay may be expected to take, from the times of its kernels, and still be tied."""
_RATE = 3.0
"""What a percent of eager's memory beyond that has to be worth, in percent of time, as far as ``worth``."""


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """What memory beyond eager's has to be worth in speed.

    Args:
        eager_nbytes: most bytes that eager holds, beside what it owns.
        owned_nbytes: parameters and buffers.
        beside_nbytes: what other parts of the same engine hold already.
        worth: how many times as fast as others a plan has to be that holds much more than eager does.
    """

    eager_nbytes: int
    owned_nbytes: int
    beside_nbytes: int
    worth: float

    def light(self, single_nbytes: int) -> int:
        """Return the bytes that a plan may hold for free.

        Args:
            single_nbytes: what one stream of the same kernels holds, which counts as eager's, too.
        """
        light = int(_HEAVY * self._eager_total(single_nbytes)) - self.owned_nbytes - self.beside_nbytes
        return max(light, single_nbytes)

    def heavy(self, nbytes: int, single_nbytes: int) -> bool:
        """Tell whether a plan holds much more than eager, and than one stream of the same kernels."""
        return nbytes > self.light(single_nbytes) + _HEAVY_NBYTES

    def required(self, nbytes: int, than_nbytes: int, single_nbytes: int) -> float:
        """Return the speed-up that justifies holding ``nbytes`` rather than ``than_nbytes``.

        ``worth``, less for little memory, and at least more than a tie.
        """
        excess = nbytes - max(than_nbytes, self.light(single_nbytes))
        return max(SAME, min(self.worth, 1 + _RATE * excess / self._eager_total(single_nbytes)))

    def _eager_total(self, single_nbytes: int) -> int:
        return max(self.eager_nbytes, single_nbytes) + self.owned_nbytes


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate to run.

    Args:
        name: of the candidate.
        decided: whether every other of those that hold little was decided against it.
    """

    name: str
    decided: bool


def choose(
    found: Mapping[str, Candidate],
    singles_nbytes: Mapping[str, int],
    price: MemoryPrice | None,
    *,
    kept: Callable[[], str] = str,
    on_cuda: bool = False,
) -> Choice:
    """Choose the simplest of the fastest that hold little, then what is worth holding more, from the lightest on.

    Args:
        found: measured candidates; at least one.
        singles_nbytes: what one stream of each kind of kernels holds, where that is known.
        price: what memory has to be worth; None: nothing.
        kept: returns what was chosen last, which runs on if nothing is decided.
        on_cuda: if nothing is decided and nothing was kept, take the simplest of compiled kernels. And of those that
            the host's clock cannot tell apart, leave out what takes longer by its kernels' times, which a disturbed
            host leaves as they are.
    """
    times = {name: one.measurement for name, one in found.items() if one.measurement is not None}
    if price is None or price.worth <= 1:
        return _simplest(found, times, kept, on_cuda)
    singles = {name: singles_nbytes.get(found[name].fuse, 0) for name in times}
    heavy = [name for name in times if singles[name] and price.heavy(found[name].nbytes, singles[name])]
    heavy.sort(key=lambda name: (found[name].nbytes, found[name].streams, times[name].median_ns))
    light = {name: one for name, one in times.items() if name not in heavy} or {heavy[0]: times[heavy[0]]}
    choice = _simplest(found, light, kept, on_cuda)
    best = choice.name
    for name in heavy:
        required = price.required(found[name].nbytes, found[best].nbytes, singles[name])
        if ratio(times[name], times[best]).low > required:
            best = name
    return Choice(best, choice.decided)


def _simplest(
    found: Mapping[str, Candidate],
    times: Mapping[str, Measurement],
    kept: Callable[[], str],
    on_cuda: bool,
) -> Choice:
    close = not_slower(times)
    others = [ratio(times[close[0]], times[name]).decided for name in times if name != close[0]]
    if any(others) or not others:
        tied = [name for name in close if not (on_cuda and _expected_slower(name, close, found, times))]
        return Choice(min(tied, key=lambda name: simplicity(found[name])), all(others))
    if (last := kept()) in times:
        return Choice(last, False)
    ranked = sorted(times, key=lambda name: simplicity(found[name]))
    kinds = ("inductor", "library") if on_cuda else ()
    compiled = (name for kind in kinds for name in ranked if found[name].fuse == kind)
    return Choice(next(compiled, ranked[0]), False)


def _expected_slower(
    name: str, close: Sequence[str], found: Mapping[str, Candidate], times: Mapping[str, Measurement]
) -> bool:
    """Whether kernels say that this takes longer than another, where measuring could not tell."""
    ns = found[name].simulated_ns
    others = (one for one in close if 0 < _APART * found[one].simulated_ns < ns)
    return any(not ratio(times[name], times[one]).decided for one in others)
