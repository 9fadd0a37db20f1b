"""Nested inputs and outputs: taken apart once, put together fast.

A value is split into its tensors and a frozen ``Structure`` of everything else. A call then only reads the tensors out
of its inputs (``reader``) and puts those of its outputs into new containers (``builder``).

Lists, tuples, named tuples, dicts, dataclasses, outputs and caches of Hugging Face and registered pytree nodes are
containers. Inputs may also hold functions and modules; outputs may not, since an object may carry something of the run
that made it. Other objects are refused: nothing tells whether they change.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import pytree as _pytree
from nimble_core.tracing.structure import (
    Constant,
    Leaf,
    Node,
    Structure,
    cache_paths,
    equal,
    is_cache,
    is_iterator,
    is_plain,
    leaf_paths,
    parts,
    same_structure,
    stands_for_itself,
    step_to,
    structure_difference,
)
from nimble_core.utils.errors import InputError

__all__ = [
    "Constant",
    "Leaf",
    "Node",
    "Structure",
    "builder",
    "cache_paths",
    "flatten",
    "leaf_paths",
    "passed_on",
    "reader",
    "same_structure",
    "structure_difference",
]


_OUTPUT = "output"


# -- taking apart --------------------------------------------------------------------------------------------------


def flatten(
    value: object, *, what: str = "value", given: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
) -> tuple[list[torch.Tensor], Structure]:
    """Split ``value`` into its tensors, in order, and the structure around them.

    Args:
        value: anything.
        what: how error messages call it, e.g. ``"args"``; ``"output"`` for what a run returned.
        given: positional and keyword inputs: caches among them are noted where an output holds them.

    Raises:
        InputError: an object of an unknown class, an iterator, a container that contains itself; in an output any
            object.
    """
    inputs = [(one, (0, at)) for at, one in enumerate(given[0])] + [(one, (1, key)) for key, one in given[1].items()]
    splitter = _Splitter(what == _OUTPUT, {id(one): place for one, place in inputs if is_cache(one)})
    structure = splitter.split(value, what)
    return splitter.tensors, structure


class _Splitter:
    """Splits one value."""

    def __init__(self, of_run: bool, caches: Mapping[int, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._of_run, self._caches = of_run, caches
        self._verb = "return" if of_run else "pass"
        self._first: dict[int, int] = {}  # positions of tensors, by id
        self._around: dict[int, str] = {}  # paths of the containers around, by id

    def split(self, value: Any, path: str) -> Structure:
        """Split the value at ``path``."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            index = len(self.tensors) - 1
            return Leaf(index, self._first.setdefault(id(value), index) if self._of_run else index)
        if value is None or is_plain(value):
            return Constant(value)
        if opened := _open(value, self._of_run):
            return self._container(value, path, *opened)
        if is_iterator(value):
            raise InputError(
                f"{path} is a {type(value).__qualname__}: iterators and generators cannot be replayed",
                where=path,
                fix=f"{self._verb} a list",
            )
        if self._of_run or not stands_for_itself(value):
            raise self._refused(value, path)
        return Constant(value)

    def _container(
        self, value: Any, path: str, kind: str, keys: Sequence[Any], children: Iterable[Any], context: Any
    ) -> Structure:
        if id(value) in self._around:
            raise InputError(
                f"{self._around[id(value)]} is a {type(value).__qualname__} that contains itself",
                where=path,
                fix=f"{self._verb} one that does not",
            )
        self._around[id(value)] = path
        found = [self.split(child, path + step_to(kind, key)) for key, child in zip(keys, children, strict=True)]
        del self._around[id(value)]
        if kind == "cache":
            context = self._caches.get(id(value))
        return Node(kind, type(value), tuple(keys), tuple(found), context)

    def _refused(self, value: object, path: str) -> InputError:
        kind = type(value).__qualname__
        instead = ""
        if kind.endswith("Cache"):
            instead = "call the model with use_cache=False, or "
        elif isinstance(value, Mapping) and not self._of_run:  # a tokenizer's BatchEncoding
            instead = "unpack it as keyword inputs, or pass dict() of it; else "
        elif type(value).__module__ == "numpy" and not self._of_run:
            instead = "pass torch.from_numpy(x); else "
        holds = "values of this one run: a replay would return them again" if self._of_run else "tensors, or change"
        return InputError(
            f"{path} is a {kind}, of a class that is not known, and may hold {holds}",
            where=path,
            fix=f"{instead}{self._verb} the tensors and numbers themselves, in a list, a dict or a dataclass, or "
            "register the type with torch.utils._pytree.register_pytree_node"
            + "; convert tensors outside of the model (net(x).numpy())"
            * self._of_run,
        )


