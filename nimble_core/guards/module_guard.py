"""Is the model still the one that was prepared? Asked at each run, where possible while the device is busy with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nimble_core.guards.folded_values import FoldedValues
from nimble_core.guards.reached_modules import hook_tables, modules_behind, sets_modes
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.torch_compat.unchanged import passes, same_objects
from nimble_core.tracing.side_effects import installed_by_runs

__all__ = ["Watch"]

_TABLES = ("_parameters", "_buffers", "_modules")
_SETTINGS = frozenset({bool, int, float, complex, str})
_FEW = 64
"""Entries at most of a container that counts among a module's settings."""


class Watch:
    """Remembers a model's parameters, buffers, submodules, their modes and hooks, and the values of what was folded.

    Values may change. What a replay cannot follow is another tensor, other memory behind the same tensor, another
    submodule, a submodule in another mode, another ``forward`` of the model's own, a hook more or less; a parameter or
    a submodule more, where there were some. Buffers may come. Hooks that the model's own runs install do not count
    (``installed_by_runs``), nor hooks of the backward where a replay has none: of a plain model in evaluation mode.
    Another ``forward`` of a submodule is not looked for, which would take a tenth of the time of all else. Numbers,
    flags and strings among the attributes are compared by ``setting`` alone.

    Nothing tells of every change: modules keep plain dicts, and memory is replaced (``.data = …``, ``share_memory_``)
    without a count. So each run asks again. Loops in C find the answer "unchanged"; only another answer is looked up in
    words. Hooks alone are numbered as they are registered, in modules and tensors alike: until one is, only the tables
    that hold some are looked at. Any thread may ask.

    Args:
        model: module; or a function, of which the modules that it names are remembered (``modules_behind``).
        sources: name and tensor of each parameter and buffer that constants were folded from.
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
        self.values = FoldedValues(sources, modules.values())
        """The values of what was folded."""
        self._passes = passes()
        self._whole = isinstance(model, torch.nn.Module)
        self._moods = self._whole or not sets_modes(model)
        self._known = set(map(id, modules.values()))
        self._settings = _settings(modules, changing)
        self._registered = RemovableHandle.next_id  # read before tables are: who registers meanwhile is noticed
        self._hooks = list(hook_tables(model, modules))
        self._hooked = [_held(owner, attribute) for owner, attribute, *_ in self._hooks]
        self._hook_owners = [vars(owner) for owner, *_ in self._hooks]
        self._hook_attributes = [attribute for _, attribute, *_ in self._hooks]
        self._slots = [
            (module, attribute, path)
            for path, module in modules.items()
            for attribute in ("training", *_TABLES)
            if attribute == "training" or getattr(module, attribute, None)
        ]
        in_use = [
            (owner, attribute)
            for (owner, attribute, path, _), table in zip(self._hooks, self._hooked, strict=True)
            if table or path is None
        ]
        looked_at = [*((module, attribute) for module, attribute, _ in self._slots), *in_use]
        self._owners = [vars(owner) for owner, _ in looked_at]
        self._attributes = [attribute for _, attribute in looked_at]
        # Equal, not the same: it is bound anew each time. A property may make one that is equal to no other.
        root = modules.get("") if self._whole else None
        self._roots = [root] if root is not None and root.forward == root.forward else []
        self._looked_at = looked_at
        self._remembered = self._now()
        self._tensors = [
            (entry, _layout(entry), _join(path, key))
            for (_, attribute, path), table in zip(self._slots, self._remembered, strict=False)
            if attribute in ("_parameters", "_buffers")
            for key, entry in table.items()
            if entry is not None
        ]
        self._watched = [tensor for tensor, *_ in self._tensors]
        self._memory = list(map(torch.Tensor.data_ptr, self._watched))

    def change(self) -> str:
        """Return the first change that a replay cannot follow, in words; empty if there is none.

        Compiled, about 0.03 µs for each submodule's mode and each table that is not empty, and 0.01 µs for each tensor;
        in Python twice that and 0.07 µs. 0.2 µs for each submodule once after a hook was registered anywhere; some ten
        times all that once after an entry was added, and always where a module keeps its mode or tables elsewhere than
        modules do (TorchScript).
        """
        passes = self._passes
        if (
            passes.same_state(self._owners, self._attributes, self._roots, self._remembered)
            and self._hooked_as_remembered()
            # Last, just before ``stale`` looks at the same tensors, which are in the processor's caches then.
            and passes.same_memory(self._watched, self._memory)
        ):
            return ""
        return self.looked_through()

    def looked_through(self) -> str:
        """Find the same in the long way: also another layout of the same memory (``p.data = p.data.t()``)."""
        now = self._now()
        with no_torch_function():
            change = self._difference(now) or self._memory_difference() or self._hook_difference()
        if not change:
            self._remembered = now  # buffers were added, which is nothing to look into again
        return change

    def setting(self) -> str:
        """Return the first number, flag or string of a module that is not what it was, in words; empty if none is."""
        for attributes, name, was, path in self._settings:
            now = attributes.get(name, "gone")
            if type(now) is not type(was) or not (now == was or now is was):
                return f"{path} is {now!r:.40}, and was {was!r:.40}"
        return ""

    def _hooked_as_remembered(self) -> bool:
        """Whether there are the same hooks, as far as numbers tell. False is not certain."""
        registered = RemovableHandle.next_id
        if registered == self._registered:
            return True
        if not self._passes.same_state(self._hook_owners, self._hook_attributes, [], self._hooked):
            return False
        self._registered = registered
        return True

    def _now(self) -> list[Any]:
        """Return modes, copies of the tables, and the model's forward, as they are."""
        held = [_held(owner, attribute) for owner, attribute in self._looked_at]
        return [*held, *(getattr(root, "forward", None) for root in self._roots)]

    def _difference(self, now: list[Any]) -> str:
        """Return the first entry, mode or forward that is not what is remembered, in words."""
        if self._roots and not same_objects(now[-1:], self._remembered[-1:]):
            return "forward is another function than it was"
        for (_, attribute, path), was, held in zip(self._slots, self._remembered, now, strict=False):
            if attribute != "training":
                change = self._table_difference(attribute, path, was, held)
            else:  # a module's own mode says which engine is asked
                changed = was != held and self._moods and (path or not self._whole)
                change = f"{path or 'the model'} is in {'training' if held else 'evaluation'} mode now"
                change = change if changed else ""
            if change:
                return change
        return ""

    def _table_difference(self, attribute: str, path: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        kind = "module" if attribute == "_modules" else "tensor"
        for key, entry in was.items():
            known = attribute != "_modules" or id(entry) in self._known  # a function may use some submodules alone
            if entry is not None and known and now.get(key) is not entry:
                return f"{_join(path, key)} is another {kind} than it was"
        for key, entry in now.items():
            if entry is not None and was.get(key) is None and self._whole and attribute != "_buffers":
                return f"{_join(path, key)} was not there"
        return ""

    def _memory_difference(self) -> str:
        for (tensor, layout, name), pointer in zip(self._tensors, self._memory, strict=True):
            if tensor.data_ptr() != pointer:
                return f"{name} has other memory than it had"
            if _layout(tensor) != layout:
                return f"{name} has another shape or other strides than it had"
        return ""

    def _hook_difference(self) -> str:
        """Return the first hook that came or went, in words."""
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


def _settings(
    modules: Mapping[str, torch.nn.Module], changing: Collection[str]
) -> list[tuple[dict[str, Any], str, Any, str]]:
    """Return the numbers, flags and strings of modules: the attributes they are among, name, a copy, and path."""
    return [
        (vars(module), name, copy(value), _join(path, name))
        for path, module in modules.items()
        for name, value in vars(module).items()
        if _is_setting(value) and name != "training" and _join(path, name) not in changing
    ]


def _is_setting(value: object) -> bool:
    """Whether a value is a number, flag or string, or a container of some: what a replay keeps as it was."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return 0 < len(value) <= _FEW and _SETTINGS.issuperset(map(type, items))
    return type(value) in _SETTINGS


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _held(module: Any, attribute: str) -> Any:
    """Return a module's mode, or a copy of one of its tables; an empty one where it has none."""
    held = getattr(module, attribute, {})
    if attribute == "training":
        return held
    return held.copy() if type(held) is dict else dict(held.items())


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor.shape, strides, tensor.dtype
