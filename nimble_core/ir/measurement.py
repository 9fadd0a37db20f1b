"""Measurements that carry their doubt: raw samples, median, spread, drift, warnings; and verdicts on their ratios."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nimble_core.algorithms.median_interval import ERROR, FIRST_LOOK, median_interval

__all__ = [
    "ACROSS",
    "DRIFT_BOUND",
    "ENOUGH",
    "SAME",
    "SPREAD_BOUND",
    "TIE",
    "Measurement",
    "Ratio",
    "Verdict",
    "across",
    "interleave",
    "not_slower",
    "ratio",
    "summarize",
    "undecided",
]

SAME = 1.02
"""Speeds closer than this factor make no difference."""

ACROSS = 1.05
"""The same for measurements of two processes, which differ by up to this much where nothing changed."""

SPREAD_BOUND = 0.10
"""A measurement whose interquartile range exceeds this share of its median is marked unstable."""

DRIFT_BOUND = 0.10
"""A measurement whose second half's median differs from the first half's by more than this share is unstable."""

TIE = 1.01
"""Simulated times closer than this factor are called equal."""

Verdict = Literal["faster", "slower", "no difference", "undecided"]

_LEAST_S, _LEAST_ROUNDS = 0.2, 512
"""The first look is after this much time or so many rounds: what disturbs a machine often lasts for some time."""

ENOUGH = 128
"""Rounds that are taken in any case while a verdict is open, as far as the budget goes."""

_MOST_ROUNDS = 4096


@dataclass(frozen=True, slots=True)
class Measurement:
    """Wall time of one way to run the model.

    Args:
        name: ``"eager"``, ``"single"``, ``"nimble"``, …
        samples_ns: one per timed call, in the order taken.
        warmup: calls run before the first sample.
        median_ns: median of the samples.
        spread: interquartile range over median.
        drift: second half's median over the first half's, minus 1.
        warnings: why it should be doubted; empty if it is stable.
        rounds: in which each sample was taken, so that those of several ways can be paired; empty: one after the other.
        dropped: samples left out because other programs interrupted them more than usual.
    """

    name: str
    samples_ns: tuple[float, ...]
    warmup: int
    median_ns: float
    spread: float
    drift: float
    warnings: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()
    dropped: int = 0

    @property
    def stable(self) -> bool:
        """Whether spread and drift are within their bounds."""
        return not self.warnings


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster ``name`` is than ``baseline``: > 1 is faster.

    Args:
        name: of the one measurement.
        baseline: of the other.
        value: median of the ratios.
        low: lower end of its interval (``median_interval``); 0 if too few samples were taken.
        high: upper end; infinite likewise.
        same: speeds closer than this factor make no difference.
    """

    name: str
    baseline: str
    value: float
    low: float
    high: float
    same: float = SAME

    @property
    def verdict(self) -> Verdict:
        """What the whole interval says: it lies above ``same``, below ``1 / same``, between them, or says nothing."""
        if self.low > self.same:
            return "faster"
        if self.high < 1 / self.same:
            return "slower"
        return "no difference" if self.low >= 1 / self.same and self.high <= self.same else "undecided"

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return self.verdict != "undecided"


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolation quantile of ``values``, 0 <= q <= 1. Raises ValueError on no values."""
    if not values:
        raise ValueError("no samples")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(
    name: str, samples_ns: Sequence[float], warmup: int = 0, rounds: Sequence[int] = (), dropped: int = 0
) -> Measurement:
    """Median, spread and drift of ``samples_ns``. Raises ValueError on no samples."""
    middle = quantile(samples_ns, 0.5)
    spread = (quantile(samples_ns, 0.75) - quantile(samples_ns, 0.25)) / middle if middle else 0.0
    half = len(samples_ns) // 2
    drift = median(samples_ns[half:]) / median(samples_ns[:half]) - 1 if half and median(samples_ns[:half]) else 0.0
    warnings = []
    if len(samples_ns) < 5:
        warnings.append(f"only {len(samples_ns)} samples")
    if spread > SPREAD_BOUND:
        warnings.append(f"spread {spread:.0%} of the median is above {SPREAD_BOUND:.0%}")
    if abs(drift) > DRIFT_BOUND:
        warnings.append(f"drift {drift:+.0%} between halves is above {DRIFT_BOUND:.0%}")
    return Measurement(name, tuple(samples_ns), warmup, middle, spread, drift, tuple(warnings), tuple(rounds), dropped)


def ratio(faster: Measurement, baseline: Measurement) -> Ratio:
    """Speed of ``faster`` over ``baseline`` (> 1: faster), measured in the same rounds.

    From the ratios of samples of the same round, so that drift of the machine cancels; as ``across`` where there are
    none.
    """
    news, olds = _by_round(faster), _by_round(baseline)
    pairs = [(news[k], olds[k]) for k in sorted(news.keys() & olds.keys()) if news[k] > 0 and olds[k] > 0]
    if not pairs:
        return across(faster, baseline)
    low, middle, high = median_interval([math.log(old) - math.log(new) for new, old in pairs])
    return Ratio(faster.name, baseline.name, _exp(middle), _exp(low), _exp(high))


def _by_round(taken: Measurement) -> dict[int, float]:
    return dict(zip(taken.rounds or range(len(taken.samples_ns)), taken.samples_ns, strict=False))


def across(new: Measurement, old: Measurement) -> Ratio:
    """Speed of ``new`` over ``old`` (> 1: faster), measured in two processes: no samples are neighbours.

    Opposite ends of the two medians' intervals set against each other.

    >>> across(summarize("nimble", [100.0] * 40), summarize("nimble", [200.0] * 40)).verdict
    'faster'
    """
    (new_low, new_high), (old_low, old_high) = _median_bounds(new), _median_bounds(old)
    value = _over(old.median_ns, new.median_ns)
    low, high = _over(old_low, new_high), _over(old_high, new_low) if math.isfinite(old_high) else math.inf
    return Ratio(new.name, old.name, value, min(low, value), max(high, value), ACROSS)


def not_slower(taken: Mapping[str, Measurement]) -> list[str]:
    """Name those that are decidedly slower than none of the others, the fastest first."""

    def slower(name: str) -> bool:
        return any(ratio(taken[name], taken[other]).verdict == "slower" for other in taken if other != name)

    # Medians of rounds that are not the same compare nothing: who was given up early may have the lowest.
    left = [name for name in taken if not slower(name)] or list(taken)
    return sorted(left, key=lambda name: taken[name].median_ns)


def undecided(taken: Mapping[str, Measurement], names: Collection[str]) -> set[str]:
    """Name those of ``names`` that are neither faster nor slower than the fastest of them, nor as fast; and it, too."""
    if not names:
        return set()
    best = not_slower({name: taken[name] for name in names})[0]
    rest = {name for name in names if name != best and not ratio(taken[best], taken[name]).decided}
    return rest | {best} if rest else rest


def _median_bounds(taken: Measurement) -> tuple[float, float]:
    logs = [math.log(one) for one in taken.samples_ns if one > 0]
    if not logs:
        return 0.0, math.inf
    low, _, high = median_interval(logs, ERROR / 2)
    return _exp(low), _exp(high)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf


def _over(one: float, other: float) -> float:
    return one / other if other else math.inf


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    clock_ns: Callable[[], float],
    synchronize: Callable[[], object],
    warmup: int = 3,
    rounds: int = FIRST_LOOK,
    budget_s: float | None = None,
    patience_s: float = 0.0,
    open_names: Callable[[Mapping[str, Measurement]], Collection[str]] = lambda _: (),
    interruptions: Callable[[], int] = lambda: 0,
    rehearse: bool = False,
    first_round: int = 0,
    on_round: Callable[[int, int], object] = lambda done, total: None,
    on_interrupt: Callable[[], object] = lambda: None,
) -> dict[str, Measurement]:
    """Time every candidate once a round, in an order drawn for each round, until enough is known.

    A sample is one call plus a synchronisation. After ``rounds`` rounds, and each time that they have doubled,
    ``open_names`` says which candidates to go on with. Sampling ends when it names none, at the first look after
    ``patience_s`` and ``ENOUGH`` rounds, after 4,096 rounds, or when ``budget_s`` is spent and five rounds are done.
    Samples that were interrupted more than twice as often as others of the same candidate are left out.

    Args:
        candidates: what to time, by name; each is called without arguments.
        clock_ns: injected clock, nanoseconds.
        synchronize: waits until the device has finished.
        warmup: untimed calls of each candidate first.
        rounds: samples wanted of each before the first look.
        budget_s: seconds to spend at most, None for no bound.
        patience_s: seconds to go on for where something is open.
        open_names: which candidates need more samples, given all measurements so far.
        interruptions: how often a core was taken from this process so far.
        rehearse: make an untimed call before each sample: a GPU that changes graphs fetches the new one first.
        first_round: number of the first round, so that no sample is paired with an earlier one.
        on_round: told ``(rounds done, rounds at the next look)`` after each round.
        on_interrupt: told that a KeyboardInterrupt ended the measuring early; complete rounds are kept.
    """
    run = _Rounds(candidates, clock_ns, synchronize, interruptions, warmup, first_round)
    run.warm_up()
    order, going = random.Random(0), list(candidates)
    began, done, look, enough = clock_ns(), 0, rounds, ENOUGH if patience_s > 0 else 0
    try:
        while going:
            for name in order.sample(going, len(going)):
                run.sample(name, done, rehearse=rehearse)
            done += 1
            on_round(done, look)
            spent_s = (clock_ns() - began) / 1e9
            if budget_s is not None and done >= 5 and spent_s > budget_s:
                break
            if done == look:
                look *= 2
                if done >= _MOST_ROUNDS or (spent_s > patience_s and done >= enough):
                    break
                if spent_s >= min(_LEAST_S, patience_s) or done >= _LEAST_ROUNDS:
                    wanted = open_names(run.measurements(done))
                    going = [name for name in going if name in wanted]
    except KeyboardInterrupt:
        if done == 0:
            raise
        on_interrupt()
    return run.measurements(done)


class _Rounds:
    """Takes samples, as (round, nanoseconds, interruptions), and drops those that were disturbed."""

    def __init__(
        self,
        candidates: Mapping[str, Callable[[], object]],
        clock_ns: Callable[[], float],
        synchronize: Callable[[], object],
        interruptions: Callable[[], int],
        warmup: int,
        first: int,
    ) -> None:
        self.candidates, self.clock_ns, self.synchronize = candidates, clock_ns, synchronize
        self.interruptions, self.warmup, self.first = interruptions, warmup, first
        self.new: dict[str, list[tuple[int, float, int]]] = {name: [] for name in candidates}
        self.kept: dict[str, list[tuple[int, float, int]]] = {name: [] for name in candidates}
        self.dropped = dict.fromkeys(candidates, 0)

    def warm_up(self) -> None:
        for call in self.candidates.values():
            for _ in range(self.warmup):
                call()
        self.synchronize()

    def sample(self, name: str, done: int, *, rehearse: bool) -> None:
        """Time one call of a candidate in the round after ``done`` others."""
        if rehearse:
            self.candidates[name]()
            self.synchronize()
        before, start = self.interruptions(), self.clock_ns()
        self.candidates[name]()
        self.synchronize()
        self.new[name].append((done, self.clock_ns() - start, self.interruptions() - before))

    def measurements(self, done: int) -> dict[str, Measurement]:
        """Return those of the first ``done`` rounds, without disturbed samples; what is dropped once stays so."""
        found = {}
        for name, new in self.new.items():
            complete = [sample for sample in new if sample[0] < done]
            usual = 2 * median([count for *_, count in complete]) if complete else 0
            clean = [sample for sample in complete if sample[2] <= usual]
            self.kept[name] += clean
            self.dropped[name] += len(complete) - len(clean)
            new.clear()
            times = [ns for _, ns, _ in self.kept[name]]
            rounds = [self.first + k for k, *_ in self.kept[name]]
            found[name] = summarize(name, times, self.warmup, rounds, self.dropped[name])
        return found
