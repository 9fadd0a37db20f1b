"""Say who ran out of memory, by how much, and what to do, in place of the allocator's error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames, walk_tb
from typing import Any

import torch

from nimble_core.tracing.provenance import module_paths, place_of
from nimble_core.utils.errors import DeviceError
from nimble_core.utils.units import format_bytes

__all__ = ["memory_explained"]

_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)
_FIX = (
    "a smaller batch, or inputs; or close what is prepared and not needed: net.close(); Options(max_streams=1, "
    "memory_limit=...) takes less beside eager"
)


@contextmanager
def memory_explained(model: Callable[..., Any]) -> Iterator[None]:
    """Raise DeviceError where memory runs out inside, with the amount and the line of ``model`` that asked for it.

    Frames of the failed work are cleared, which frees its memory for whoever catches the error.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _ran_out(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        *_, (frame, _) = walk_tb(cause.__traceback__)
        module, file, line = place_of(frame, module_paths(model))
        device = "a GPU" if isinstance(cause, torch.OutOfMemoryError) else "the host"
        asked = _ASKED.search(str(cause))
        number, unit = asked.groups() if asked else ("", "")
        size = format_bytes(float(number)) if unit == "bytes" else f"{number} {unit}"
        for one in (error, cause):
            clear_frames(one.__traceback__)
        raise DeviceError(
            f"out of memory on {device}" + f", which was asked for {size} more" * bool(asked),
            where=f"{module or 'the model'} at {file}:{line}" if file else module,
            fix=_FIX,
        ) from cause


def _ran_out(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
