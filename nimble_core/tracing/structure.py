"""The structure of nested values around their tensors: what is in it, paths in it, and where two of them differ."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

__all__ = [
    "Constant",
    "Difference",
    "Leaf",
    "Node",
    "Structure",
    "cache_paths",
    "equal",
    "in_short",
    "is_cache",
    "is_iterator",
    "is_plain",
    "leaf_paths",
    "parts",
    "same_structure",
    "shown",
    "stands_for_itself",
    "step_to",
    "structure_difference",
]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range, type, type(None), type(...), type(NotImplemented), CodeType),
    *(enum.Enum, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
)
_CACHE = re.compile(r"transformers(_modules)?\..*(Cache|Layer|KVSharingDict)$")
"""Classes of caches of Hugging Face and of their layers, also in the files that models bring along."""


# -- structures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, by its position among the tensors.

    Args:
        index: the position.
        first: position at which an output holds the same tensor for the first time.
    """

    index: int
    first: int | None = field(default=None, compare=False)

    @property
    def source(self) -> int:
        """Position of the tensor to build with."""
        return self.index if self.first is None else self.first


@dataclass(frozen=True, slots=True)
class Constant:
    """Anything that is not a tensor and holds none."""

    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """A container.

    Args:
        kind: ``"list"``, ``"tuple"``, ``"namedtuple"``, ``"dict"``, ``"record"`` (dataclass), ``"output"`` (ordered
            dict and dataclass in one, as Hugging Face returns them), ``"cache"`` (of Hugging Face, or its layers),
            or ``"pytree"``.
        type: the container's class.
        keys: keys or names of attributes, parallel to ``children``; positions for sequences.
        children: what it contains.
        context: what a registered pytree node needs to be built again; for a cache in an output, which input it is, as
            ``(0, position)`` or ``(1, keyword)``.
    """

    kind: str
    type: type
    keys: tuple[Any, ...]
    children: tuple[Structure, ...]
    context: Any = None


Structure = Leaf | Constant | Node


@dataclass(frozen=True, slots=True)
class Difference:
    """Where something is not what it was."""

    path: str
    was: str
    now: str


def step_to(kind: str, key: object) -> str:
    """Return what leads from a container to a child in Python, by the container's kind and the child's key."""
    return f".{key}" if kind in ("namedtuple", "record", "output", "cache") else f"[{key!r}]"


def parts(structure: Structure, path: str = "") -> Iterator[tuple[str, Structure]]:
    """Yield what is no container with children, and its path: tensors, constants, empty containers."""
    if isinstance(structure, Node) and structure.children:
        for key, child in zip(structure.keys, structure.children, strict=True):
            yield from parts(child, path + step_to(structure.kind, key))
    else:
        yield path, structure


def leaf_paths(structure: Structure, root: str = "") -> list[str]:
    """Return the path of every tensor, by position: ``["args[0]", "kwargs['mask']"]``."""
    found = [(part.index, path) for path, part in parts(structure, root) if isinstance(part, Leaf)]
    return [path for _, path in sorted(found)]


def cache_paths(structure: Structure, path: str = "") -> Iterator[str]:
    """Yield the path of every cache that is in no other."""
    if isinstance(structure, Node) and structure.kind == "cache":
        yield path
    elif isinstance(structure, Node):
        for key, child in zip(structure.keys, structure.children, strict=True):
            yield from cache_paths(child, path + step_to(structure.kind, key))


def same_structure(was: Structure, now: Structure) -> bool:
    """Whether two structures hold tensors at the same places and equal constants around them."""
    return structure_difference(was, now) is None


def structure_difference(was: Structure, now: Structure, path: str = "") -> Difference | None:
    """Return where two structures that are not the same first differ; ``path`` is that of the whole."""
    if isinstance(was, Node) and isinstance(now, Node) and was.type is now.type:
        if was.keys != now.keys:
            return Difference(path, f"keys {list(was.keys)}", str(list(now.keys)))
        for key, one, other in zip(was.keys, was.children, now.children, strict=True):
            if found := structure_difference(one, other, path + step_to(was.kind, key)):
                return found
        same = was.kind == "cache" or equal(was.context, now.context)
    elif isinstance(was, Constant) and isinstance(now, Constant):
        same = equal(was.value, now.value)
    else:
        same = was == now if type(was) is type(now) is Leaf else False
    return None if same else Difference(path, in_short(was), in_short(now))


def in_short(structure: Structure) -> str:
    """Return a structure in a few words."""
    if isinstance(structure, Leaf):
        return "a tensor"
    return shown(structure.value) if isinstance(structure, Constant) else structure.type.__name__


# -- values that are no tensors -------------------------------------------------------------------------------------


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


def stands_for_itself(value: object) -> bool:
    """Whether a value among the inputs is compared as one: functions, modules and generators of random numbers."""
    return callable(value) or isinstance(value, torch.Generator)


def shown(value: Any) -> str:
    """Return ``value`` in a few words."""
    words = repr(value)[:80]
    return words if is_plain(value) or not words.startswith("<") else f"a {type(value).__qualname__}"


def is_cache(value: object) -> bool:
    """Whether a value is a cache of Hugging Face, or a layer of one; ``transformers`` is not imported for this.

    It can be made again from its attributes, without its constructor. Classes that derive from a known one count.
    """
    cls = type(value)
    known = any(_CACHE.match(f"{base.__module__}.{base.__name__}") for base in cls.__mro__)
    return known and cls.__new__ is object.__new__ and not isinstance(value, torch.nn.Module)
