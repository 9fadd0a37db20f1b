"""Hints for calls with wrong inputs, which would fail somewhere inside the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nimble_core.scheduling.options import option_like
from nimble_core.utils.errors import InputError, first_line

__all__ = ["input_hint", "mistakes_explained", "refuse_options"]


def refuse_options(model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for an option, misspelt or not, among keyword inputs that the model does not name."""
    suspects = {name: like for name, one in kwargs.items() if not torch.is_tensor(one) and (like := option_like(name))}
    named = inspect.signature(getattr(model, "forward", model)).parameters if suspects else ()
    for name, like in suspects.items():
        if name not in named:
            raise InputError(f"{name!r} is no input of the model", fix=f"Nimble(model, Options({like}=...))")


def input_hint(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say what to pass in place of an input that models seldom take; empty if there is none."""
    for one in (*args, *kwargs.values()):
        if type(one).__module__ == "numpy":
            return "pass a tensor: torch.from_numpy(x)"
    if any(isinstance(one, Mapping) for one in args):
        return "pass inputs by name: prepare(**inputs), compare(model, kwargs=inputs)"
    if any(type(one) in (list, tuple) for one in args):
        return "pass inputs separately: prepare(*inputs), compare(model, *inputs)"
    return ""


@contextmanager
def mistakes_explained(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise InputError with a hint where a model fails on how it was called; other errors pass."""
    try:
        yield
    except (TypeError, AttributeError, InputError) as error:
        missing = "prepare(x, y), compare(model, x, y)" if "forward() missing" in str(error) else ""
        fix = input_hint(args, kwargs) or (missing and f"pass an example of each input: {missing}")
        if not fix or (isinstance(error, InputError) and not error.what.startswith("no tensor")):
            raise
        what = error.what if isinstance(error, InputError) else f"the model does not take these: {first_line(error)}"
        raise InputError(what, fix=fix) from error
