"""Methods that take a tensor out of torch's sight without a call of the dispatcher.

Memory handed to numpy, or through DLPack, may be written without a call. Numbers in a list are read without one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import current_mode
from nimble_core.torch_compat.public import TENSOR_METHODS
from nimble_core.utils.locks import free_after_fork

__all__ = ["exports_seen", "readings_seen"]

_EXPORTS = ("numpy", "__dlpack__")
"""Methods that share a tensor's memory; ``__array__`` goes through the first."""
_READINGS = ("tolist",)
_SEEING = free_after_fork(threading.RLock())

Seen = Callable[[torch.Tensor, FrameType], None]


@contextmanager
def exports_seen(seen: Seen) -> Iterator[None]:
    """Call ``seen(tensor, frame of the caller)`` before this thread hands the memory of a tensor out.

    >>> found = []
    >>> with exports_seen(lambda tensor, frame: found.append(tensor.shape)):
    ...     _ = torch.ones(3).numpy()
    >>> found
    [torch.Size([3])]
    """
    with _methods_told(_EXPORTS, seen):
        yield


@contextmanager
def readings_seen(seen: Seen) -> Iterator[None]:
    """Call ``seen(tensor, frame of the caller)`` before this thread makes a list of a tensor's numbers.

    Not while modes are off, as where torch prints a tensor.
    """

    def told(tensor: torch.Tensor, frame: FrameType) -> None:
        if current_mode() is not None:
            seen(tensor, frame)

    with _methods_told(_READINGS, told):
        yield


@contextmanager
def _methods_told(names: Sequence[str], seen: Seen) -> Iterator[None]:
    """Inside, methods of tensors that this thread calls tell ``seen(tensor, frame)`` first."""
    thread = threading.get_ident()

    def telling(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        @wraps(method)
        def told(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                seen(tensor, sys._getframe(1))
            return method(tensor, *args, **kwargs)

        return told

    with _SEEING, ExitStack() as undo:
        for name in names:
            undo.enter_context(TENSOR_METHODS[name].replaced_by(telling(name)))
        yield
