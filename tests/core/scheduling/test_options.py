from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError, NimbleError


def test_defaults() -> None:
    options = Options()
    assert (options.policy, options.outputs, options.on_new_shape, options.strict) == ("auto", "copy", "error", False)
    assert (options.fuse, options.tune, options.budget_s) == ("auto", "fast", 60.0)
    assert options == Options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fuse", "cudnn"),
        ("fuse", None),
        ("tune", "slow"),
        ("tune", None),
        ("outputs", "both"),
        ("on_new_shape", "ignore"),
        ("max_streams", 0),
        ("max_streams", -1),
        ("budget_s", -1.0),
        ("budget_s", float("nan")),
        ("memory_limit", -1),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name) as caught:
        Options(**{name: value})
    assert caught.value.fix
    assert isinstance(caught.value, (NimbleError, ValueError))
    with pytest.raises(InputError):
        replace(Options(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"), [("max_streams", 2.5, "how many"), ("memory_limit", "1GB", "bytes")]
)
def test_a_number_of_the_wrong_kind_is_told_what_is_wanted(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(InputError, match="is not a whole number") as caught:
        Options(**{name: value})
    assert wanted in caught.value.fix


def test_what_is_no_number_is_not_called_negative() -> None:
    with pytest.raises(InputError, match=r"budget_s=nan\) is not a number"):
        Options(budget_s=float("nan"))
    with pytest.raises(InputError, match=r"budget_s=-1\.0\) is negative"):
        Options(budget_s=-1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_streams", None), ("max_streams", 1), ("budget_s", 0), ("memory_limit", 0), ("policy", len)],
)
def test_good_values(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"), [("max_streams", "4"), ("budget_s", "1"), ("memory_limit", "1GB"), ("policy", 3)]
)
def test_a_value_of_the_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "fix"),
    [("max_stream", "did you mean max_streams?"), ("Tune", "did you mean tune?"), ("colour", "one of fuse, policy")],
)
def test_an_option_that_there_is_not(name: str, fix: str) -> None:
    for make in (Options, lambda **given: replace(Options(), **given)):
        with pytest.raises(InputError, match=f"no option '{name}'") as caught:
            make(**{name: 1})
        assert caught.value.fix.startswith(fix)


def test_options_are_declared_as_before() -> None:
    import copy
    import inspect
    import pickle

    assert list(inspect.signature(Options).parameters)[:2] == ["fuse", "policy"]
    assert pickle.loads(pickle.dumps(Options("none"))) == copy.copy(Options("none")) == Options(fuse="none")
