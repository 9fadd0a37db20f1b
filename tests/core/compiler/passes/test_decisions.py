"""Choices are measured once for each key, and not after the time for it is over."""

from __future__ import annotations

import math
import time

import pytest

from nimble_core.compiler.passes.decisions import Decisions


@pytest.mark.parametrize("over", [False, True])
def test_what_was_measured_holds_when_the_time_for_it_is_over(over: bool) -> None:
    timed: list[int] = []

    def timer(calls: object) -> list[float]:
        timed.append(1)
        return [2.0, 1.0]

    decisions = Decisions(timer)
    assert decisions.second_is_faster("a", list)
    decisions.until_s = time.perf_counter() - 1 if over else math.inf
    assert decisions.second_is_faster("a", list)
    assert decisions.second_is_faster("b", list) != over
    assert len(timed) == (1 if over else 2)
