"""What is left of a budget, and what is still done when it is gone."""

from __future__ import annotations

import time

import pytest

from nimble_core.autotune.budget import Budget


@pytest.mark.parametrize(
    ("taken_s", "more_s", "spent"), [(0, 5, False), (79, 5, False), (81, 5, True), (81, 1, False), (200, 1, False)]
)
def test_most_of_the_budget_may_be_spent(taken_s: float, more_s: float, spent: bool) -> None:
    budget = Budget(100.0, began=time.perf_counter() - taken_s)
    assert budget.left_s == pytest.approx(100 - taken_s, abs=1)
    assert budget.spent(more_s) == spent


@pytest.mark.parametrize(("taken_s", "make_s", "choose_s"), [(0, 90, 100), (50, 40, 50), (95, -5, 10), (200, -110, 10)])
def test_the_last_of_a_budget_is_for_choosing(taken_s: float, make_s: float, choose_s: float) -> None:
    budget = Budget(100.0, began=time.perf_counter() - taken_s)
    assert budget.to_make_s == pytest.approx(make_s, abs=1)
    assert budget.to_choose_s == pytest.approx(choose_s, abs=1)
