"""What modules hold: take a snapshot, find what differs later, put it back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from nimble_core.tracing.structure import is_plain

__all__ = ["Change", "Changes", "Snapshot"]

_CONTAINERS: frozenset[type] = frozenset({list, dict, set, OrderedDict, defaultdict, deque, tuple, SimpleNamespace})
"""Types that a snapshot looks into. Reading an object of another class, or of a subclass, may run the user's code."""
_TABLES = ("_parameters", "_buffers", "_modules")
_DEPTH, _ITEMS = 12, 20_000
"""Limits of containers in containers: how deep, and how many items in all. The rest is data."""


class Change(NamedTuple):
    """An attribute, or something in a container that it leads to, which is another object than it was.

    Args:
        was: what was there; ``...`` for nothing.
        now: what is there now; ``...`` for nothing.
        attribute: path of the attribute; empty where a change there is no news.
        name: the place, as its module writes it after ``self.``: ``"state['v']"``.
    """

    was: Any
    now: Any
    attribute: str
    name: str


Changes = dict[str, Change]
"""By path: ``"encoder.state['v']"``."""


class Snapshot:
    """The attributes of modules and what containers among these hold, to find changes and to undo them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._tables = {path: vars(module) for path, module in modules.items()}
        self._copies: dict[int, tuple[Any, Any]] = {}  # each container and a copy, by the container's id
        self._keep([*self._tables.values()])

    def _keep(self, containers: list[Any]) -> None:
        """Copy containers, and those inside them, level by level."""
        left = _ITEMS
        for depth in range(_DEPTH):
            inside: list[Any] = []
            for one in containers:
                size = len(vars(one)) if type(one) is SimpleNamespace else len(one)
                nested = depth > 1  # neither a table of attributes nor an attribute
                if id(one) in self._copies or (nested and size > left):
                    continue
                left -= size if nested else 0
                copy = _copy(one)
                self._copies[id(one)] = one, copy
                if size:  # other threads may change the container itself
                    inside += [part for part in _parts(copy) if type(part) in _CONTAINERS]
            containers = inside

    def changed(self) -> list[tuple[Any, Any]]:
        """Return the containers, tables of attributes included, that hold something else, with what they held."""
        return [(held, copy) for held, copy in self._copies.values() if (held or copy) and not _same(held, copy)]

    def changes(self) -> Changes:
        """Return what is another object than it was; of the containers in private attributes, tensors alone."""
        found: Changes = {}
        if not self.changed():
            return found
        seen: set[tuple[int, int]] = set()
        for path, table in self._tables.items():
            was, now = self._members(self._was(table), self._was), self._members(table, lambda one: one)
            for key in sorted(was.keys() | now.keys()):
                before, after = was.get(key, ...), now.get(key, ...)
                quiet = key.startswith("_") and before is after  # such as hooks that a library installs by itself
                attribute = "" if quiet else f"{path}.{key}".lstrip(".")
                for name, one, other in self._differences(before, after, key, seen):
                    if not quiet or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
                        found[f"{path}.{name}".lstrip(".")] = Change(one, other, attribute, name)
        return found

    def restore(self) -> None:
        """Let all containers hold what they held."""
        for held, copy in self.changed():
            _fill(held, copy)

    def _was(self, container: Any) -> Any:
        return self._copies.get(id(container), (container, container))[1]

    @staticmethod
    def _members(table: dict[str, Any], look: Callable[[Any], Any]) -> dict[str, Any]:
        """Attributes of a module as users see them: with its parameters, buffers and submodules."""
        found = dict(table)
        for name in _TABLES:
            if type(table.get(name)) in (dict, OrderedDict):
                found |= look(found.pop(name))
        return found

    def _differences(self, was: Any, now: Any, name: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, Any, Any]]:
        """Yield where what two values lead to differs, each pair of containers once: a name, and both objects."""
        if type(was) is not type(now) or id(was) not in self._copies or name.count("[") > _DEPTH:
            if was is not now:
                yield name, was, now
            return
        if (id(was), id(now)) in seen:
            return
        seen.add((id(was), id(now)))
        before, after = _items(self._was(was)), _items(_copy(now))
        inside = [
            found
            for label, part in before.items()
            if label in after
            for found in self._differences(part, after[label], name + label, seen)
        ]
        if list(before) != list(after) or (was is not now and not inside):
            yield name, was, now
        yield from inside


def _items(value: Any) -> dict[str, Any]:
    """Return what a container holds, by what leads there in Python."""
    if isinstance(value, SimpleNamespace):
        return {f".{name}": part for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {f"[{_key(key)}]": part for key, part in value.items()}
    if isinstance(value, set):
        return {f"{{{_key(part)}}}": part for part in value}
    return {f"[{position}]": part for position, part in enumerate(value)}


def _key(key: object) -> str:
    return repr(key) if is_plain(key) or isinstance(key, tuple) else object.__repr__(key)


def _parts(container: Any) -> Any:
    if isinstance(container, SimpleNamespace):
        container = vars(container)
    return container.values() if isinstance(container, dict) else container


def _copy(container: Any) -> Any:
    if type(container) is tuple:
        return container
    return SimpleNamespace(**vars(container)) if type(container) is SimpleNamespace else container.copy()


def _same(held: Any, copy: Any) -> bool:
    if isinstance(held, SimpleNamespace):
        held, copy = vars(held), vars(copy)
    if held is copy or len(held) != len(copy):
        return held is copy
    if isinstance(held, set):
        return bool(held == copy)
    if isinstance(held, dict) and not all(map(is_, held.values(), copy.values())):
        return False
    return all(map(is_, held, copy))


def _fill(held: Any, copy: Any) -> None:
    if isinstance(held, SimpleNamespace):
        held, copy = vars(held), vars(copy)
    if isinstance(held, dict):
        for key in held.keys() - copy.keys():
            held.pop(key, None)  # another thread may have been faster
        held.update(copy)
        if not all(map(is_, held, copy)):  # something was deleted: back in its old place
            held.clear()
            held.update(copy)
    elif isinstance(held, list):
        held[:] = copy
    else:
        held.clear()
        held.extend(copy) if isinstance(held, deque) else held.update(copy)
