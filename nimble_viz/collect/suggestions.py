"""Suggest what to write instead of a name that does not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from nimble_core.scheduling.options import option_like
from nimble_core.utils.errors import InputError

__all__ = ["nearest", "refuse_unknown"]


def nearest(name: str, known: Iterable[str], most: int = 1, least: float = 0.6) -> list[str]:
    """Return the names in ``known`` most similar to ``name``, from ``least`` (0 to 1) on; ties by name.

    >>> nearest("optoins", ["loss_fn", "options"]), nearest("bert", ["net", "bert_large"], most=2, least=0.0)
    (['options'], ['bert_large', 'net'])
    """
    alike = {one: SequenceMatcher(None, name, one).ratio() for one in known}
    return sorted((one for one in alike if alike[one] >= least), key=lambda one: (-alike[one], one))[:most]


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Raise InputError for the first keyword: misspelt, a field of ``Options`` or an input of the model."""
    for name in unknown:
        known = (one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY)
        near = nearest(name, known)
        if like := option_like(name):
            fix = f"options=Options({like}=...)"
        elif near:
            fix = f"{near[0]}=...; or, if it is an input of the model, kwargs={{{name!r}: ...}}"
        else:
            fix = f"inputs of the model by name go into one dict: kwargs={{{name!r}: ...}}"
        raise InputError(f"{function.__name__}() has no keyword {name!r}", fix=fix)
