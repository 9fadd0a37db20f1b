"""Interrupts at each moment at which Python lets them in: as a function begins, and as one in C has returned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def interrupted(work: Callable[[], object], again: int = 0) -> Iterator[int]:
    """Run ``work`` and interrupt it, one moment later each time, until it comes to its end; yields after each.

    Args:
        work: always passes through the same moments.
        again: interrupt it once more as so many functions have begun since; 0: do not.
    """
    moment = 1
    while _interrupt(work, moment, again):
        yield moment
        moment += 1


def _interrupt(work: Callable[[], object], moment: int, again: int) -> bool:
    """Whether ``work`` was interrupted. Python lets go of a watching function that raises: there is one for each."""
    passed = since = 0

    def first(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal passed
        passed += event in ("call", "c_return")
        if passed == moment:
            raise KeyboardInterrupt

    def second(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal since
        since += passed >= moment and frame.f_code is not first.__code__
        if since == again:
            raise KeyboardInterrupt

    if again:
        sys.settrace(second)
    sys.setprofile(first)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    assert passed < moment, "an interrupt was swallowed"
    return False
