"""What to say of calls with wrong inputs: those that would fail inside the model, and those that no engine serves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nimble_core.api.engine import Engine
from nimble_core.scheduling.options import option_like
from nimble_core.utils.errors import InputError, first_line

__all__ = ["mistakes_explained", "model_name", "refuse_options", "unprepared_call"]

_LISTED = 3
"""Signatures that a refused call is shown, the latest first; the others are counted."""
_OTHER_ANSWERS = 'use Options(on_new_shape="prepare" or "eager")'


def refuse_options(model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for an option, misspelt or not, among keyword inputs that the model does not name."""
    suspects = {name: like for name, one in kwargs.items() if not torch.is_tensor(one) and (like := option_like(name))}
    named = inspect.signature(getattr(model, "forward", model)).parameters if suspects else ()
    for name, like in suspects.items():
        if name not in named:
            raise InputError(f"{name!r} is no input of the model", fix=f"Nimble(model, Options({like}=...))")


def _input_hint(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
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
        # Errors of the model itself name neither its call nor what an input is.
        kinds = {type(one).__name__ for one in (*args, *kwargs.values()) if not torch.is_tensor(one)}
        blamed = isinstance(error, InputError) or any(one in str(error) for one in ("forward()", *kinds))
        fix = (blamed and _input_hint(args, kwargs)) or (missing and f"pass an example of each input: {missing}")
        if not fix or (isinstance(error, InputError) and not error.what.startswith("no tensor")):
            raise
        what = error.what if isinstance(error, InputError) else f"the model does not take these: {first_line(error)}"
        raise InputError(what, fix=fix) from error


def unprepared_call(
    model: Callable[..., Any],
    engines: Sequence[Engine],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    freed: bool,
) -> InputError:
    """Return the error for a call that no engine serves.

    Args:
        model: what was prepared.
        engines: what it was prepared as.
        args: positional inputs of the call.
        kwargs: its keyword inputs.
        training: whether the model is in training mode.
        freed: whether engines were closed before.
    """
    if not engines:
        since = " any more: close(), or a move or conversion, freed what was" if freed else ""
        return InputError(
            f"nothing is prepared in this Nimble of {model_name(model)}{since}",
            fix=f"call prepare(*example_inputs) on it {'again' if since else 'first'}",
        )
    in_mode = [engine for engine in engines if engine.mode == training]
    if not in_mode:
        words = ("training", "evaluation") if training else ("evaluation", "training")
        return InputError(
            f"the model is in {words[0]} mode, the engines were prepared in {words[1]} mode",
            fix=f"model.{'eval' if training else 'train'}(), or prepare again",
        )
    for engine in in_mode:
        if engine.autocast and engine.signature.bind(tuple(args), dict(kwargs)) is not None:
            return InputError(
                f"no engine is prepared under this autocast: {engine.autocast.change()}",
                where=f"prepared: {engine.signature}",
                fix="call under the same torch.autocast as prepare(...), or prepare(...) under this one as well, "
                f"or {_OTHER_ANSWERS}",
            )
    here = [one for one in in_mode if one.autocast is None or one.autocast.holds()]
    why = (here or in_mode)[0].signature.explain(args, kwargs)
    different = list(dict.fromkeys(str(one.signature) for one in in_mode))  # under another autocast listed once
    listed = "; ".join([*different[:_LISTED], *([f"and {len(different) - _LISTED} more"] * (len(different) > _LISTED))])
    more = ", training=True" * any(one.backward is not None for one in in_mode)
    return InputError(
        f"no engine is prepared for these inputs: {why}",
        where=f"prepared: {listed}",
        fix=(": expected a tensor, given" in why and _input_hint(args, kwargs))
        or (not (args or kwargs) and "call it with the inputs: net(x)")
        or f"prepare(...{more}) for them as well, or {_OTHER_ANSWERS}",
    )


def model_name(model: Callable[..., Any]) -> str:
    """Return the name of a function, or of a module's class."""
    return getattr(model, "__name__", type(model).__name__)
