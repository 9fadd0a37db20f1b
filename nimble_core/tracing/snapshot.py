"""What a value that is no tensor holds: remembered once, so that a later one can be told from it.

A replay repeats what Python made at preparation. That is right for what is still the same, so inputs are held against
what they were, not against themselves: they may have been changed in place. And of what a run returns, only that may be
repeated which is seen to carry nothing of it: arrays, iterators and memory of other libraries may.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import io
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["Difference", "Hidden", "attributes", "difference", "equal", "is_iterator", "is_plain", "remember", "shown"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range, type, type(None), type(...), type(NotImplemented), CodeType),
    *(enum.Enum, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, tuple, set, frozenset, BaseException)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_INPUT_DEPTH, _INPUT_PARTS = 3, 1000
_OUTPUT_DEPTH, _OUTPUT_PARTS = 20, 100_000

Key = tuple[str, Any]
"""``(".", name)`` of an attribute, ``("[", key)`` of an item, ``("{", item)`` of a set's."""


class Hidden(Exception):
    """Something that cannot be replayed, out of sight.

    Args:
        path: to it, from the value on: ``".held[0]"``; empty for the value itself.
        value: it.
    """

    def __init__(self, path: str, value: object) -> None:
        super().__init__(path)
        self.path, self.value = path, value


@dataclass(frozen=True, slots=True)
class _Object:
    type: type
    parts: tuple[tuple[Key, Any], ...]
    items: int
    itself: object = None  # where there is more to it than can be seen


@dataclass(frozen=True, slots=True)
class _Bytes:
    type: type
    layout: tuple[Any, ...]
    data: bytes
    shown: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where something is not what it was.

    Args:
        path: from the value on, ``".held[0]"``.
        was: what was there, in words.
        now: what is.
    """

    path: str
    was: str
    now: str


_PASSED_BY = object()
"""In place of what was not looked at: it was met before, or is too far away."""


def is_plain(value: object) -> bool:
    """Whether it cannot change, and holds nothing but what its type says: numbers, strings, types."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _PLAIN) or bool(
        numpy and isinstance(value, (numpy.generic, numpy.dtype)) and not isinstance(value, numpy.void)
    )


def is_iterator(value: object) -> bool:
    """Whether reading it uses it up (an open file is not meant)."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def remember(value: object, *, of_run: bool) -> Any:
    """What ``value`` holds now, for ``difference``.

    Args:
        value: anything but a tensor.
        of_run: whether a run made it: then all of it has to be seen, and to carry nothing of the run. Otherwise
            functions, modules, what cannot be looked into and what has more than a thousand parts are remembered as
            themselves, what is more than three steps deep not at all.

    Raises:
        Hidden: a tensor inside; ``of_run`` also an array or what cannot be looked into.
    """
    return _Memory(of_run).of(value, "", 0)


class _Memory:
    def __init__(self, of_run: bool) -> None:
        self._of_run = of_run
        self._met: dict[int, object] = {}  # held, so that no id is given twice
        self._depth, self._left = (_OUTPUT_DEPTH, _OUTPUT_PARTS) if of_run else (_INPUT_DEPTH, _INPUT_PARTS)

    def of(self, value: Any, path: str, depth: int) -> Any:
        if is_plain(value):
            return value
        if isinstance(value, torch.Tensor):
            raise Hidden(path, value)
        if id(value) in self._met:
            return _PASSED_BY
        self._met[id(value)] = value
        if not self._of_run and (isinstance(value, torch.nn.Module) or callable(value)):
            return value
        data = None if self._of_run else _bytes(value)
        if data:
            return data
        itself = value if _out_of_sight(value) else None
        if self._of_run and itself is not None:
            raise Hidden(path, value)
        parts = _parts(value)
        if itself is not None and not parts:
            return value
        if self._of_run and (depth == self._depth or len(parts) > self._left):
            raise Hidden(path, value)
        if depth == self._depth:
            return _PASSED_BY
        looked_at, too_many = parts[: self._left], len(parts) > self._left
        self._left -= len(looked_at)
        held = tuple((key, self.of(part, path + _step(key), depth + 1)) for key, part in looked_at)
        if too_many:
            return value
        return _Object(type(value), held, _items(parts), itself)


def difference(was: Any, value: object) -> Difference | None:
    """Where ``value`` first differs from what was remembered; attributes that it gained do not count."""
    return _difference(was, value, ())


def _difference(was: Any, value: Any, path: tuple[Key, ...]) -> Difference | None:
    if was is _PASSED_BY:
        return None
    if isinstance(was, _Bytes):
        data = _bytes(value)
        same = data is not None and (was.type, was.layout, was.data) == (data.type, data.layout, data.data)
        return None if same else _told(path, was.shown, shown(value))
    if not isinstance(was, _Object):
        return None if equal(was, value) else _told(path, shown(was), shown(value))
    if type(value) is not was.type:
        return _told(path, f"a {was.type.__qualname__}", shown(value))
    if was.itself is not None and not equal(was.itself, value):
        return _told(path, shown(was.itself), f"another, {shown(value)}")
    parts = _parts(value)
    now = dict(parts)
    for key, part in was.parts:
        if key not in now:
            return _told((*path, key), "what was there", "nothing")
        found = _difference(part, now[key], (*path, key))
        if found:
            return found
    count = _items(parts)
    return None if count == was.items else _told(path, f"{was.items} items", f"{count} items")


def equal(a: object, b: object) -> bool:
    """Whether they are the same or of one type and equal; a NaN is equal to any, 0.0 is not -0.0."""
    if a is b:
        return True
    try:
        if type(a) is not type(b):
            return False
        if a == b:
            return not is_plain(a) or bool(a) or str(a) == str(b)
        return bool(a != a and b != b and is_plain(a))
    except Exception:  # an object whose comparison fails is only equal to itself
        return False


def attributes(value: object) -> dict[str, Any]:
    """Those of the instance, of slots as well."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and name not in found:
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # not set
                    continue
    return found


