"""Nested inputs and outputs: taken apart once, put together fast.

A value is split into its tensors and a frozen ``Structure`` of everything else. What a call then pays is reading the
tensors out and building the output, not walking the value again: ``builder`` compiles a structure into closures.
Lists, tuples, named tuples, dicts, dataclasses, outputs and caches of Hugging Face and registered pytree nodes are
understood.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import pytree as _pytree
from nimble_core.tracing.known_caches import is_cache
from nimble_core.tracing.snapshot import (
    Difference,
    Hidden,
    attributes,
    difference,
    equal,
    is_iterator,
    is_plain,
    remember,
    shown,
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


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, by its position among the tensors.

    Args:
        index: the position.
        first: where the same tensor is for the first time, which an output may hold several times.
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
        held: what it held then (``nimble_core.tracing.snapshot``), since it may be changed in place; None if it cannot.
    """

    value: Any
    held: Any = None

    @property
    def was(self) -> Any:
        """What another is held against."""
        return self.value if self.held is None else self.held


@dataclass(frozen=True, slots=True)
class Node:
    """A container.

    Args:
        kind: ``"list"``, ``"tuple"``, ``"namedtuple"``, ``"dict"``, ``"record"`` (dataclass), ``"output"`` (ordered
            dict and dataclass in one, as Hugging Face returns them), ``"cache"`` (of Hugging Face, or its layers) or
            ``"pytree"``.
        type: the container's class.
        keys: keys or field names, parallel to ``children``; positions for sequences.
        children: what it contains.
        context: what a registered pytree node needs to be built again; attributes of an ``"output"`` beside its fields;
            of a ``"cache"`` in an output which input it is, as ``(0, position)`` or ``(1, keyword)``.
    """

    kind: str
    type: type
    keys: tuple[Any, ...]
    children: tuple[Structure, ...]
    context: Any = None


Structure = Leaf | Constant | Node

_OUTPUT = "output"


def flatten(
    value: object, *, what: str = "value", given: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
) -> tuple[list[torch.Tensor], Structure]:
    """Split ``value`` into its tensors, in order, and the structure around them.

    Args:
        value: anything.
        what: how error messages call it, e.g. ``"args"``; ``"output"`` for what a run returned, of which nothing may be
            out of sight.
        given: positional and keyword inputs: caches among them are noted where an output holds them.

    Raises:
        InputError: an object of an unknown type that holds tensors (they could not be replaced by those of a replay),
            an iterator, a container that contains itself; in an output also an array, or an object that cannot be
            looked into.
    """
    inputs = [(one, (0, at)) for at, one in enumerate(given[0])] + [(one, (1, key)) for key, one in given[1].items()]
    caches = {id(one): place for one, place in inputs if is_cache(one)}
    tensors: list[torch.Tensor] = []
    return tensors, _split(value, tensors, what, what == _OUTPUT, caches, {})


