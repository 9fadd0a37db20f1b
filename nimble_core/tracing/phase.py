"""The part of a training step that is running: recorded calls belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from nimble_core.ir.program import Phase

__all__ = ["current_phase", "phase"]

_now: ContextVar[Phase] = ContextVar("phase", default="forward")


def current_phase() -> Phase:
    """Return the phase that is running on this thread; ``"forward"`` by default."""
    return _now.get()


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Let calls inside belong to phase ``name``.

    >>> with phase("backward"):
    ...     current_phase()
    'backward'
    """
    token = _now.set(name)
    try:
        yield
    finally:
        _now.reset(token)