def _open(value: Any, of_run: bool) -> tuple[str, Sequence[Any], Iterable[Any], Any] | None:
    """Return ``(kind, keys, children, context)`` of a container; None for anything else.

    Of a dataclass among the inputs, fields are compared alone: methods may keep what they compute beside them.
    """
    cls = type(value)
    if dataclasses.is_dataclass(cls) and issubclass(cls, dict):
        return "output", tuple(value.keys()), value.values(), None
    if cls in (dict, OrderedDict):
        return "dict", tuple(value.keys()), value.values(), None
    if cls in (list, tuple):
        return cls.__name__, range(len(value)), value, None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", value._fields, value, None
    if cls in _pytree.SUPPORTED_NODES:
        children, context = _pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        children = list(children)
        return "pytree", range(len(children)), children, context
    if dataclasses.is_dataclass(cls):
        names = dict.fromkeys(field.name for field in dataclasses.fields(cls))
        if of_run:
            names |= dict.fromkeys(getattr(value, "__dict__", ()))
        held = tuple(name for name in names if hasattr(value, name))
        return "record", held, [getattr(value, name) for name in held], None
    if is_cache(value):
        held = tuple(sorted(vars(value)))
        return "cache", held, [vars(value)[name] for name in held], None
    return None


# -- reading -------------------------------------------------------------------------------------------------------


def reader(structure: Structure) -> Callable[[Any], list[torch.Tensor] | None]:
    """Compile ``structure`` into a function from a value to its tensors; None for a value of another structure."""
    read = _reader(structure)

    def tensors(value: Any) -> list[torch.Tensor] | None:
        found: list[torch.Tensor] = []
        return found if read(value, found) else None

    return tensors


_Reader = Callable[[Any, list[torch.Tensor]], bool]
"""Appends the tensors of a value, and says whether it has the structure."""


def _reader(structure: Structure) -> _Reader:
    if isinstance(structure, Leaf):
        return _read_leaf
    if isinstance(structure, Constant):
        was = structure.value
        return lambda value, found: equal(was, value)
    if structure.kind not in ("list", "tuple", "dict", "cache"):
        return _general_reader(structure)
    cls: Any = structure.type
    keys, count = structure.keys, len(structure.keys)
    children = [_reader(child) for child in structure.children]

    def read_sequence(value: Any, found: list[torch.Tensor]) -> bool:
        return type(value) is cls and len(value) == count and all(map(_apply, children, value, repeat(found)))

    def read_dict(value: Any, found: list[torch.Tensor]) -> bool:
        return type(value) is cls and tuple(value) == keys and all(map(_apply, children, value.values(), repeat(found)))

    def read_cache(value: Any, found: list[torch.Tensor]) -> bool:
        if type(value) is not cls or len(held := vars(value)) != count:
            return False
        try:
            return all(map(_apply, children, map(held.__getitem__, keys), repeat(found)))
        except KeyError:
            return False

    return {"dict": read_dict, "cache": read_cache}.get(structure.kind, read_sequence)


def _read_leaf(value: Any, found: list[torch.Tensor]) -> bool:
    found.append(value)
    return isinstance(value, torch.Tensor)


def _apply(function: _Reader, value: Any, found: list[torch.Tensor]) -> bool:
    return function(value, found)


