from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.measurement import DRIFT_BOUND, SPREAD_BOUND, interleave, quantile, ratio, summarize

times = st.lists(st.floats(1, 1e9), min_size=1, max_size=40)


@given(times, st.floats(0, 1))
def test_quantiles_lie_between_the_samples_and_rise(values: list[float], q: float) -> None:
    assert min(values) <= quantile(values, q) <= max(values)
    assert quantile(values, q / 2) <= quantile(values, q)
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


@given(times)
def test_a_summary_keeps_the_samples_and_scales_with_them(values: list[float]) -> None:
    taken = summarize("a", values, warmup=2)
    assert (taken.samples_ns, taken.warmup) == (tuple(values), 2)
    assert taken.median_ns == quantile(values, 0.5)
    doubled = summarize("a", [2 * value for value in values])
    assert doubled.median_ns == pytest.approx(2 * taken.median_ns)
    assert doubled.spread == pytest.approx(taken.spread)
    assert doubled.drift == pytest.approx(taken.drift)
    assert taken.stable == (len(values) >= 5 and taken.spread <= SPREAD_BOUND and abs(taken.drift) <= DRIFT_BOUND)


def test_exact_figures() -> None:
    taken = summarize("a", [10, 10, 10, 10, 20, 20, 20, 20])
    assert (taken.median_ns, taken.spread, taken.drift) == (15, 10 / 15, 1.0)
    assert any("spread" in text for text in taken.warnings)
    assert any("drift +100%" in text for text in taken.warnings)
    assert summarize("a", [10] * 5).stable
    assert summarize("a", [10] * 4).warnings == ("only 4 samples",)
    assert summarize("a", [0, 0]).spread == 0


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize("a", [])


@given(times, st.floats(0.1, 10))
def test_a_ratio_of_samples_that_move_together_is_exact(values: list[float], factor: float) -> None:
    base, other = summarize("eager", values), summarize("nimble", [value / factor for value in values])
    found = ratio(other, base)
    assert (found.name, found.baseline) == ("nimble", "eager")
    for figure in (found.value, found.low, found.high):
        assert figure == pytest.approx(factor)
    assert found.stable == (base.stable and other.stable)


def test_a_ratio_to_nothing() -> None:
    assert ratio(summarize("a", [0.0] * 5), summarize("b", [1.0] * 5)).value == 0.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, ns: float) -> None:
        self.log.append(name)
        self.now += ns


def test_candidates_take_turns() -> None:
    clock = Clock()
    rounds: list[tuple[int, int]] = []
    taken = interleave(
        {"a": lambda: clock.work("a", 10), "b": lambda: clock.work("b", 30)},
        clock_ns=clock,
        synchronize=lambda: clock.work("s", 1),
        warmup=2,
        rounds=6,
        on_round=lambda done, total: rounds.append((done, total)),
    )
    assert "".join(clock.log) == "aabbs" + "asbs" * 6
    assert taken["a"].samples_ns == (11.0,) * 6
    assert taken["b"].samples_ns == (31.0,) * 6
    assert list(taken) == ["a", "b"]
    assert taken["a"].warmup == 2
    assert rounds == [(done, 6) for done in range(1, 7)]


def test_a_rehearsal_is_not_timed() -> None:
    clock = Clock()
    names: list[str] = []

    def run(name: str, ns: float) -> None:
        # Costs 100 more right after another candidate.
        clock.work(name, ns + 100 * (names[-1:] != [name]))
        names.append(name)

    taken = interleave(
        {"a": lambda: run("a", 10), "b": lambda: run("b", 30)},
        clock_ns=clock,
        synchronize=lambda: clock.work("s", 1),
        warmup=1,
        rounds=6,
        rehearse=True,
    )
    assert "".join(clock.log) == "abs" + "asasbsbs" * 6
    assert taken["a"].samples_ns == (11.0,) * 6
    assert taken["b"].samples_ns == (31.0,) * 6


@pytest.mark.parametrize(("budget_ns", "rounds"), [(0, 5), (100, 5), (1_000, 10), (10_000, 50)])
def test_a_budget_ends_the_rounds_after_five(budget_ns: int, rounds: int) -> None:
    clock = Clock()
    taken = interleave(
        {"a": lambda: clock.work("a", 100)},
        clock_ns=clock,
        synchronize=lambda: None,
        warmup=0,
        rounds=50,
        budget_s=budget_ns / 1e9,
    )
    assert len(taken["a"].samples_ns) == (rounds if budget_ns != 1_000 else 11)


@pytest.mark.parametrize("calls", range(1, 9))
def test_an_interruption_keeps_the_complete_rounds(calls: int) -> None:
    clock = Clock()

    def run(name: str) -> None:
        clock.work(name, 10)
        if len(clock.log) == calls:
            raise KeyboardInterrupt

    def measured() -> dict[str, object]:
        return interleave(
            {"a": lambda: run("a"), "b": lambda: run("b")},
            clock_ns=clock,
            synchronize=lambda: None,
            warmup=0,
            rounds=10,
        )

    if calls <= 2:
        with pytest.raises(KeyboardInterrupt):
            measured()
    else:
        taken = measured()
        assert {name: len(one.samples_ns) for name, one in taken.items()} == dict.fromkeys("ab", (calls - 1) // 2)
