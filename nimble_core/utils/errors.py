"""What can go wrong, as few kinds. Every message says what happened, where, and what to do.

``NimbleError`` is the root: ``except NimbleError`` catches all that this project raises on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = [
    "CaptureError",
    "DeviceError",
    "InputError",
    "NimbleError",
    "NimbleWarning",
    "NotStaticError",
    "ReportFileError",
    "ScheduleError",
    "causes",
    "first_line",
]


_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys: names of files and modules may hold it."""


class NimbleError(Exception):
    """Root of all errors raised on purpose.

    Args:
        what: what happened, one sentence.
        where: call, module path and source line, if known.
        fix: what the reader can do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  to do: {self.fix}")
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", "\n".join(lines))


class NimbleWarning(UserWarning):
    """Something a user should know that is no error: a forward with side effects that a replay does not repeat."""


class InputError(NimbleError, ValueError):
    """An argument that does not fit: a model that is not callable, a replay with another shape, a bad option."""


class CaptureError(NimbleError, RuntimeError):
    """A call that cannot be recorded or captured (host read, data-dependent shape, unseen launch)."""


class NotStaticError(CaptureError):
    """Two recordings of one model differ, or its next run would read other memory: the model is not static."""


class ScheduleError(NimbleError, RuntimeError):
    """A schedule that would race, deadlock or break its promise; names the pair of calls."""


class DeviceError(NimbleError, RuntimeError):
    """The device refused: out of memory, a failed launch, no such device."""


class ReportFileError(NimbleError, ValueError):
    """A report file that is damaged, hostile, or newer than this version reads."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error, what it was raised from, and so on; each once: a refusal may be raised again from what hid it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, cut at 200 characters."""
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]
