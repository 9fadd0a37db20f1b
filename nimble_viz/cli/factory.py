"""Models for the command line: ``MODULE:FACTORY`` names a function that makes a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from nimble_core.utils.errors import InputError

__all__ = ["TRAINING", "TRAINING_FACTORY", "load_factory", "made_by"]

_FACTORY_FIX = "MODULE:FACTORY: MODULE is importable or a path to a .py file, FACTORY() gives (model, args) or a dict"

TRAINING = ("target", "loss_fn", "optimizer", "autocast", "scaler", "clip_grad_norm")
"""Keys of a factory's dict that say how to train, keywords of ``compare``."""

TRAINING_FACTORY = (
    "a dict of model, args and, if needed, kwargs, loss_fn, target, optimizer, autocast, scaler and clip_grad_norm (as "
    "compare takes them; without an optimizer a training step is forward, loss and backward)"
)


def load_factory(spec: str) -> Callable[[], Any]:
    """Return the callable that ``MODULE:FACTORY`` names; raise InputError if there is none.

    ``MODULE`` is a module's name, or the path of a ``.py`` file, whose folder is then put first on the path. Errors
    inside the module are the user's and propagate.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{spec!r} does not name a factory", fix=_FACTORY_FIX)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        # Names are those of functions that the module defines, private ones only if there are no others.
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        known = [key for key in own if not key.startswith("_")] or own
        fix = f"it has {', '.join(get_close_matches(name, known, n=10, cutoff=0.0))}" if known else _FACTORY_FIX
        raise InputError(f"{place} has no function {name!r}", fix=fix)
    return cast(Callable[[], Any], factory)


def _from_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}", fix=_FACTORY_FIX)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported", fix=_FACTORY_FIX)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(f"there is no module {name!r}", fix=_FACTORY_FIX) from error


def made_by(spec: str, training: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Call a factory: the model, positional and keyword inputs, and keywords of ``compare``; or raise InputError."""
    made = load_factory(spec)()
    match made:
        case {"model": model, **rest} if rest.keys() <= {"args", "kwargs", *TRAINING}:
            args, kwargs = rest.get("args", ()), rest.get("kwargs") or {}
            if isinstance(args, tuple | list) and isinstance(kwargs, dict):
                return model, tuple(args), kwargs, {key: rest[key] for key in TRAINING if key in rest and training}
        case (model, tuple() | list() as args) if not training:
            return model, tuple(args), {}, {}
        case (model, tuple() | list() as args, dict() as kwargs) if not training:
            return model, tuple(args), kwargs, {}
        case (model, dict() as kwargs) if not training:
            return model, (), kwargs, {}
        case (model, one) if not training:
            return model, (one,), {}, {}
    given = f"dict of {', '.join(map(str, made))}" if isinstance(made, dict) else type(made).__name__
    if training:
        raise InputError(f"{spec} gave {given}, which does not say how to train", fix=f"return {TRAINING_FACTORY}")
    raise InputError(
        f"{spec} gave {given}, not (model, x), (model, inputs) or (model, args, kwargs)",
        fix=f"return those, or {TRAINING_FACTORY}, and start with --training",
    )
