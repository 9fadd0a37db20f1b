"""Ablation: estimates are differences, none is invented, and the model is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nimble_viz
from nimble_core.utils.errors import InputError
from nimble_viz.collect.ablate import Ablation, ablate, estimates

SOURCES = ["autograd", "dispatch", "allocation", "the rest"]


def samples(**medians: float) -> dict[str, list[float]]:
    names = {"whole": "as it is", "bare": "no autograd", "new": "allocating", "given": "out=", "nothing": "nothing"}
    return {names[name]: [ns] * 3 for name, ns in medians.items()}


COVERED = {"operators": 10, "out=": 4}


def test_each_estimate_is_its_difference() -> None:
    found = estimates(samples(whole=1000, bare=700, new=400, given=250, nothing=50), COVERED, "cuda")
    assert [one.name for one in found] == SOURCES
    assert [one.ns for one in found] == [300, 50, 150, 500]
    assert [one.operators for one in found] == [10, 10, 4, 10]


def test_pairs_are_compared_round_by_round() -> None:
    """A machine that slows down for some rounds slows both of a pair."""
    taken = samples(whole=0, bare=0, new=0, given=0, nothing=0)
    taken |= {"as it is": [100.0, 900.0, 110.0], "no autograd": [90.0, 890.0, 100.0]}
    assert estimates(taken, COVERED, "cuda")[0].ns == 10


def test_what_no_operator_shows_is_unknown() -> None:
    covered = {"operators": 10, "out=": 0}
    parts = estimates(samples(whole=9, bare=8, new=0, given=0, nothing=1), covered, "cpu")
    found = {one.name: one.ns for one in parts}
    assert found["allocation"] is None
    assert "unknown" in str(Ablation(9.0, 10, parts, (), "cpu"))


@given(st.lists(st.floats(0, 1e9), min_size=5, max_size=5))
def test_nothing_is_negative(ns: list[float]) -> None:
    whole, bare, new, given_, nothing = ns
    found = estimates(samples(whole=whole, bare=bare, new=new, given=given_, nothing=nothing), COVERED, "cpu")
    assert all(one.ns is not None and one.ns >= 0 for one in found)
    assert sum(one.ns or 0.0 for one in found) >= whole * (1 - 1e-9)


class Counting(nn.Module):
    """Writes a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.second(torch.relu_(self.norm(self.first(x)))), training=True)


def test_a_model_is_ablated_and_left_as_it_was() -> None:
    model, x = Counting(), torch.randn(4, 8)
    state, given_, random = copy.deepcopy(model.state_dict()), x.clone(), torch.random.get_rng_state()
    found = nimble_viz.ablate(model, x, rounds=5)
    assert [one.name for one in found.estimates] == SOURCES
    assert found.device == "cpu"
    assert found.iteration_ns > 0
    assert found.operators >= 4
    assert found.estimate("allocation").operators >= 2  # the two products
    assert "ESTIMATED" in str(found)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, given_)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(KeyError):
        found.estimate("magic")


def test_wrong_use() -> None:
    with pytest.raises(InputError, match="rounds"):
        ablate(nn.Linear(2, 2), torch.ones(1, 2), rounds=0)
    with pytest.raises(InputError):
        ablate(nn.Linear(2, 2))
