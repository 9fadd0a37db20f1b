"""Where a call comes from: module path, file and line, read off the running frames; also for what ran out of memory."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import clear_frames, walk_tb
from types import FrameType
from typing import Any

import torch

from nimble_core.utils.errors import DeviceError, NimbleWarning, causes
from nimble_core.utils.units import format_bytes

__all__ = [
    "issued_in",
    "label_of",
    "line_inside",
    "memory_explained",
    "module_paths",
    "pass_over",
    "place_of",
    "running_module",
    "warn",
]

# With the slash: torchvision's code is not torch's.
_TORCH_ROOT = f"{torch.__path__[0]}/"
_FROZEN = "<frozen "  # what runs modules: runpy, importlib
_PACKAGE_ROOT = f"{Path(__file__).parents[1]}/"
_passed: tuple[str, ...] = (_TORCH_ROOT, _PACKAGE_ROOT, _FROZEN, contextlib.__file__)


def module_paths(model: Callable[..., Any]) -> dict[int, str]:
    """Return the path of every submodule, by ``id``; empty for a function."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {id(module): name for name, module in model.named_modules()}


def pass_over(place: str) -> None:
    """Skip frames of this directory or file when attributing calls, as those of torch and this package."""
    global _passed
    _passed = (*dict.fromkeys((*_passed, place if place.endswith(".py") else f"{place.rstrip('/')}/")),)


def place_of(frame: FrameType | None, modules: Mapping[int, str]) -> tuple[str, str, int]:
    """Return ``(module path, file, line)`` of the code that issued a call.

    The module is the innermost one running, the line the innermost one outside of torch and of skipped files.
    """
    file, line, fallback = "", 0, ("", 0)
    while frame is not None:
        name = frame.f_code.co_filename
        if not file and not name.startswith(_passed):
            file, line = label_of(name), frame.f_lineno
        if frame.f_code.co_name == "_call_impl" and name.startswith(_TORCH_ROOT):
            path = modules.get(id(frame.f_locals.get("self")))
            if path is not None:
                if file:
                    return path, file, line
                return path, *_outside_torch(frame, fallback)
        frame = frame.f_back
    return "", file, line


def running_module(frame: FrameType | None) -> Any:
    """Return the innermost module that is running; None if none is."""
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename.startswith(_TORCH_ROOT):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def issued_in(frame: FrameType | None, file: str) -> bool:
    """Return whether code of this file of torch issued a call, with no line of the user's in between."""
    while frame is not None and frame.f_code.co_filename.startswith(_passed):
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def line_inside(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of user code that runs inside of this package; ``("", 0)`` if none does.

    In a backward that is an autograd function or a hook; torch's own operators have none.
    """
    while frame is not None and not frame.f_code.co_filename.startswith(_passed[1:]):
        if not frame.f_code.co_filename.startswith(_TORCH_ROOT):
            return label_of(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return "", 0


def warn(what: str) -> None:
    """Give a ``NimbleWarning`` at the user's line: the innermost one outside of torch and of skipped files."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_passed):
        frame, level = frame.f_back, level + 1
    warnings.warn(what, NimbleWarning, stacklevel=level)


def label_of(file: str) -> str:
    """Return ``file`` relative to the import path it lies on: absolute paths mean nothing on another machine.

    A notebook's cell goes by its number, ``"In[12]"``, and by another one once it has run again.
    """
    return _cell(file) or _relative(file)


def _cell(file: str) -> str:
    """Return ``"In[12]"`` for the code of a cell of the running IPython, else nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return str(named[1]) if named and named[0] == "Cell" else ""


@cache
def _relative(file: str) -> str:
    roots = sorted((root.rstrip("/") + "/" for root in sys.path if root), key=len, reverse=True)
    return next((file[len(root) :] for root in roots if file.startswith(root)), file.rpartition("/")[2])


def _outside_torch(frame: FrameType | None, fallback: tuple[str, int]) -> tuple[str, int]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_passed):
            return label_of(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return fallback


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
        cause = next(filter(_ran_out, causes(error)), None)
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
