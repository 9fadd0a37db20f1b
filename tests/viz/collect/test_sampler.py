"""The sampler: which iteration is timed, profiled or let go by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.errors import InputError
from nimble_viz.collect.sampler import Counts, Sampler


def ticks(sampler: Sampler, *kinds: str, every: int = 100) -> list[str]:
    return [sampler.tick(kind, 0, every * at) for at, kind in enumerate(kinds)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        (["loader", "module", "optimizer"] * 3, "loader"),
        (["module", "optimizer"] * 3, "optimizer"),
        (["module", "step"], "step"),
        # One batch, many modules: the second batch is waited for.
        (["loader", *["module"] * 20], None),
        (["loader", *["module"] * 20, "loader"], "loader"),
        # A loader that comes once, before the loop, is not waited for for ever.
        (["loader", *["module"] * 40], "module"),
        # Gradients that accumulate over more than two calls: an iteration is one of them.
        ([*["module"] * 4, "optimizer"] * 2, "module"),
        (["module", "module", "optimizer"] * 2, "optimizer"),
    ],
)
def test_what_an_iteration_is(kinds: list[str], chosen: str | None) -> None:
    sampler = Sampler(Counts(0, 1, 1))
    ticks(sampler, *kinds)
    assert sampler.chosen == (None if chosen is None else (chosen, 0))


def test_the_wait_for_the_loader_is_counted_by_iteration() -> None:
    sampler = Sampler(Counts(0, 2, 1))
    for at in range(8):
        sampler.tick("loader", 0, 100 * at)
        sampler.waited(30)
        sampler.tick("module", 1, 100 * at + 50)
    assert sampler.waits_ns == [30.0, 30.0]
    assert sampler.times_ns == [100.0, 100.0]


@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["loader", "optimizer", "module"]), st.just(0)), min_size=12, max_size=60),
)  # fmt: skip
def test_each_order_comes_once_and_in_turn(
    warmup: int, timed: int, profiled: int, given_: list[tuple[str, int]]
) -> None:
    sampler = Sampler(Counts(warmup, timed, profiled))
    said = [sampler.tick(kind, who, 10 * at) for at, (kind, who) in enumerate(given_)]  # type: ignore[arg-type]
    orders = [order for order in said if order]
    first = [[], [], ["stop"], ["tick", "stop"]][min(warmup, 3)]
    whole = ["found", *first, "start", *["tick"] * profiled, "stop", "forget"]
    assert orders == whole[: len(orders)]
    assert len(sampler.times_ns) <= timed


@pytest.mark.parametrize(("name", "least"), [("warmup", 0), ("timed", 0), ("profiled", 1)])
def test_counts_below_what_is_needed_are_refused(name: str, least: int) -> None:
    for wrong in (least - 1, 1.5):
        with pytest.raises(InputError, match=f"{name}={wrong}"):
            Counts(**{name: wrong})  # type: ignore[arg-type]  # what is tested
