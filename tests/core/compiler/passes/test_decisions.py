"""What was decided once is decided again alike."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.ir.program import KernelChoice


def node_of(calls: tuple[int, ...]) -> fx.Node:
    node = fx.Graph().call_function(torch.relu, ())
    node.meta["eager"] = calls
    return node


@given(st.lists(st.integers(0, 5), max_size=3).map(lambda calls: tuple(sorted(calls))), st.booleans())
def test_without_given_choices_what_is_wanted_is_taken_and_noted(calls: tuple[int, ...], wanted: bool) -> None:
    decisions = Decisions()
    assert decisions.take(node_of(calls), "k", wanted=wanted) is wanted
    assert decisions.made == [KernelChoice(min(calls, default=0), "k")] * wanted


@given(st.booleans(), st.sampled_from(["k", "other"]), st.integers(1, 3))
def test_given_choices_override_what_is_wanted(wanted: bool, kernel: str, call: int) -> None:
    decisions = Decisions(None, frozenset([KernelChoice(1, "k")]))
    taken = decisions.take(node_of((call, 7)), kernel, wanted=wanted)
    assert taken == ((call, kernel) == (1, "k"))
    assert decisions.made == [KernelChoice(1, "k")] * taken
    assert not Decisions(None, frozenset()).take(node_of((1,)), "k", wanted=True), "no choices are choices too"


def test_each_key_is_timed_once_and_what_fails_takes_forever() -> None:
    asked: list[int] = []

    def timer(calls: object) -> list[float | None]:
        asked.append(len(list(calls)))  # type: ignore[call-overload]
        return [1.0, None]

    decisions = Decisions(timer)
    calls = [lambda: None, lambda: None]
    for key in ("a", "a", "b"):
        assert decisions.times_ns(key, lambda: calls) == (1.0, math.inf)
    assert asked == [2, 2]
    assert Decisions().times_ns("a", lambda: calls) is None