def _parts(value: Any) -> list[tuple[Key, Any]]:
    """All that can be seen of what it holds."""
    if isinstance(value, _FUNCTIONS):
        return [((".", name), part) for name, part in _function_parts(value).items()]
    if _array(value) is not None:
        return [(("[", at), part) for at, part in enumerate(value.ravel().tolist())]
    parts: list[tuple[Key, Any]] = [((".", name), part) for name, part in attributes(value).items()]
    if isinstance(value, dict):
        parts += [(("[", key), part) for key, part in dict.items(value)]
    elif isinstance(value, (list, tuple)):
        parts += [(("[", at), part) for at, part in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        parts += [(("{", part), part) for part in value]
    elif isinstance(value, BaseException):
        parts += [((".", "args"), value.args), ((".", "__cause__"), value.__cause__)]
    return parts


def _out_of_sight(value: object) -> bool:
    """Whether it has memory that neither attributes nor slots nor the container explain: types made in C."""
    if isinstance(value, torch.nn.Module):
        return True
    if isinstance(value, _FUNCTIONS):
        return False
    base = next((one for one in _CONTAINERS if isinstance(value, one)), object)
    cls: Any = type(value)
    while cls is not base and cls is not object:
        grown = cls.__basicsize__ - cls.__base__.__basicsize__
        own = vars(cls)
        known = [isinstance(one, MemberDescriptorType) or name == "__weakref__" for name, one in own.items()]
        if cls.__itemsize__ != base.__itemsize__ or grown > 8 * (sum(known) + ("__dict__" in own)):
            return True
        cls = cls.__base__
    return False


def _function_parts(value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}
    if isinstance(value, MethodType):
        return {"__self__": value.__self__, "__func__": value.__func__}
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        return {"name": value.__qualname__} | ({} if isinstance(owner, ModuleType) else {"__self__": owner})
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
    held = {name: cell.cell_contents for name, cell in cells.items() if _filled(cell)}
    return held | {
        "__code__": value.__code__,
        "__defaults__": value.__defaults__,
        "__kwdefaults__": value.__kwdefaults__,
        **vars(value),
    }


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _array(value: object) -> Any:
    numpy = sys.modules.get("numpy")
    return value if numpy and isinstance(value, numpy.ndarray) else None


def _bytes(value: Any) -> _Bytes | None:
    """Of what is memory and nothing else."""
    array = _array(value)
    if array is not None and not array.dtype.hasobject:
        return _Bytes(type(value), (array.shape, array.dtype.str), array.tobytes(), shown(value))
    if isinstance(value, (bytearray, memoryview)):
        return _Bytes(type(value), (memoryview(value).shape, memoryview(value).format), bytes(value), shown(value))
    return None


def _items(parts: list[tuple[Key, Any]]) -> int:
    return sum(kind != "." for (kind, _), _ in parts)


def _step(key: Key) -> str:
    kind, name = key
    return f".{name}" if kind == "." else f"[{name!r}]" if kind == "[" else ""


def _told(path: tuple[Key, ...], was: str, now: str) -> Difference:
    return Difference("".join(map(_step, path)), was, now)


def shown(value: Any) -> str:
    """``value`` in a few words."""
    array = _array(value)
    if array is None:
        return repr(value)[:80] if is_plain(value) or isinstance(value, (list, tuple, dict)) else _named(value)
    head = ", ".join(map(str, array.ravel()[:4].tolist()))[:60]
    return f"{array.dtype}{list(array.shape)} [{head}{', …' if array.size > 4 else ''}]"


def _named(value: object) -> str:
    return repr(value)[:80] if type(value).__repr__ is not object.__repr__ else f"a {type(value).__qualname__}"