def _split(
    value: Any,
    tensors: list[torch.Tensor],
    path: str,
    of_run: bool,
    places: dict[int, Any],
    around: dict[int, str],
) -> Structure:
    """Args: ``places``: of tensors, and of caches among the inputs, by id; ``around``: path of each container."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        index = len(tensors) - 1
        return Leaf(index, places.setdefault(id(value), index) if of_run else index)
    if value is None or is_plain(value):
        return Constant(value)
    kind, keys, children, context = _open(value)
    if kind:
        if id(value) in around:
            raise InputError(
                f"{around[id(value)]} is a {type(value).__qualname__} that contains itself",
                where=path,
                fix=f"{'return' if of_run else 'pass'} one that does not",
            )
        around[id(value)] = path
        if of_run and kind in ("record", "output"):
            fields = {*keys, *(field.name for field in dataclasses.fields(value))}
            gained = {name: part for name, part in attributes(value).items() if name not in fields}
            if kind == "record":
                keys, children = (*keys, *gained), (*children, *gained.values())
            else:
                for name, part in gained.items():
                    _remembered(part, f"{path}.{name}", of_run)
                context = gained
        elif kind == "cache":
            context = places.get(id(value))
        parts = tuple(
            _split(child, tensors, f"{path}{_step(kind, key)}", of_run, places, around)
            for key, child in zip(keys, children, strict=True)
        )
        del around[id(value)]
        return Node(kind, type(value), tuple(keys), parts, context)
    if is_iterator(value):
        raise InputError(
            f"{path} is a {type(value).__qualname__}: iterators and generators cannot be replayed",
            where=path,
            fix=f"{'return' if of_run else 'pass'} a list",
        )
    return Constant(value, _remembered(value, path, of_run))


def _remembered(value: Any, path: str, of_run: bool) -> Any:
    try:
        return remember(value, of_run=of_run)
    except Hidden as hidden:
        where, found = f"{path}{hidden.path}", hidden.value
    kind = type(value).__qualname__
    if isinstance(found, torch.Tensor):
        instead = ""
        if kind.endswith("Cache"):
            instead = "call the model with use_cache=False, or "
        elif isinstance(value, Mapping) and not of_run:  # a tokenizer's BatchEncoding
            instead = "unpack it as keyword inputs, or pass dict() of it; else "
        raise InputError(
            f"{path} is a {kind}, which holds tensors that cannot be seen from outside",
            where=where,
            fix=f"{instead}{'return' if of_run else 'pass'} the tensors themselves, a dict or a dataclass, or register "
            "the type with torch.utils._pytree.register_pytree_node",
        )
    what = f"{path} is a {kind}" + ("" if found is value else f" with a {type(found).__qualname__}")
    raise InputError(
        f"{what}, which may hold values of this one run: a replay would return them again",
        where=where,
        fix="return the tensors themselves, in a list, a dict or a dataclass, and convert them outside of the model "
        "(net(x).numpy())",
    )


def _open(value: Any) -> tuple[str, Sequence[Any], Sequence[Any], Any]:
    """``(kind, keys, children, context)`` of a container; kind is empty for anything else."""
    cls = type(value)
    if dataclasses.is_dataclass(cls) and issubclass(cls, dict):
        return "output", tuple(value.keys()), tuple(value.values()), None
    if cls in (dict, OrderedDict):
        return "dict", tuple(value.keys()), tuple(value.values()), None
    if cls in (list, tuple):
        return cls.__name__, range(len(value)), value, None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", value._fields, value, None
    if cls in _pytree.SUPPORTED_NODES:
        children, context = _pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        children = list(children)
        return "pytree", range(len(children)), children, context
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return "record", names, tuple(getattr(value, name) for name in names), None
    if is_cache(value):
        names = tuple(sorted(vars(value)))
        return "cache", names, tuple(vars(value)[name] for name in names), None
    return "", (), (), None


def _step(kind: str, key: object) -> str:
    return f".{key}" if kind in ("namedtuple", "record", "output", "cache") else f"[{key!r}]"


def leaf_paths(structure: Structure, root: str = "") -> list[str]:
    """Path of every tensor, by position: ``["args[0]", "kwargs['mask']"]``."""
    return [path for _, path in sorted(_walk(structure, root))]


def _walk(structure: Structure, path: str) -> Iterator[tuple[int, str]]:
    if isinstance(structure, Leaf):
        yield structure.index, path
    elif isinstance(structure, Node):
        for key, child in zip(structure.keys, structure.children, strict=True):
            yield from _walk(child, f"{path}{_step(structure.kind, key)}")


def cache_paths(structure: Structure, path: str = "") -> Iterator[str]:
    """Path of every cache that is in no other."""
    if isinstance(structure, Node) and structure.kind == "cache":
        yield path
    elif isinstance(structure, Node):
        for key, child in zip(structure.keys, structure.children, strict=True):
            yield from cache_paths(child, f"{path}{_step(structure.kind, key)}")


def same_structure(a: Structure, b: Structure) -> bool:
    """Whether two structures hold tensors at the same places and equal constants around them.

    Constants of ``a`` as they were when it was made, those of ``b`` as they are now.
    """
    if isinstance(a, Node) and isinstance(b, Node):
        return (
            a.type is b.type
            and a.keys == b.keys
            and (a.kind == "cache" or equal(a.context, b.context))
            and all(same_structure(x, y) for x, y in zip(a.children, b.children, strict=True))
        )
    if isinstance(a, Constant) and isinstance(b, Constant):
        return difference(a.was, b.value) is None
    return a == b if type(a) is type(b) else False


def structure_difference(was: Structure, now: Structure, path: str = "") -> Difference:
    """Where two structures that are not the same first differ, in words; ``path`` is that of the whole."""
    if isinstance(was, Node) and isinstance(now, Node):
        if was.type is not now.type:
            return Difference(path, was.type.__name__, now.type.__name__)
        if was.keys != now.keys:
            return Difference(path, f"keys {list(was.keys)}", str(list(now.keys)))
        for key, a, b in zip(was.keys, was.children, now.children, strict=True):
            if not same_structure(a, b):
                return structure_difference(a, b, f"{path}{_step(was.kind, key)}")
    if isinstance(was, Constant) and isinstance(now, Constant):
        found = difference(was.was, now.value)
        if found:
            return dataclasses.replace(found, path=path + found.path)
    return Difference(path, _name(was), _name(now))


def _name(structure: Structure) -> str:
    if isinstance(structure, Leaf):
        return "a tensor"
    if isinstance(structure, Constant):
        return shown(structure.value)
    return structure.type.__name__


def reader(structure: Structure) -> Callable[[Any], list[torch.Tensor] | None]:
    """Compile ``structure`` into a function from a value to its tensors; None for a value of another structure."""
    read = _reader(structure)

    def tensors(value: Any) -> list[torch.Tensor] | None:
        found: list[torch.Tensor] = []
        return found if read(value, found) else None

    return tensors


def _reader(structure: Structure) -> Callable[[Any, list[torch.Tensor]], bool]:
    """Appends the tensors of a value, and tells whether it has the structure."""
    if isinstance(structure, Leaf):

        def read_leaf(value: Any, found: list[torch.Tensor]) -> bool:
            found.append(value)
            return isinstance(value, torch.Tensor)

        return read_leaf
    if isinstance(structure, Constant):
        was = structure.was
        if is_plain(was):
            return lambda value, found: equal(was, value)
        return lambda value, found: difference(was, value) is None
    cls: Any = structure.type
    keys = structure.keys
    parts = [_reader(child) for child in structure.children]
    if structure.kind in ("list", "tuple"):
        count = len(parts)

        def read_sequence(value: Any, found: list[torch.Tensor]) -> bool:
            return type(value) is cls and len(value) == count and all(map(_apply, parts, value, repeat(found)))

        return read_sequence
    if structure.kind == "dict":

        def read_dict(value: Any, found: list[torch.Tensor]) -> bool:
            return (
                type(value) is cls and tuple(value) == keys and all(map(_apply, parts, value.values(), repeat(found)))
            )

        return read_dict
    if structure.kind == "cache":

        def read_cache(value: Any, found: list[torch.Tensor]) -> bool:
            if type(value) is not cls or len(held := vars(value)) != len(keys):
                return False
            try:
                return all(map(_apply, parts, map(held.__getitem__, keys), repeat(found)))
            except KeyError:
                return False

        return read_cache

    alone = _counted_from_zero(structure)

    def read_other(value: Any, found: list[torch.Tensor]) -> bool:
        try:
            tensors, given = flatten(value)
        except InputError:
            return False
        found += tensors
        return same_structure(given, alone)

    return read_other


def _apply(function: Callable[[Any, Any], bool], value: Any, found: Any) -> bool:
    return function(value, found)


def _counted_from_zero(structure: Structure) -> Structure:
    """The structure with its tensors counted anew."""
    numbers = {index: number for number, (index, _) in enumerate(sorted(_walk(structure, "")))}

    def counted(part: Structure) -> Structure:
        if isinstance(part, Leaf):
            return Leaf(numbers[part.index])
        if isinstance(part, Constant):
            return part
        return dataclasses.replace(part, children=tuple(map(counted, part.children)))

    return counted(structure)


def passed_on(structure: Structure, count: int) -> tuple[Structure, tuple[tuple[int, Any], ...]]:
    """The structure of an output with tensors from position ``count`` on in place of the caches that were inputs.

    Returns:
        The structure, and which input each of them is: ``(0, position)`` or ``(1, keyword)``.
    """
    places: dict[tuple[int, Any], int] = {}

    def marked(part: Structure) -> Structure:
        if not isinstance(part, Node):
            return part
        if part.kind == "cache" and part.context is not None:
            return Leaf(places.setdefault(part.context, count + len(places)))
        return dataclasses.replace(part, children=tuple(map(marked, part.children)))

    return marked(structure), tuple(places)


def builder(structure: Structure) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Compile ``structure`` into a function from tensors to a value of that structure."""
    if isinstance(structure, Leaf):
        index = structure.source
        return lambda tensors: tensors[index]
    if isinstance(structure, Constant):
        constant = structure.value
        return lambda tensors: constant
    parts = [builder(child) for child in structure.children]
    cls, keys, kind = structure.type, structure.keys, structure.kind
    if kind in ("list", "tuple"):
        leaves = [child.source for child in structure.children if isinstance(child, Leaf)]
        if kind == "tuple" and leaves == list(range(len(structure.children))):
            return lambda tensors: tuple(tensors[: len(leaves)])
        return lambda tensors: cls(part(tensors) for part in parts)
    if kind == "namedtuple":
        return lambda tensors: cls(*[part(tensors) for part in parts])
    if kind == "dict":
        return lambda tensors: cls(zip(keys, [part(tensors) for part in parts], strict=True))
    if kind in ("record", "cache"):
        return _record_builder(cls, keys, parts)
    if kind == "output":
        return _output_builder(cls, keys, parts, structure.context)
    node, context = _pytree.SUPPORTED_NODES[cls], structure.context
    return lambda tensors: node.unflatten_fn([part(tensors) for part in parts], context)


