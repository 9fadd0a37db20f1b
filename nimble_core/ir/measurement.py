"""Measurements that carry their doubt: raw samples, median, spread, drift, warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["DRIFT_BOUND", "SPREAD_BOUND", "TIE", "Measurement", "Ratio", "interleave", "ratio", "summarize"]

SPREAD_BOUND = 0.10
"""A measurement whose interquartile range exceeds this share of its median is marked unstable."""

DRIFT_BOUND = 0.10
"""A measurement whose second half's median differs from the first half's by more than this share is unstable."""

TIE = 1.01
"""Medians closer than this factor are called equal; of equal plans the one with fewer streams is taken."""


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
    """

    name: str
    samples_ns: tuple[float, ...]
    warmup: int
    median_ns: float
    spread: float
    drift: float
    warnings: tuple[str, ...] = ()

    @property
    def stable(self) -> bool:
        """Whether spread and drift are within their bounds."""
        return not self.warnings


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster ``name`` is than ``baseline``: > 1 is faster.

    ``low`` and ``high`` are the quartiles of the ratios of neighbouring samples (interleaved rounds), so that drift
    of the machine cancels.
    """

    name: str
    baseline: str
    value: float
    low: float
    high: float
    stable: bool


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolation quantile of ``values``, 0 <= q <= 1. Raises ValueError on no values."""
    if not values:
        raise ValueError("no samples")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(name: str, samples_ns: Sequence[float], warmup: int = 0) -> Measurement:
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
    return Measurement(name, tuple(samples_ns), warmup, middle, spread, drift, tuple(warnings))


def ratio(faster: Measurement, baseline: Measurement) -> Ratio:
    """Speed of ``faster`` over ``baseline`` (> 1: faster), from medians; quartiles from paired samples."""
    pairs = [b / f for f, b in zip(faster.samples_ns, baseline.samples_ns, strict=False) if f]
    value = baseline.median_ns / faster.median_ns if faster.median_ns else 0.0
    low, high = (quantile(pairs, 0.25), quantile(pairs, 0.75)) if pairs else (value, value)
    return Ratio(faster.name, baseline.name, value, low, high, faster.stable and baseline.stable)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    clock_ns: Callable[[], float],
    synchronize: Callable[[], object],
    warmup: int = 3,
    rounds: int = 30,
    budget_s: float | None = None,
    rehearse: bool = False,
    on_round: Callable[[int, int], object] = lambda done, total: None,
    on_interrupt: Callable[[], object] = lambda: None,
) -> dict[str, Measurement]:
    """Time every candidate in turn, round after round: A B C, A B C, and so on.

    Each sample is one call plus a synchronisation, the same for all. Stops after ``rounds`` rounds or, once five are
    done, when ``budget_s`` is spent. A KeyboardInterrupt ends the measuring and keeps the complete rounds (at least
    one; before that it propagates).

    Args:
        candidates: what to time, by name; each is called without arguments.
        clock_ns: injected clock, nanoseconds.
        synchronize: waits until the device has finished.
        warmup: untimed calls of each candidate first.
        rounds: samples wanted of each.
        budget_s: seconds to spend at most, None for no bound.
        rehearse: make an untimed call and a synchronisation before each sample, so that none of them pays for the
            candidate before it (a GPU that turns from one graph to another fetches it anew).
        on_round: told ``(rounds done, rounds wanted)`` after each round.
        on_interrupt: told that a KeyboardInterrupt ended the measuring early.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        for _ in range(warmup):
            run()
    synchronize()
    began = clock_ns()
    done = 0
    try:
        while done < rounds:
            for name, run in candidates.items():
                if rehearse:
                    run()
                    synchronize()
                start = clock_ns()
                run()
                synchronize()
                samples[name].append(clock_ns() - start)
            done += 1
            on_round(done, rounds)
            if budget_s is not None and done >= 5 and clock_ns() - began > budget_s * 1e9:
                break
    except KeyboardInterrupt:
        if done == 0:
            raise
        on_interrupt()
    return {name: summarize(name, taken[:done], warmup) for name, taken in samples.items()}
