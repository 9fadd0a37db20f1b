"""The structure of nested values around their tensors: paths in it, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nimble_core.tracing.plain_values import equal, shown

__all__ = [
    "Constant",
    "Difference",
    "Leaf",
    "Node",
    "Structure",
    "cache_paths",
    "in_short",
    "leaf_paths",
    "parts",
    "same_structure",
    "step_to",
    "structure_difference",
]


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
    """Anything that is not a tensor and holds none.

    Args:
        value: it.
        held: a copy to compare other values with, since it may be changed in place; None if it cannot.
    """

    value: Any
    held: Any = None

    @property
    def was(self) -> Any:
        """What other values are compared with."""
        return self.value if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class Node:
    """A container.

    Args:
        kind: ``"list"``, ``"tuple"``, ``"namedtuple"``, ``"dict"``, ``"record"`` (dataclass), ``"output"`` (ordered
            dict and dataclass in one, as Hugging Face returns them), ``"cache"`` (of Hugging Face, or its layers),
            ``"pytree"`` or ``"object"`` (any other, without tensors).
        type: the container's class.
        keys: keys or names of attributes, parallel to ``children``; positions for sequences; for an object, what leads
            to each child in Python: ``".a"``, ``"[0]"``.
        children: what it contains.
        context: what a registered pytree node needs to be built again; for a cache in an output, which input it is, as
            ``(0, position)`` or ``(1, keyword)``; an object itself.
    """

    kind: str
    type: type
    keys: tuple[Any, ...]
    children: tuple[Structure, ...]
    context: Any = None


Structure = Leaf | Constant | Node


@dataclass(frozen=True, slots=True)
class Difference:
    """Where something is not what it was.

    Args:
        path: from the value on, ``".held[0]"``.
        was: what was there, in words.
        now: what is there now, in words.
    """

    path: str
    was: str
    now: str


def step_to(kind: str, key: object) -> str:
    """Return what leads from a container to a child in Python, by the container's kind and the child's key."""
    if kind == "object":
        return str(key)
    return f".{key}" if kind in ("namedtuple", "record", "output", "cache") else f"[{key!r}]"


def parts(structure: Structure, path: str = "") -> Iterator[tuple[str, Structure]]:
    """Yield what is no container with children, and its path: tensors, constants, empty containers, objects."""
    if isinstance(structure, Node) and structure.children and structure.kind != "object":
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
    """Whether two structures hold tensors at the same places and equal constants around them.

    Objects may have gained attributes since.
    """
    return structure_difference(was, now) is None


def structure_difference(was: Structure, now: Structure, path: str = "") -> Difference | None:
    """Return where two structures that are not the same first differ; ``path`` is that of the whole."""
    if isinstance(was, Node) and isinstance(now, Node) and was.type is now.type:
        pairs = _pairs(was, now)
        if pairs is None:
            return Difference(path, f"keys {list(was.keys)}", str(list(now.keys)))
        for key, one, other in pairs:
            if found := structure_difference(one, other, path + step_to(was.kind, key)):
                return found
        same = was.kind in ("cache", "object") or equal(was.context, now.context)
    elif isinstance(was, Constant) and isinstance(now, Constant):
        same = equal(was.was, now.was)
    else:
        same = was == now if type(was) is type(now) is Leaf else False
    return None if same else Difference(path, in_short(was), in_short(now))


def _pairs(was: Node, now: Node) -> list[tuple[Any, Structure, Structure]] | None:
    """Return the children of both by key; None if they have other keys."""
    children = now.children
    if was.keys != now.keys:
        held = dict(zip(now.keys, now.children, strict=True))
        gained = held.keys() - set(was.keys)
        if was.kind != "object" or len(held) - len(gained) < len(was.keys) or any(key[0] != "." for key in gained):
            return None
        children = tuple(held[key] for key in was.keys)
    return list(zip(was.keys, was.children, children, strict=True))


def in_short(structure: Structure) -> str:
    """Return a structure in a few words."""
    if isinstance(structure, Leaf):
        return "a tensor"
    return shown(structure.was) if isinstance(structure, Constant) else structure.type.__name__
