"""Functions of torch that read values only to print or to check them: in a recording they read none.

Texts get a placeholder, a check of all elements becomes an operator, and ``one_hot`` with its number of classes leaves
the check of its values to ``scatter_``, as it does on a GPU. Values that every run finds are read as always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import current_mode
from nimble_core.torch_compat.public import READS_TO_CHECK, TENSOR_METHODS

__all__ = ["values_unread"]

_numbers = count(1)


@contextmanager
def values_unread(known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Let texts and checks of this thread read no values of tensors but those that are ``known``; ``one_hot`` none.

    Each placeholder differs: a model that returns a text, or looks something up by it, differs from run to run. Nothing
    changes while dispatch modes are off.

    >>> with values_unread(lambda tensor: False), torch.utils._python_dispatch.TorchDispatchMode():
    ...     print(f"{torch.ones(()):.3f}"[:16])
    <value of tensor
    """
    thread = threading.get_ident()

    def recorded(tensor: Any) -> bool:
        return threading.get_ident() == thread and current_mode() is not None and isinstance(tensor, torch.Tensor)

    def unread(tensor: Any) -> bool:
        return recorded(tensor) and not known(tensor)

    def instead_of(
        original: Callable[..., Any], replacement: Callable[..., Any], applies: Applies
    ) -> Callable[..., Any]:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            result = replacement(applies, *args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        return called

    with ExitStack() as undo:
        for entry, replacement, applies in (
            (TENSOR_METHODS["__format__"], _text, unread),
            (TENSOR_METHODS["__repr__"], _long_text, unread),
            (READS_TO_CHECK["_check_tensor_all_with"], _check, unread),
            (READS_TO_CHECK["one_hot"], _one_hot, recorded),
        ):
            if (original := entry.find()) is not None:
                undo.enter_context(entry.replaced_by(instead_of(original, replacement, applies)))
        yield


Applies = Callable[[Any], bool]
"""Whether a replacement takes the place of the original for this tensor."""


def _placeholder() -> str:
    return f"<value of tensor {next(_numbers)}, which a recording does not read>"


def _text(applies: Applies, tensor: torch.Tensor, spec: str) -> Any:
    return _placeholder() if tensor.dim() == 0 and applies(tensor) else NotImplemented


def _long_text(applies: Applies, tensor: torch.Tensor, **contents: Any) -> Any:
    # On the host there are values to print, and nobody waits for them.
    return _placeholder() if tensor.device.type not in ("cpu", "meta") and applies(tensor) else NotImplemented


def _check(applies: Applies, error_type: type[Exception], cond: Any, message: Any = None) -> Any:
    if not applies(cond) or cond.dtype != torch.bool:
        return NotImplemented
    text = f"a check of the model fails, which raises {error_type.__name__}"
    torch.ops.aten._assert_async.msg(torch.ops.aten._is_all_true.default(cond), text)
    return None


def _one_hot(applies: Applies, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1 or not applies(tensor) or tensor.dtype != torch.long or not tensor.numel():
        return NotImplemented
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.long, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)
