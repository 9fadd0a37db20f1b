"""Python's garbage collector, which is one for all threads, paused while much is made that stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


class _Pauses:
    """Who wants no garbage collection now: the collector is one for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._collecting = False

    def begin(self) -> None:
        with self._lock:
            if not self._inside:
                self._collecting = gc.isenabled()
            self._inside += 1
            gc.disable()

    def forget(self) -> None:
        """In a process that was forked: who paused here did not come along."""
        inside, self._inside, self._lock = self._inside, 0, threading.Lock()
        if inside and self._collecting:
            gc.enable()

    def end(self) -> None:
        with self._lock:
            self._inside = max(self._inside - 1, 0)  # 0 in a process that was forked inside
            if not self._inside and self._collecting:
                gc.enable()


_pauses = _Pauses()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pauses.forget)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection inside.

    The collector would walk everything that preparation makes, and everything that was ever imported, again and again.
    A graph that it collects in the middle of a capture would end the capture. Other threads' garbage waits, too. Where
    pauses overlap, nested or in threads, the end of the last one switches the collector on again.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
