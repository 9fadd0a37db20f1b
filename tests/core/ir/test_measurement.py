from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.measurement import (
    DRIFT_BOUND,
    SPREAD_BOUND,
    Measurement,
    Ratio,
    across,
    interleave,
    not_slower,
    quantile,
    ratio,
    summarize,
    undecided,
)

times = st.lists(st.floats(1, 1e9), min_size=1, max_size=40)


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


@given(times, times)
def test_ratios_lie_within_their_intervals_and_turn_over(first: list[float], second: list[float]) -> None:
    one, other = summarize("a", first), summarize("b", second)
    opposite = {"faster": "slower", "slower": "faster"}
    for compared in (ratio, across):
        found, turned = compared(one, other), compared(other, one)
        assert found.low <= found.value <= found.high
        assert turned.verdict == opposite.get(found.verdict, found.verdict)
        assert turned.value == pytest.approx(1 / found.value)


@pytest.mark.parametrize(
    ("low", "high", "same", "verdict"),
    [
        (1.03, 1.04, 1.02, "faster"),
        (1.03, 1.04, 1.05, "no difference"),
        (1.01, 9.0, 1.02, "undecided"),
        (0.99, 1.01, 1.02, "no difference"),
        (0.0, math.inf, 1.02, "undecided"),
        (0.5, 0.97, 1.02, "slower"),
        (0.5, 1.0, 1.02, "undecided"),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, same: float, verdict: str) -> None:
    found = Ratio("a", "b", (low + min(high, 10)) / 2, low, high, same)
    assert (found.verdict, found.decided) == (verdict, verdict != "undecided")


def test_nothing_measured_and_nothing_taken() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize("a", [])
    nothing, something = summarize("a", [0.0] * 40), summarize("b", [1.0] * 40)
    assert ratio(nothing, something).verdict == ratio(something, nothing).verdict == "undecided"


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
    log = "".join(clock.log)
    assert log[:5] == "aabbs"
    turns = {log[at : at + 4] for at in range(5, len(log), 4)}
    assert turns == {"asbs", "bsas"}  # in an order drawn anew for each round
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
    log = "".join(clock.log)
    assert log[:3] == "abs"
    assert {log[at : at + 8] for at in range(3, len(log), 8)} == {"asasbsbs", "bsbsasas"}
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


def measured(times: Mapping[str, Callable[[int], float]], *, patience_s: float, **how: Any) -> dict[str, Measurement]:
    """Ways whose calls take so long; the argument counts the calls of all ways."""
    clock = Clock()

    def run(name: str) -> None:
        clock.work(name, times[name](len(clock.log)))

    calls = {name: partial(run, name) for name in times}
    return interleave(
        calls,
        clock_ns=clock,
        synchronize=lambda: None,
        patience_s=patience_s,
        open_names=lambda taken: undecided(taken, taken),
        **how,
    )


def test_sampling_goes_on_until_it_is_decided() -> None:
    draw = random.Random(1)
    noise = lambda ns: lambda _: ns * draw.uniform(0.94, 1.06)  # noqa: E731
    taken = measured({"a": noise(1e7), "b": noise(1.03e7), "c": noise(2e7)}, patience_s=60.0)
    counts = {name: len(one.samples_ns) for name, one in taken.items()}
    assert counts["c"] < counts["a"] == counts["b"] < 4096  # who is slower is known first
    assert ratio(taken["a"], taken["b"]).decided


@pytest.mark.parametrize(("patience_s", "rounds"), [(0.0, 32), (2.0, 128), (8.0, 256)])
def test_patience_ends_at_a_look(patience_s: float, rounds: int) -> None:
    draw = random.Random(1)
    wild = lambda _: draw.uniform(1e6, 4e7)  # noqa: E731
    taken = measured({"a": wild, "b": wild}, patience_s=patience_s)
    assert [len(one.samples_ns) for one in taken.values()] == [rounds, rounds]
    assert ratio(taken["a"], taken["b"]).verdict == "undecided"


def test_samples_that_others_interrupt_are_left_out_and_counted() -> None:
    """A program that takes the core now and then makes every eighth sample of either way ten times as long."""
    draw, seen = random.Random(2), [0]

    def run(ns: float) -> Callable[[int], float]:
        def once(_: int) -> float:
            hit = draw.random() < 1 / 8
            seen[0] += hit
            return ns * (10 if hit else 1)

        return once

    taken = measured({"a": run(1e6), "b": run(1.1e6)}, patience_s=0.0, rounds=256, interruptions=lambda: seen[0])
    for name, ns in (("a", 1e6), ("b", 1.1e6)):
        assert {*taken[name].samples_ns} == {ns}
        assert taken[name].dropped > 15
        assert len(taken[name].samples_ns) + taken[name].dropped == 256
    assert taken["a"].rounds != taken["b"].rounds
    assert ratio(taken["a"], taken["b"]).value == pytest.approx(1.1)


def test_samples_are_paired_by_round() -> None:
    """Each round takes as long as its number says, for both ways; every third sample of one way is missing."""
    numbers = range(1, 91)
    old = summarize("old", [2.0 * k for k in numbers], rounds=list(numbers))
    some = [k for k in numbers if k % 3]
    new = summarize("new", [1.0 * k for k in some], rounds=some)
    assert (ratio(new, old).low, ratio(new, old).high) == pytest.approx((2.0, 2.0))


def test_noise_of_the_machine_decides_nothing() -> None:
    """Two ways that are the same, on a machine whose speed wanders: whoever comes first in a round is drawn."""
    wrong = 0
    for seed in range(200):
        draw, slow = random.Random(seed), [0.0]

        def run(_: int, draw: random.Random = draw, slow: list[float] = slow) -> float:
            slow[0] = 0.95 * slow[0] + draw.gauss(0, 0.03)
            return 1e7 * math.exp(slow[0])

        taken = measured({"a": run, "b": run}, patience_s=20.0)
        wrong += ratio(taken["a"], taken["b"]).verdict in ("faster", "slower")
    assert wrong <= 1


def test_who_was_given_up_early_is_not_the_fastest_because_the_machine_got_slower() -> None:
    draw = random.Random(6)

    def way(ns: float, rounds: int) -> list[float]:
        return [ns * draw.uniform(0.99, 1.01) * (1.5 if k >= 64 else 1.0) for k in range(rounds)]

    taken = {"given up": summarize("a", way(120.0, 64)), "one": summarize("b", way(100.0, 256))}
    taken["other"] = summarize("c", way(100.0, 256))
    assert min(taken, key=lambda name: taken[name].median_ns) == "given up"
    assert sorted(not_slower(taken)) == ["one", "other"]


def test_rounds_of_two_sessions_are_not_paired() -> None:
    """The machine is 3% slower in the second: less than two measurements may differ by."""
    first = measured({"a": lambda _: 1e6}, patience_s=0.0)["a"]
    second = measured({"a": lambda _: 1.03e6}, patience_s=0.0, first_round=1000)["a"]
    assert not {*first.rounds} & {*second.rounds}
    assert ratio(second, first) == across(second, first)
    assert ratio(second, first).verdict == "no difference"
