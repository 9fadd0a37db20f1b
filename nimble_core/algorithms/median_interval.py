"""Confidence interval of a median that holds however often it is looked at, for samples that may hang together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["ERROR", "FEWEST", "FIRST_LOOK", "median_interval"]

ERROR = 0.005
"""Share of medians that may lie outside of their interval, over all looks together."""

FIRST_LOOK = 32
"""Samples at the first look; later looks are at two, four, eight, … times as many."""

FEWEST = 16
"""Fewer samples say nothing about the median."""

_APART = 4.0
"""Blocks are this many correlation times long, so that they are nearly independent."""

_FEW_BLOCKS = 8
"""The range of fewer blocks' medians says too little."""


def median_interval(samples: Sequence[float], error: float = ERROR) -> tuple[float, float, float]:
    """Estimate the median of ``samples``, in the order taken, with an interval: ``(low, estimate, high)``.

    Samples are joined to blocks of about four correlation times each, and the interval lies between two of the
    blocks' medians, as the sign test has it: nothing is assumed of how samples are distributed. ``error`` is spent over
    the looks (after 32 samples, 64, 128, …): the k-th may err by ``error / (k * (k + 1))``, so sampling may stop at any
    look, as soon as the interval is as wanted. Where there are too few blocks for that, it is the range of the blocks'
    medians (of fewer than eight blocks, or 32 samples, that of the samples), made three times as wide: they may hang
    together more than so few can show. Fewer than ``FEWEST`` samples say nothing: ``(-inf, median, inf)``.

    Simulated in ``benchmarks/verdicts.py``: white, drifting, bimodal and autocorrelated noise.

    Args:
        samples: in any unit; at least one.
        error: most probability that the median lies outside at any look; half of it on either side.

    Raises:
        ValueError: no samples.
    """
    import numpy as np

    if not len(samples):
        raise ValueError("no samples")
    values = np.asarray(samples, dtype=float)
    middle = float(np.median(values))
    if len(values) < FEWEST:
        return -math.inf, middle, math.inf
    look = max(1, math.ceil(math.log2(len(values) / FIRST_LOOK)) + 1)
    length = 2 * int(_APART * _correlation_time(values) / 2) + 1  # odd: the median of a block is one of its samples
    count = len(values) // length
    rank = _rank(count, error / (look * (look + 1)))
    blocks = np.sort(np.median(values[len(values) - count * length :].reshape(count, length), axis=1))
    if rank and len(values) >= FIRST_LOOK:
        return float(blocks[rank - 1]), float(np.median(blocks)), float(blocks[count - rank])
    some = blocks if count >= _FEW_BLOCKS and len(values) >= FIRST_LOOK else values
    low, middle, high = float(some.min()), float(np.median(some)), float(some.max())
    return low - (high - low), middle, high + (high - low)


def _rank(count: int, error: float) -> int:
    """Which of ``count`` sorted values bounds their median from below (1: the least); 0 if none does surely enough."""
    from scipy.special import bdtr

    rank = 0
    while rank < count // 2 and 2 * bdtr(rank, count, 0.5) <= error:
        rank += 1
    return rank


def _correlation_time(values: Any) -> float:
    """How many samples carry as much as one independent one would: the sum of autocorrelations of their ranks.

    Up to the first that could be chance.
    """
    import numpy as np

    count = len(values)
    _, which, alike = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(alike) - (alike - 1) / 2)[which] - (count + 1) / 2  # equal values share a rank
    power = float(ranks @ ranks)
    found = 1.0
    for lag in range(1, count // 3):
        # Estimates are too low by about 1 / count, since the mean is that of the same samples.
        correlation = float(ranks[:-lag] @ ranks[lag:]) / power + 1 / count if power else 0.0
        if correlation <= 2 / math.sqrt(count):
            break
        found += 2 * float(np.clip(correlation, 0, 1))
    return found
