"""What is said of keywords that there are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nimble_core.utils.errors import InputError
from nimble_viz import compare, plan


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
