"""Values that are no tensors: which cannot change, which are equal, what they hold, how they read in a message."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, MemberDescriptorType
from typing import Any

import torch

__all__ = ["attributes", "equal", "frozen", "is_array", "is_iterator", "is_opaque", "is_plain", "shown"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range, type, type(None), type(...), type(NotImplemented), CodeType),
    *(enum.Enum, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
_TRANSPARENT = (object, dict, OrderedDict, defaultdict, list, tuple)
"""Types that are written in C and hold nothing but attributes and items."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: all classes that are written in Python


@dataclass(frozen=True, slots=True)
class _Memory:
    """The bytes of an array or a bytearray, with the words to show it by."""

    layout: tuple[Any, ...]
    data: bytes
    words: str


def is_plain(value: object) -> bool:
    """Whether a value cannot change, and holds nothing but what its type says: a number, a string, a type."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _PLAIN) or bool(
        numpy and isinstance(value, (numpy.generic, numpy.dtype)) and not isinstance(value, numpy.void)
    )


def is_iterator(value: object) -> bool:
    """Whether reading a value uses it up (an open file is not meant)."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def equal(a: object, b: object) -> bool:
    """Whether two values are the same, or of one type and equal; NaN equals NaN, 0.0 does not equal -0.0."""
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
    """Return the attributes of an instance, those in slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and name not in found:
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # not set
                    continue
    return found


def frozen(value: Any) -> Any:
    """Return what can be compared with ``value`` later, after it may have been changed in place."""
    if is_array(value) and not value.dtype.hasobject:
        return _Memory((type(value), value.shape, value.dtype.str), value.tobytes(), shown(value))
    if isinstance(value, bytearray):
        return _Memory((type(value),), bytes(value), shown(value))
    return frozenset(value) if isinstance(value, set) else value


def is_opaque(value: object) -> bool:
    """Whether a value may hold more than its attributes and items show, or cannot be read without running its code."""
    base = next(cls for cls in type(value).__mro__ if not cls.__flags__ & _HEAP_TYPE)
    return callable(value) or base not in _TRANSPARENT


def is_array(value: object) -> bool:
    """Whether a value is an array of numpy, which is not imported for this."""
    numpy = sys.modules.get("numpy")
    return bool(numpy and isinstance(value, numpy.ndarray))


def shown(value: Any) -> str:
    """Return ``value`` in a few words."""
    if isinstance(value, _Memory):
        return value.words
    if is_array(value):
        head = ", ".join(map(str, value.ravel()[:4].tolist()))[:60]
        return f"{value.dtype}{list(value.shape)} [{head}{', …' if value.size > 4 else ''}]"
    words = repr(value)[:80]
    return words if is_plain(value) or not words.startswith("<") else f"a {type(value).__qualname__}"
