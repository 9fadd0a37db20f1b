"""The interval against simulated noise: at most five verdicts in a thousand may be wrong, all looks together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verdicts import NOISES, SLOW, faults, looks, verdict
from nimble_core.algorithms.median_interval import ERROR, FEWEST, FIRST_LOOK, median_interval

TRIALS = 1000

values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200)


@given(values)
def test_the_estimate_lies_within(samples: list[float]) -> None:
    low, middle, high = median_interval(samples)
    assert low <= middle <= high


@given(values, st.floats(-100, 100), st.integers(1, 8))
def test_it_moves_and_grows_with_the_samples(samples: list[float], by: float, times: int) -> None:
    moved = median_interval([times * one + by for one in samples])
    for found, base in zip(moved, median_interval(samples), strict=True):
        assert found == pytest.approx(times * base + by, abs=1e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=FEWEST - 1))
def test_few_samples_say_nothing(samples: list[float]) -> None:
    low, middle, high = median_interval(samples)
    assert (low, high) == (-math.inf, math.inf)
    assert middle == pytest.approx(float(np.median(samples)))


def test_samples_that_do_not_vary() -> None:
    assert median_interval([2.0] * FEWEST) == median_interval([2.0] * 500) == (2.0, 2.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("true", [1.0, 1.1])
@pytest.mark.parametrize("name", NOISES)
def test_verdicts_after_many_looks_are_right(name: str, true: float) -> None:
    assert faults(NOISES[name], true, TRIALS)["wrong"] <= ERROR


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEWEST, 24])
@pytest.mark.parametrize("name", SLOW)
def test_verdicts_on_few_rounds_are_right(name: str, count: int) -> None:
    assert faults(NOISES[name], 1.0, TRIALS, lambda: (count,))["wrong"] <= ERROR


@pytest.mark.parametrize(("noise", "true"), [("white, 1%", 1.1), ("white, 5%", 1.5), ("white, 30%", 10.0)])
def test_clear_differences_are_found_at_the_first_looks(noise: str, true: float) -> None:
    found = faults(NOISES[noise], true, 50, lambda: (FIRST_LOOK, 2 * FIRST_LOOK))
    assert (found["wrong"], found["undecided"]) == (0, 0)


@pytest.mark.parametrize("true", [0.995, 1.0, 1.005])
def test_quiet_machines_show_that_nothing_differs(true: float) -> None:
    draw = np.random.default_rng(7)
    found = [verdict(NOISES["white, 1%"], draw, true, looks())[0] for _ in range(50)]
    assert found == ["no difference"] * 50
