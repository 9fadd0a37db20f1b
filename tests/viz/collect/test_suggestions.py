"""What is said of keywords that there are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.errors import InputError
from nimble_viz import compare, plan
from nimble_viz.collect.suggestions import nearest


@pytest.mark.parametrize("function", [compare, plan])
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("input_ids", r"inputs of the model by name go into one dict: kwargs=\{'input_ids': \.\.\.\}"),
        ("policy", r"options=Options\(policy=\.\.\.\)"),
        ("optoins", r"options=\.\.\.; or, if it is an input of the model, kwargs="),
    ],
)
def test_what_to_write_instead_is_said(function: Any, name: str, fix: str) -> None:
    given = {name: torch.ones(2)}
    with pytest.raises(InputError, match=rf"{function.__name__}\(\) has no keyword '{name}'(.|\n)*{fix}"):
        function(torch.nn.Linear(2, 2), **given)


_NAMES = st.text("abcd", min_size=1, max_size=4)


@given(_NAMES, st.sets(_NAMES, max_size=12), st.integers(1, 5))
def test_the_nearest_names_come_first(name: str, known: set[str], most: int) -> None:
    every, near = nearest(name, known, most=len(known), least=0.0), nearest(name, known, most)
    assert set(every) == known
    assert every[: len(near)] == near  # as like as any that is left out
    assert len(near) <= most
    assert every[:1] == [name] or name not in known
    assert nearest("optoins", ["loss_fn", "options"]) == ["options"]
    assert nearest("input_ids", ["loss_fn", "options"]) == []
