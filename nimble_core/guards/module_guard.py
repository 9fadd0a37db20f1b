"""Is the model still the one that was prepared? Asked at each run, where possible while the device is busy with it.

Replays read parameters live, but not constants that were folded from them (``folded_weights``): these are stale once a
source has another value. Signs of that are looked for, each of which misses something: version counters of the sources,
which in-place operators raise; steps of optimizers, of which the fused ones raise none; replays that write; and for
running statistics, which batch norm writes without raising theirs, counters of the buffers beside
(``num_batches_tracked``).
Writes that show nowhere (through ``.data``, numpy, DLPack, a CUDA graph) have to be told.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from copy import copy
from functools import partial
from inspect import getclosurevars, unwrap
from itertools import chain
from operator import attrgetter, getitem
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from nimble_core.torch_compat.dispatch import ANY_KEY, keys_excluded, no_torch_function
from nimble_core.tracing.side_effects import installed_by_runs
from nimble_core.tracing.step_wrapper import Around
from nimble_core.utils.locks import free_after_fork

__all__ = ["Watch", "announce", "hooks_of_users", "modules_behind", "same_objects"]

_version = attrgetter("_version")
_forward_of = attrgetter("forward")

_TABLES = ("_parameters", "_buffers", "_modules")
_FORWARD_HOOKS = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "nimble_core", "nimble_viz"})
"""Their forward hooks are part of the forward, or only watch it."""
_SETTINGS = frozenset({bool, int, float, complex, str})
_FEW = 64
"""Entries at most of a container that counts among a module's settings."""
_BACKWARD_HOOKS = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}


def same_objects(now: object, before: object) -> bool:
    """Whether lists and dicts, nested or not, hold the same objects; no tensor is computed with to find out.

    Compared in C, about 0.01 µs for each entry. What is neither a tensor nor such a container counts as the same if it
    is equal.
    """
    # ``==`` of containers asks for identity first, and for equality only of what is not identical: for tensors that
    # fails here. Both guards are C's, which no interrupt can enter without leaving.
    try:
        with no_torch_function(), keys_excluded(ANY_KEY):
            return bool(now == before)
    except Exception:  # so is an object whose comparison fails the same as itself alone
        return False


