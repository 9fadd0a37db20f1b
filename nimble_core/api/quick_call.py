"""Calls in which all is as usual, in few steps: what the long way asks one by one is asked in one pass in C here.

The host's caches are cold after a wait for the GPU: each Python function on the way to a launch then takes 1 to 3 µs on
an H200's host, ten times what it takes in a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nimble_core.api.engine import Engine
from nimble_core.torch_compat.autograd import forward_ad_level, transforms_active
from nimble_core.torch_compat.unchanged import passes
from nimble_core.tracing.recording_contexts import recordings_under_way
from nimble_core.utils.errors import DeviceError

__all__ = ["LONG_WAY", "QuickCall", "quick_call"]

QuickCall = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Returns what the model would; ``LONG_WAY`` if something was not as usual."""
LONG_WAY = object()


def quick_call(engine: Engine, model: Callable[..., Any], *, static: bool) -> QuickCall | None:
    """Return calls of ``engine`` by the short way; None if there is none.

    Args:
        engine: of this model.
        model: whose mode has to be the engine's.
        static: whether outputs stay the engine's own buffers.
    """
    if engine.check_first or engine.writes or engine.passed_on or (engine.backward, engine.apart) != (None, None):
        return None
    usual: list[tuple[Callable[[], Any], Any]] = [
        (recordings_under_way, 0),
        (transforms_active, False),
        (forward_ad_level, -1),
        (partial(getattr, model, "training", False), engine.mode),
    ]
    if engine.mode:  # parameters that require gradients are warned of
        usual.append((torch.is_grad_enabled, False))
    if engine.autocast is not None:
        usual += engine.autocast.asked
    asked, answers = zip(*usual, strict=True)
    run = engine.executable.quick(partial(passes().ready, asked, answers, engine.signature.bind), static=static)
    if run is None:
        return None
    values, check, build = engine.watch.values, engine.check, engine.build

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        folds = values.folds
        try:
            outputs = run(args, kwargs)
            if outputs is None:
                return LONG_WAY
            check()
        except DeviceError:  # another thread may have closed this engine, and made a better one
            return LONG_WAY
        return build(outputs) if values.folds == folds else LONG_WAY  # on weights that were folded anew meanwhile

    return call
