from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError


def test_a_frozen_value_with_its_fields_in_order() -> None:
    assert list(inspect.signature(Options).parameters)[:2] == ["fuse", "policy"]
    assert pickle.loads(pickle.dumps(Options("none"))) == Options(fuse="none")
    with pytest.raises(FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]
    for name, value in (("max_streams", None), ("budget_s", 0), ("memory_limit", 0), ("policy", len)):
        assert getattr(Options(**{name: value}), name) == value  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("name", "value", "what", "fix"),
    [
        ("fuse", "cudnn", "is not a choice", "one of auto, none, library, inductor"),
        ("tune", None, "is not a choice", "one of off, fast, full"),
        ("outputs", "both", "is not a choice", "one of"),
        ("on_new_shape", "ignore", "is not a choice", "one of"),
        ("max_streams", 0, "is less than 1", "at least 1"),
        ("max_streams", 2.5, "is not a whole number", "how many"),
        ("budget_s", -1.0, "is negative", "seconds"),
        ("budget_s", float("nan"), "is not a number", "seconds"),
        ("budget_s", "1", "is not a number", "seconds"),
        ("memory_limit", -1, "is negative", "bytes"),
        ("memory_limit", "1GB", "is not a whole number", "bytes"),
        ("policy", 3, "is not a policy", "or a function"),
        ("strict", 1, "is neither True nor False", "True or False"),
        ("max_stream", 1, "there is no option 'max_stream'", "did you mean max_streams"),
        ("colour", 1, "there is no option 'colour'", "one of fuse, policy"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(name: str, value: Any, what: str, fix: str) -> None:
    for make in (Options, lambda **given: replace(Options(), **given)):
        with pytest.raises(InputError, match=what) as caught:
            make(**{name: value})
        assert fix in caught.value.fix