class Watch:
    """Remembers a model's parameters, buffers, submodules, their modes and hooks, and the values of what was folded.

    Values may change. What a replay cannot follow is another tensor, other memory behind the same tensor, another
    submodule, a submodule in another mode, another ``forward`` of the model's own, or a hook more or less; a parameter
    or a submodule more, where there were some. Buffers that come do not count; nor do hooks that the model's own runs
    install (``installed_by_runs``), nor hooks of the backward where a replay has none: of a plain model in evaluation
    mode. Another ``forward`` of a submodule is not looked for: to ask all would take a tenth of the time of all else.
    Nor are numbers, flags and strings among the attributes, unless ``setting`` is asked.

    Asked often, and polled each time: nothing tells of every change, since modules keep plain dicts, and memory is
    replaced (``.data = …``, ``share_memory_``) without a count. So the answer "unchanged" is looked up by loops in C,
    and only another one in words. Hooks alone are numbered as they are registered, in modules and tensors alike: where
    none has come, only the tables that hold some are looked at. Any thread may ask.

    Args:
        model: module; or a function, of which the modules that it names are remembered (``modules_behind``).
        sources: name and tensor of each parameter and buffer that constants were folded from. They count as changed
            until the first ``folding``.
        given: tensors that a run was seen to read; of a function's modules only those that hold some are remembered.
        changing: attributes that runs change, by path.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        sources: Sequence[tuple[str, torch.Tensor]] = (),
        given: Iterable[torch.Tensor] | None = None,
        changing: Collection[str] = (),
    ) -> None:
        modules = modules_behind(model, given)
        self._settings = [
            (vars(module), name, copy(value), f"{path}.{name}".lstrip("."))
            for path, module in modules.items()
            for name, value in vars(module).items()
            if _is_setting(value) and name != "training" and f"{path}.{name}".lstrip(".") not in changing
        ]
        whole = isinstance(model, torch.nn.Module)
        slots = [
            (module, attribute, path)
            for path, module in modules.items()
            for attribute in ("training", *_TABLES)
            if attribute == "training" or getattr(module, attribute, None)
        ]
        self._registered = RemovableHandle.next_id  # read before tables are: who registers meanwhile is noticed
        self._hooks = list(_hook_tables(model, modules))
        self._hook_owners = [vars(owner) for owner, *_ in self._hooks]
        self._hook_attributes = [attribute for _, attribute, *_ in self._hooks]
        self._hooked = [_held(owner, attribute) for owner, attribute, *_ in self._hooks]
        hooked = [
            (owner, attribute)
            for (owner, attribute, path, _), table in zip(self._hooks, self._hooked, strict=True)
            if table or path is None
        ]
        self._slots: list[tuple[Any, str]] = [*((module, attribute) for module, attribute, _ in slots), *hooked]
        self._owners = [vars(module) for module, _ in self._slots]
        self._attributes = [attribute for _, attribute in self._slots]
        # Equal, not the same: it is bound anew each time. A property may make one that is equal to no other.
        root = modules.get("") if whole else None
        self._roots = (
            [root] if root is not None and getattr(root, "forward", None) == getattr(root, "forward", self) else []
        )
        self._remembered = self._now()
        modes = {id(module): slot for slot, (module, attribute) in enumerate(self._slots) if attribute == "training"}
        entries = [
            (slot, key, entry, f"{path}.{key}".lstrip("."))
            for slot, (table, (_, attribute, path)) in enumerate(zip(self._remembered, slots, strict=False))
            if attribute != "training"
            for key, entry in table.items()
            if entry is not None
        ]
        self._tensors = [entry for entry in entries if isinstance(entry[2], torch.Tensor)]
        self._layouts = [_layout(tensor) for _, _, tensor, _ in self._tensors]
        self._tables = [
            (slot, path, frozenset(key for key, entry in self._remembered[slot].items() if entry is not None))
            for slot, (_, attribute, path) in enumerate(slots)
            if whole and attribute in ("_parameters", "_modules")
        ]
        self._modules = [
            (*entry, modes[id(entry[2])], self._remembered[modes[id(entry[2])]])
            for entry in entries
            if isinstance(entry[2], torch.nn.Module) and id(entry[2]) in modes
        ]
        self._moods = whole or not _sets_modes(model)
        self._watched = [tensor for _, _, tensor, _ in self._tensors]
        self._memory = list(map(torch.Tensor.data_ptr, self._watched))
        plain: tuple[object, ...] = (object.__eq__, torch.Tensor.__eq__)
        self._comparable = all(type(entry).__eq__ in plain for _, _, entry, _ in entries) and all(
            _is_plain(module, attribute) for module, attribute in self._slots
        )
        self.folds = 0
        """How many times folding was begun."""
        self.blind = tuple(name for name, tensor in sources if tensor.is_inference())
        """Sources without a version counter: tensors made under ``inference_mode``."""
        self._storages = {_storage(tensor) for _, tensor in sources}
        self._counted = _counted([tensor for _, tensor in sources], self._storages, modules.values())
        self._seen: list[int] = []
        self._doubted = bool(sources)
        if sources:
            _follow_optimizers(self)

    def change(self) -> str:
        """The first change that a replay cannot follow, in words; empty if there is none.

        About 0.05 µs for ``forward`` and for each tensor's memory, 0.03 µs for each submodule's mode and for each table
        that is not empty, and 0.01 µs for each entry; 0.2 µs for each submodule once after a hook was registered
        anywhere; some ten times all that once after an entry was added, and always where a module keeps its mode or
        tables elsewhere than modules do (``training`` as a property, TorchScript).
        """
        if self._comparable and self._as_remembered() and self._hooked_as_remembered():
            # Last, just before ``stale`` looks at the same tensors, which are in the processor's caches then.
            with no_torch_function():  # else each look at a tensor goes through the caller's modes
                if list(map(torch.Tensor.data_ptr, self._watched)) == self._memory:
                    return ""
        return self.looked_through()

    def looked_through(self) -> str:
        """The same, found in the long way: also another layout of the same memory (``p.data = p.data.t()``)."""
        now = self._now()
        with no_torch_function():
            change = self._difference(now) or self._hook_difference()
        if not change:
            self._remembered = now  # buffers were added, which is nothing to look into again
        return change

    def setting(self) -> str:
        """The first number, flag or string of a module that is another one than it was, in words; empty if none is."""
        for attributes, name, was, path in self._settings:
            now = attributes.get(name, "gone")
            if type(now) is not type(was) or not (now == was or now is was):
                return f"{path} is {now!r:.40}, and was {was!r:.40}"
        return ""

    def stale(self) -> bool:
        """Whether a source was written since the last ``folding``, as far as that shows. About 0.05 µs a source."""
        with no_torch_function():
            return self._doubted or list(map(_version, self._counted)) != self._seen

    def _as_remembered(self) -> bool:
        """Whether tables have the same keys and the same objects, and modules their modes. False is not certain."""
        try:
            # Compared below, in C: to Dynamo, two methods are never equal.
            now = [*map(getitem, self._owners, self._attributes), *map(_forward_of, self._roots)]
        except (AttributeError, KeyError):  # a module without one of its tables, or its forward
            return False
        return same_objects(now, self._remembered)

    def _hooked_as_remembered(self) -> bool:
        """Whether there are the same hooks, as far as numbers tell. False is not certain."""
        registered = RemovableHandle.next_id
        if registered == self._registered:
            return True
        try:
            now = list(map(getitem, self._hook_owners, self._hook_attributes))
        except KeyError:
            return False
        if not same_objects(now, self._hooked):
            return False
        self._registered = registered
        return True

    def _now(self) -> list[Any]:
        """Modes, and copies of the tables, and the model's forward, as they are."""
        held: list[Any] = [_held(module, attribute) for module, attribute in self._slots]
        return [*held, *(getattr(one, "forward", None) for one in self._roots)]

    def _difference(self, now: list[Any]) -> str:
        """The first difference of ``now`` and of memory to what is remembered, in words."""
        if self._roots and not same_objects(now[-1:], self._remembered[-1:]):
            return "forward is another function than it was"
        for (slot, key, tensor, name), pointer, layout in zip(self._tensors, self._memory, self._layouts, strict=True):
            if now[slot].get(key) is not tensor:
                return f"{name} is another tensor than it was"
            if tensor.data_ptr() != pointer:
                return f"{name} has other memory than it had"
            if _layout(tensor) != layout:
                return f"{name} has another shape or other strides than it had"
        for slot, key, child, name, mode, training in self._modules:
            if now[slot].get(key) is not child:
                return f"{name} is another module than it was"
            if now[mode] != training and self._moods:
                return f"{name} is in {'training' if now[mode] else 'evaluation'} mode now"
        for slot, path, before in self._tables:
            for key, entry in now[slot].items():
                if entry is not None and key not in before:
                    return f"{f'{path}.{key}'.lstrip('.')} was not there"
        return ""

    def _hook_difference(self) -> str:
        """The first hook that came or went, in words."""
        registered = RemovableHandle.next_id
        found = [_held(owner, attribute) for owner, attribute, *_ in self._hooks]
        for (_, _, path, kind), *tables in zip(self._hooks, found, self._hooked, strict=True):
            now, before = ([hook for hook in table.values() if not installed_by_runs(hook)] for table in tables)
            if not same_objects(now, before):  # registered again, a hook has another number
                name = "torch.nn.Module" if path is None else path or "the model"
                if len(now) == len(before):
                    return f"{name} has another {kind} than it had"
                return f"{name} has a {kind} that it had not" if len(now) > len(before) else f"{name} has lost a {kind}"
        self._hooked, self._registered = found, registered
        return ""

    def doubt(self) -> None:
        """Let the sources count as changed."""
        self._doubted = bool(self._storages)

    def folding(self) -> None:
        """Remember the sources as they are; to be called just before constants are computed from them."""
        # Counted first: who ran on the old constants, and now finds nothing stale, sees that they were folded since.
        self.folds += 1
        self._doubted = False
        self._seen = list(map(_version, self._counted))

    def written(self, memory: Set[int]) -> None:
        """Storages at these addresses were written: doubt the sources if one is among them."""
        if not self._doubted:
            self._doubted = not self._storages.isdisjoint(memory)


