"""What ``compare``, ``plan`` and ``diagnose`` are given: the model itself, its inputs by name, and wrong keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import option_like
from nimble_core.utils.errors import InputError

__all__ = ["keyword_inputs", "original", "refuse_unknown"]

_TRAIN = "compare(model, x, target=y, loss_fn=loss_fn, optimizer=optimizer, training=True)"


def original(model: Any) -> Any:
    """Return the model that a Nimble stands for, any other as it is; raise InputError for a ``TrainStep``."""
    if isinstance(model, TrainStep):
        raise InputError("a TrainStep is a step that is prepared already, not a model", fix=_TRAIN)
    return original(model._model) if isinstance(model, Nimble) else model


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Raise InputError for the first keyword: misspelt, a field of ``Options`` or an input of the model."""
    for name in unknown:
        known = (one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY)
        near = get_close_matches(name, known, n=1)
        if name in ("training", "loss_fn", "optimizer"):
            fix = f"{function.__name__} looks at the forward pass alone; for training: {_TRAIN}"
        elif like := option_like(name):
            fix = f"options=Options({like}=...)"
        elif near:
            fix = f"{near[0]}=...; or, if it is an input of the model, kwargs={{{name!r}: ...}}"
        else:
            fix = f"inputs of the model by name go into one dict: kwargs={{{name!r}: ...}}"
        raise InputError(f"{function.__name__}() has no keyword {name!r}", fix=fix)


def keyword_inputs(kwargs: object) -> dict[str, Any]:
    """Return the keyword inputs of a model as a dict, or raise InputError."""
    if not isinstance(kwargs or {}, Mapping):
        raise InputError(f"kwargs is a {type(kwargs).__name__}", fix="a dict of the model's keyword inputs")
    return dict(kwargs or {})  # type: ignore[call-overload, no-any-return]  # a mapping, as was checked
