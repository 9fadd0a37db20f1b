"""What holds on a thread: its phase of a step, its autocast, and, while it records, what libraries are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.program import Phase
from nimble_core.torch_compat.dispatch import lifts_host_tensors, set_lifts_host_tensors
from nimble_core.torch_compat.public import IS_CAPTURING
from nimble_core.tracing.rng_state import RandomStates
from nimble_core.utils.errors import NimbleError
from nimble_core.utils.locks import free_after_fork

__all__ = [
    "Autocast",
    "announced",
    "autocast_cache_cleared",
    "autocast_name",
    "autocast_type",
    "current_phase",
    "followed_states",
    "following",
    "no_autocast",
    "noting_refusals",
    "phase",
    "raise_or_note",
    "recording_here",
    "recordings_under_way",
    "refusals_noted",
    "tensors_lifted_first",
    "thread_recording",
]

_recording: set[int] = set()
"""Threads that record."""
recordings_under_way: Callable[[], int] = _recording.__len__
"""How many threads are recording."""


def recording_here() -> bool:
    """Return whether this thread is recording: a prepared model inside must then run call by call."""
    return bool(_recording) and threading.get_ident() in _recording


@contextmanager
def thread_recording() -> Iterator[None]:
    """Make ``recording_here`` true on this thread."""
    thread = threading.get_ident()
    inside = thread in _recording
    _recording.add(thread)
    try:
        yield
    finally:
        if not inside:
            _recording.discard(thread)


# One thread at a time: interleaved threads would restore each other's replacement.
_ANNOUNCING = free_after_fork(threading.RLock())


@contextmanager
def announced(capturing: bool) -> Iterator[None]:
    """Tell libraries that ask on this thread whether a capture is under way, true or not.

    In a capture Hugging Face builds attention masks in full; eager reads their values and often needs none. Told that
    there is no capture, a model takes eager's branch, which can be recorded unless it reads values back.
    """
    with _ANNOUNCING:
        real, thread = torch.cuda.is_current_stream_capturing, threading.get_ident()
        with IS_CAPTURING.replaced_by(lambda: capturing if threading.get_ident() == thread else real()):
            yield


_followed: ContextVar[RandomStates | None] = ContextVar("followed", default=None)


@contextmanager
def following(states: RandomStates | None) -> Iterator[None]:
    """Refuse, in recordings inside, a model that sets one of these random states; None: follow none."""
    token = _followed.set(states)
    try:
        yield
    finally:
        _followed.reset(token)


def followed_states() -> RandomStates | None:
    """Return the random states that a recording on this thread has to follow."""
    return _followed.get()


_noting: ContextVar[Callable[[NimbleError, FrameType], None] | None] = ContextVar("noting", default=None)


@contextmanager
def noting_refusals(note: Callable[[NimbleError, FrameType], None]) -> Iterator[None]:
    """Pass each refusal and its frame to ``note`` and go on with eager's values: for a diagnosis only."""
    token = _noting.set(note)
    try:
        yield
    finally:
        _noting.reset(token)


def refusals_noted() -> bool:
    """Return whether refusals are noted instead of raised."""
    return _noting.get() is not None


def raise_or_note(error: NimbleError, frame: FrameType) -> None:
    """Raise ``error``, or pass it on inside ``noting_refusals``."""
    note = _noting.get()
    if note is None:
        raise error
    note(error, frame)


@contextmanager
def autocast_cache_cleared() -> Iterator[None]:
    """Let autocast cast weights anew: a cached cast of an earlier run would be a constant of this one."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def tensors_lifted_first() -> Iterator[None]:
    """Let ``torch.tensor(..., device=...)`` make a host tensor first and copy it by an operator.

    Otherwise it copies without dispatch modes seeing it, which a capture does not allow.
    """
    before = lifts_host_tensors()
    set_lifts_host_tensors(True)
    try:
        yield
    finally:
        set_lifts_host_tensors(before)


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


def autocast_type(device: str) -> torch.dtype | None:
    """Return the type that autocast casts products to here; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_name(casts: torch.dtype | None) -> str:
    """Name such a type: ``"bfloat16"``, or ``"off"``."""
    return "off" if casts is None else str(casts).removeprefix("torch.")


@contextmanager
def no_autocast(device: str) -> Iterator[None]:
    """Turn autocast off inside: in a backward, and where casts were recorded as calls.

    Source:
        PyTorch documentation, "Automatic Mixed Precision package": backward passes under autocast are not recommended,
        their operators run in the types that autocast chose for the forward's.
    """
    with torch.autocast(device, enabled=False), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast under which something was recorded: its casts are calls of the recording.

    Args:
        device: type of the device, e.g. ``"cuda"``.
        casts: type that autocast cast to; None if it was off.
    """

    device: str
    casts: torch.dtype | None

    @classmethod
    def here(cls, device: str) -> Autocast:
        """Return the autocast in force."""
        return cls(device, autocast_type(device))

    def holds(self) -> bool:
        """Return whether this autocast is in force."""
        return autocast_type(self.device) is self.casts

    @property
    def asked(self) -> list[tuple[Callable[[], Any], Any]]:
        """What ``holds`` asks, each with the answer that it wants."""
        enabled = (partial(torch.is_autocast_enabled, self.device), self.casts is not None)
        return (
            [enabled] if self.casts is None else [enabled, (partial(torch.get_autocast_dtype, self.device), self.casts)]
        )

    def change(self) -> str:
        """Say how the autocast in force differs from this one."""
        return f"autocast was {autocast_name(self.casts)} then, and is {autocast_name(autocast_type(self.device))} now"
