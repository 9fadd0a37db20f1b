"""Run TorchScript inside of models operator by operator, without kernels of its own.

From the second run on, its executor compiles kernels from what it saw in the first, on a GPU by default, and launches
them past the dispatcher: a recorder sees neither them nor what they read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from nimble_core.torch_compat.compiler import JIT_STATE

__all__ = ["forget_compiled", "operator_by_operator", "scripted_parts"]


def operator_by_operator() -> AbstractContextManager[None]:
    """Let this thread's TorchScript optimise nothing inside; for what it has optimised before: ``forget_compiled``."""
    jit: Any = torch.jit
    not_optimised: AbstractContextManager[None] = jit.optimized_execution(False)
    return not_optimised


def scripted_parts(model: Callable[..., Any]) -> list[Any]:
    """Return the model and modules of it that are TorchScript."""
    parts = model.modules() if isinstance(model, torch.nn.Module) else (model,)
    return [part for part in parts if isinstance(part, torch.jit.ScriptModule | torch.jit.ScriptFunction)]


def forget_compiled(model: Callable[..., Any]) -> bool:
    """Let TorchScript forget what it has optimised: parts of the model, and functions that were scripted.

    Their next two runs take longer. Traced functions are found only as parts of the model.

    Returns:
        Whether there are any.
    """
    found = [*_executors(model)]
    for one in found:
        one._debug_flush_compilation_cache()
    return bool(found)


def _executors(model: Callable[..., Any]) -> Iterator[Any]:
    for part in scripted_parts(model):
        if isinstance(part, torch.jit.ScriptFunction):
            yield part
        else:
            yield from map(part._c._get_method, part._c._method_names())
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        yield from (held for held in vars(module).values() if isinstance(held, torch.jit.ScriptFunction))
    state: Any = JIT_STATE.require()
    for name in [*state._jit_caching_layer.values()]:
        function = state._python_cu.find_function(name)
        if function is not None:
            yield function
