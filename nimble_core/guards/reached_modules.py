"""Which modules a run calls, and which hooks these have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from inspect import getclosurevars, unwrap
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nimble_core.tracing.side_effects import installed_by_runs
from nimble_core.tracing.step_wrapper import Around

__all__ = ["hook_tables", "hooks_of_users", "modules_behind", "sets_modes", "storage_of"]

_FORWARD_HOOKS = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
_BACKWARD_HOOKS = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}
_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "nimble_core", "nimble_viz"})
"""Their forward hooks are part of the forward, or only watch it."""


def modules_behind(
    model: Callable[..., Any], given: Iterable[torch.Tensor] | None = None
) -> dict[str, torch.nn.Module]:
    """Return the modules that a run of ``model`` calls, by path: a module's own; of a function those that it names.

    A function names what it is bound to, or the attributes of that or of an object that is called; what a ``partial``
    holds; closures, defaults and globals that its code mentions. A module that it finds in another way is not known.

    Args:
        model: module or function.
        given: tensors that a run was seen to read: of a function's modules, only those that hold some are returned, and
            what they are parts of.
    """
    if isinstance(model, torch.nn.Module):
        return dict(model.named_modules())
    read = None if given is None else {storage_of(tensor) for tensor in given if tensor.layout is torch.strided}
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, value in _mentioned(model):
        for path, module in value.named_modules() if isinstance(value, torch.nn.Module) else ():
            if read is None or any(_holds(one, read) for one in module.modules()):
                found.setdefault(id(module), (f"{name}.{path}".strip("."), module))
    return dict(found.values())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _holds(module: torch.nn.Module, storages: Set[int]) -> bool:
    own = [one for one in chain(module._parameters.values(), module._buffers.values()) if one is not None]
    return any(not is_lazy(one) and one.layout is torch.strided and storage_of(one) in storages for one in own)


def _mentioned(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function names: names and values."""
    if isinstance(function, partial):
        yield from _mentioned(function.func)
        yield from ((f"args[{place}]", value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    bound, function = getattr(function, "__self__", function), getattr(function, "__func__", function)
    if isinstance(bound, torch.nn.Module):
        yield "", bound
    else:
        yield from getattr(bound, "__dict__", {}).items()
    code = _code_of(function)
    if code is not None:
        with suppress(ValueError):  # a variable that has no value yet
            variables = getclosurevars(code)
            yield from chain(variables.nonlocals.items(), variables.globals.items())
        defaults = code.__defaults__ or ()
        names = code.__code__.co_varnames[: code.__code__.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (code.__kwdefaults__ or {}).items()


def _code_of(function: Any) -> FunctionType | None:
    """Return the function behind decorators that say what they wrap."""
    with suppress(ValueError):  # they say so in a circle
        function = unwrap(function)
    return function if isinstance(function, FunctionType) else None


def sets_modes(model: Any) -> bool:
    """Whether a function sets the modes of modules itself, as ``predict`` does that begins with ``net.eval()``."""
    code = _code_of(getattr(_inner(model), "__func__", _inner(model)))
    return code is not None and not {"eval", "train"}.isdisjoint(code.__code__.co_names)


def hook_tables(
    model: Callable[..., Any], modules: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[Any, str, str | None, str]]:
    """Yield the tables of hooks that a replay passes by: owner, attribute, path and kind.

    The path is None for hooks of all modules. Hooks of the backward count where a replay has one.
    """
    backward = isinstance(model, Around) or getattr(model, "training", False)
    kinds = _FORWARD_HOOKS | _BACKWARD_HOOKS if backward else _FORWARD_HOOKS
    for attribute, kind in kinds.items():
        if modules:
            yield torch.nn.modules.module, f"_global{attribute}", None, kind
        yield from (
            (module, attribute, path, kind)
            for path, module in modules.items()
            if isinstance(vars(module).get(attribute), dict)
        )


def hooks_of_users(
    model: Callable[..., Any], *, backward: bool = False, given: Iterable[torch.Tensor] | None = None
) -> list[str]:
    """Return hooks of the forward that no known library has registered: ``"the forward hook keep of layer1.0"``.

    Args:
        model: module or function.
        backward: whether those of the backward count as well.
        given: as for :func:`modules_behind`.
    """
    modules = modules_behind(model, given)
    return [
        f"the {kind} {_called(hook)} of {'all modules' if path is None else path or 'the model'}"
        for owner, attribute, path, kind in hook_tables(model, modules)
        if backward or attribute.removeprefix("_global") in _FORWARD_HOOKS
        for hook in list(getattr(owner, attribute).values())
        if not installed_by_runs(hook) and str(_inner(hook).__module__).partition(".")[0] not in _LIBRARIES
    ]


def _called(hook: Any) -> str:
    return getattr(_inner(hook), "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]


def _inner(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function
