"""What to say of a call that no engine is prepared for: what was expected, what was given, what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nimble_core.api.call_mistakes import input_hint
from nimble_core.api.engine import Engine
from nimble_core.tracing.signature import nearest
from nimble_core.tracing.step_wrapper import Around
from nimble_core.utils.errors import InputError

__all__ = ["model_name", "unprepared_call"]

_OTHER_ANSWERS = 'use Options(on_new_shape="prepare" or "eager")'


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
        if engine.autocast and engine.signature.bind(args, kwargs) is not None:
            return InputError(
                f"no engine is prepared under this autocast: {engine.autocast.change()}",
                where=f"prepared: {engine.signature}",
                fix="call under the same torch.autocast as prepare(...), or prepare(...) under this one as well, "
                f"or {_OTHER_ANSWERS}",
            )
    names = model.input_names if isinstance(model, Around) else ()
    elsewhere = [one.autocast is not None and not one.autocast.holds() for one in in_mode]
    near, listed = nearest([one.signature for one in in_mode], elsewhere, args, kwargs, names)
    why = near.explain(args, kwargs)
    return InputError(
        f"no engine is prepared for these inputs: {why}",
        where=f"prepared: {listed}",
        fix=(": expected a tensor, given" in why and input_hint(args, kwargs))
        or (not (args or kwargs) and "call it with the inputs: net(x)")
        or f"prepare(...) for them as well, or {_OTHER_ANSWERS}",
    )


def model_name(model: Callable[..., Any]) -> str:
    """Return the name of a function, or of a module's class."""
    return getattr(model, "__name__", type(model).__name__)