def _general_reader(structure: Node) -> _Reader:
    """Read by taking the value apart."""
    expected = _counted_from_zero(structure)

    def read(value: Any, found: list[torch.Tensor]) -> bool:
        try:
            tensors, given = flatten(value)
        except InputError:
            return False
        found += tensors
        return same_structure(expected, given)

    return read


def _counted_from_zero(structure: Structure) -> Structure:
    """Return the structure with its tensors counted anew."""
    indices = sorted(part.index for _, part in parts(structure) if isinstance(part, Leaf))
    numbers = {index: number for number, index in enumerate(indices)}
    return _replaced(structure, lambda part: Leaf(numbers[part.index]) if isinstance(part, Leaf) else None)


def _replaced(structure: Structure, other: Callable[[Structure], Structure | None]) -> Structure:
    """Return the structure with ``other`` of each part in its place, where that is not None."""
    made = other(structure)
    if made is not None or not isinstance(structure, Node):
        return structure if made is None else made
    return dataclasses.replace(structure, children=tuple(_replaced(child, other) for child in structure.children))


# -- building ------------------------------------------------------------------------------------------------------


def passed_on(structure: Structure, count: int) -> tuple[Structure, tuple[tuple[int, Any], ...]]:
    """Return the structure of an output with tensors in place of the caches that were inputs.

    Args:
        structure: the output's.
        count: position of the first of these tensors.

    Returns:
        The structure, and which input each of them is: ``(0, position)`` or ``(1, keyword)``.
    """
    places: dict[tuple[int, Any], int] = {}

    def marked(part: Structure) -> Structure | None:
        if isinstance(part, Node) and part.kind == "cache" and part.context is not None:
            return Leaf(places.setdefault(part.context, count + len(places)))
        return None

    return _replaced(structure, marked), tuple(places)


_Builder = Callable[[Sequence[torch.Tensor]], Any]


def builder(structure: Structure) -> _Builder:
    """Compile ``structure`` into a function from tensors to a value of that structure."""
    if isinstance(structure, Leaf):
        index = structure.source
        return lambda tensors: tensors[index]
    if isinstance(structure, Constant):
        constant = structure.value
        return lambda tensors: constant
    cls, keys, kind, context = structure.type, structure.keys, structure.kind, structure.context
    children = [builder(child) for child in structure.children]
    if kind in ("list", "tuple"):
        leaves = [child.source for child in structure.children if isinstance(child, Leaf)]
        if kind == "tuple" and leaves == list(range(len(children))):
            return lambda tensors: tuple(tensors[: len(leaves)])
        return lambda tensors: cls(child(tensors) for child in children)
    if kind == "namedtuple":
        return lambda tensors: cls(*[child(tensors) for child in children])
    if kind == "dict":
        return lambda tensors: cls(zip(keys, [child(tensors) for child in children], strict=True))
    if kind in ("record", "cache"):
        return _record_builder(cls, keys, children)
    if kind == "output":
        return _output_builder(cls, keys, children)
    node = _pytree.SUPPORTED_NODES[cls]
    return lambda tensors: node.unflatten_fn([child(tensors) for child in children], context)


def _record_builder(cls: Any, keys: tuple[Any, ...], children: list[_Builder]) -> _Builder:
    # Not by the constructor: what ``__post_init__`` does was done when the model made the value.
    def build(tensors: Sequence[torch.Tensor]) -> Any:
        made = cls.__new__(cls)
        for key, child in zip(keys, children, strict=True):
            object.__setattr__(made, key, child(tensors))
        return made

    return build


def _output_builder(cls: Any, keys: tuple[Any, ...], children: list[_Builder]) -> _Builder:
    # The class's own constructor inspects every field (59 µs for a Hugging Face output): fill dict and fields directly.
    absent = {field.name: None for field in dataclasses.fields(cls) if field.name not in keys}

    def build(tensors: Sequence[torch.Tensor]) -> Any:
        made = cls.__new__(cls)
        fields = made.__dict__
        fields.update(absent)
        for key, child in zip(keys, children, strict=True):
            value = child(tensors)
            OrderedDict.__setitem__(made, key, value)
            fields[key] = value
        return made

    return build
