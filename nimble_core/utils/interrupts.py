"""Postpone Ctrl-C while something runs that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_postponed"]


@contextmanager
def interrupts_postponed() -> Iterator[None]:
    """Postpone interrupts until the block ends.

    However many came, one is raised, in place of any error of the block. Nested blocks wait for the outermost. Does
    nothing outside the main thread, which alone is interrupted, or where Python does not handle interrupts. Meant for
    blocks that take milliseconds.

    Raises:
        KeyboardInterrupt: at the end, or whatever else the handler in force raises.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
