"""Tracebacks of errors that say what to do: the user's own lines, without those of torch and this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from nimble_core.utils.errors import NimbleError

__all__ = ["full_tracebacks", "short_traceback"]

_LEFT_OUT = frozenset({"contextlib", "nimble_core", "nimble_viz", "torch"})
"""Packages; torchvision's code is not torch's."""
_SETTING = "NIMBLE_TRACEBACK"
P = ParamSpec("P")
R = TypeVar("R")


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Leave frames of torch and this package out of what ``function`` raises as ``NimbleError``.

    With ``NIMBLE_TRACEBACK=full`` in the environment they stay.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except NimbleError as error:
            if os.environ.get(_SETTING) != "full":
                error.__traceback__ = _users(error.__traceback__)
            raise

    return called


@contextmanager
def full_tracebacks() -> Iterator[None]:
    """Leave nothing out inside."""
    before = os.environ.get(_SETTING)
    os.environ[_SETTING] = "full"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SETTING, None)
        else:
            os.environ[_SETTING] = before


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that are left out."""
    kept: list[TracebackType] = []
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _LEFT_OUT:
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found