def announce(memory: Set[int], *, by: Watch | None = None) -> None:
    """Tell every watch, but that of who wrote, that storages at these addresses were written past version counters."""
    if _watches:
        with _watching:
            watches = list(_watches)
        for watch in watches:
            if watch is not by:
                watch.written(memory)


def _hook_tables(
    model: Callable[..., Any], modules: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[Any, str, str | None, str]]:
    """Tables of hooks that a replay passes by: owner, attribute, the owner's path (None: of all modules), and kind."""
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


def modules_behind(
    model: Callable[..., Any], given: Iterable[torch.Tensor] | None = None
) -> dict[str, torch.nn.Module]:
    """Modules that a run of ``model`` calls, by path: a module's own; of a function those that it names.

    Those are: what it is bound to, or the attributes of that or of an object that is called; what a ``partial`` holds;
    closures, defaults and globals that its code mentions; with ``given`` only those that hold one of these tensors, and
    what they are parts of. A module that a function finds in another way is not known.
    """
    if isinstance(model, torch.nn.Module):
        return dict(model.named_modules())
    read = None if given is None else {_storage(tensor) for tensor in given if _has_memory(tensor)}
    known: dict[int, bool] = {}

    def leads_there(module: torch.nn.Module) -> bool:
        if id(module) not in known:
            known[id(module)] = read is None or _holds(module, read)
            known[id(module)] |= any(map(leads_there, module.children()))
        return known[id(module)]

    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, value in _mentioned(model):
        for path, module in value.named_modules() if isinstance(value, torch.nn.Module) else ():
            if leads_there(module):
                found.setdefault(id(module), (f"{name}.{path}".strip("."), module))
    return dict(found.values())


