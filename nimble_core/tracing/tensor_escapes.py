"""Methods that take a tensor out of torch's sight, or off its device, without a call of the dispatcher.

Memory handed to numpy, or through DLPack, may be written without a call. Numbers in a list are read without one. And a
copy to the host is none where the host stands in for the device that is planned for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import current_mode
from nimble_core.torch_compat.public import TENSOR_METHODS
from nimble_core.utils.locks import free_after_fork

__all__ = ["exports_seen", "host_copies_seen", "readings_seen"]

_SEEING = free_after_fork(threading.RLock())

Seen = Callable[[torch.Tensor, FrameType], None]
"""Called with a tensor and the frame of the caller."""


def exports_seen(seen: Seen) -> AbstractContextManager[None]:
    """Call ``seen`` before this thread hands the memory of a tensor out.

    >>> found = []
    >>> with exports_seen(lambda tensor, frame: found.append(tensor.shape)):
    ...     _ = torch.ones(3).numpy()
    >>> found
    [torch.Size([3])]
    """
    return _methods_seen(("numpy", "__dlpack__"), seen, lambda given: True)  # __array__ goes through the first


def readings_seen(seen: Seen) -> AbstractContextManager[None]:
    """Call ``seen`` before this thread makes a list of a tensor's numbers.

    Not while modes are off, as where torch prints a tensor.
    """
    return _methods_seen(("tolist",), seen, lambda given: current_mode() is not None)


@contextmanager
def host_copies_seen(seen: Seen) -> Iterator[None]:
    """Call ``seen`` before this thread says ``x.cpu()`` or ``x.to("cpu")``.

    Not for ``x.to(device)``: that may be the device of another tensor, for which the host stands in.
    """

    def names_host(given: Sequence[Any]) -> bool:
        return any(isinstance(one, str) and one.startswith("cpu") for one in given)

    with _methods_seen(("cpu",), seen, lambda given: True), _methods_seen(("to",), seen, names_host):
        yield


@contextmanager
def _methods_seen(names: Sequence[str], seen: Seen, counts: Callable[[Sequence[Any]], bool]) -> Iterator[None]:
    """Call ``seen`` before this thread calls a method of a tensor with arguments that count."""
    thread = threading.get_ident()

    def seeing(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        @wraps(method)
        def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and counts([*args, *kwargs.values()]):
                seen(tensor, sys._getframe(1))
            return method(tensor, *args, **kwargs)

        return called

    with _SEEING, ExitStack() as undo:
        for name in names:
            undo.enter_context(TENSOR_METHODS[name].replaced_by(seeing(name)))
        yield