def _record_builder(
    cls: Any, keys: tuple[Any, ...], parts: list[Callable[[Sequence[torch.Tensor]], Any]]
) -> Callable[[Sequence[torch.Tensor]], Any]:
    # Not by the constructor: what ``__post_init__`` does was done when the model made the value.
    def build(tensors: Sequence[torch.Tensor]) -> Any:
        made = cls.__new__(cls)
        for key, part in zip(keys, parts, strict=True):
            object.__setattr__(made, key, part(tensors))
        return made

    return build


def _output_builder(
    cls: Any,
    keys: tuple[Any, ...],
    parts: list[Callable[[Sequence[torch.Tensor]], Any]],
    context: dict[str, Any] | None,
) -> Callable[[Sequence[torch.Tensor]], Any]:
    # The class's own constructor inspects every field (59 µs for a Hugging Face output): fill dict and fields directly.
    absent = {field.name: None for field in dataclasses.fields(cls) if field.name not in keys} | (context or {})

    def build(tensors: Sequence[torch.Tensor]) -> Any:
        made = cls.__new__(cls)
        fields = made.__dict__
        fields.update(absent)
        for key, part in zip(keys, parts, strict=True):
            value = part(tensors)
            OrderedDict.__setitem__(made, key, value)
            fields[key] = value
        return made

    return build