def _holds(module: torch.nn.Module, storages: Set[int]) -> bool:
    own = chain(module._parameters.values(), module._buffers.values())
    return any(one is not None and not is_lazy(one) and _has_memory(one) and _storage(one) in storages for one in own)


def _mentioned(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function names: names and values."""
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
    """The function behind decorators that say what they wrap."""
    with suppress(ValueError):  # they say so in a circle
        function = unwrap(function)
    return function if isinstance(function, FunctionType) else None


def _sets_modes(model: Any) -> bool:
    """Whether a function sets the modes of modules itself, as ``predict`` does that begins with ``net.eval()``."""
    while isinstance(model, partial):
        model = model.func
    code = _code_of(getattr(model, "__func__", model))
    return code is not None and not {"eval", "train"}.isdisjoint(code.__code__.co_names)


def hooks_of_users(
    model: Callable[..., Any], *, backward: bool = False, given: Iterable[torch.Tensor] | None = None
) -> list[str]:
    """Forward hooks and pre-hooks that no known library has registered: ``"the forward hook keep of layer1.0"``.

    With ``backward`` those of the backward too; ``given`` as for :func:`modules_behind`.
    """
    modules = modules_behind(model, given)
    return [
        f"the {kind} {_called(hook)} of {'all modules' if path is None else path or 'the model'}"
        for owner, attribute, path, kind in _hook_tables(model, modules)
        if backward or attribute.removeprefix("_global") in _FORWARD_HOOKS
        for hook in list(getattr(owner, attribute).values())
        if not installed_by_runs(hook) and str(_inner(hook).__module__).partition(".")[0] not in _LIBRARIES
    ]


def _called(hook: Any) -> str:
    return getattr(_inner(hook), "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]


def _inner(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _is_setting(value: object) -> bool:
    """Whether it is a number, flag or string, or a container of some: what a replay keeps as it was."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return 0 < len(value) <= _FEW and _SETTINGS.issuperset(map(type, items))
    return type(value) in _SETTINGS


def _held(module: Any, attribute: str) -> Any:
    """A module's mode, or a copy of one of its tables; an empty one where it has none."""
    held = getattr(module, attribute, {})
    if attribute == "training":
        return held
    return held.copy() if type(held) is dict else dict(held.items())


def _is_plain(module: Any, attribute: str) -> bool:
    """Whether the attribute is an entry of the instance, and if it is a table, a dict."""
    held = vars(module).get(attribute)
    return not hasattr(type(module), attribute) and isinstance(held, bool if attribute == "training" else dict)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype) if _has_memory(tensor) else (tensor.shape, tensor.dtype)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _counted(
    sources: Sequence[torch.Tensor], storages: set[int], modules: Iterable[torch.nn.Module]
) -> list[torch.Tensor]:
    """Tensors whose version counters tell of changed sources: of the model's, those on a source's memory, with the
    buffers beside such a buffer; and the sources themselves, where they are not the model's.
    """
    if not sources:
        return []
    found: dict[int, torch.Tensor] = {}
    owned: set[int] = set()
    for module in modules:
        for table in (module._parameters, module._buffers):
            on = [one for one in table.values() if one is not None and _has_memory(one) and _storage(one) in storages]
            owned |= {_storage(one) for one in on}
            beside = table.values() if on and table is module._buffers else on
            found |= {id(one): one for one in beside if one is not None}
    found |= {id(one): one for one in sources if _storage(one) not in owned}
    return [tensor for tensor in found.values() if not tensor.is_inference()]


_watching = free_after_fork(threading.Lock())
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_hooked = False


def _follow_optimizers(watch: Watch) -> None:
    """Tell ``watch`` of every optimizer step from now on, for as long as it lives."""
    global _hooked
    with _watching:
        _watches.add(watch)
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if _watches:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        announce({_storage(parameter) for parameter in held if _has_memory(parameter)})
