"""Keywords that a function does not have, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from nimble_core.errors import InputError
from nimble_core.options import Options

__all__ = ["refuse_unknown"]

_OPTIONS = frozenset(field.name for field in fields(Options))


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Raise InputError for the first of these keywords: a misspelt one, one of ``Options``, or an input of the model.

    Args:
        function: with ``kwargs`` and ``options`` among its keywords.
        unknown: given to it, and none of them.
    """
    for name in unknown:
        known = (one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY)
        near = get_close_matches(name, known, 1)
        if name in _OPTIONS:
            fix = f"options=Options({name}=...)"
        elif near:
            fix = f"{near[0]}=...; or, if it is an input of the model, kwargs={{{name!r}: ...}}"
        else:
            fix = f"inputs of the model by name go into one dict: kwargs={{{name!r}: ...}}"
        raise InputError(f"{function.__name__}() has no keyword {name!r}", fix=fix)
