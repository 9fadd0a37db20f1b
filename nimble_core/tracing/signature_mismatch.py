"""Which prepared signature a refused call comes nearest to, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from nimble_core.tracing.pytree import (
    Constant,
    Leaf,
    Node,
    Structure,
    leaf_paths,
    same_structure,
    structure_difference,
)
from nimble_core.tracing.signature import SHOWN, Signature, take_apart
from nimble_core.tracing.snapshot import shown
from nimble_core.utils.errors import InputError

__all__ = ["nearest"]

_LISTED = 3
"""Signatures that a refused call is shown; the others are counted."""


def nearest(
    signatures: Sequence[Signature],
    elsewhere: Sequence[bool],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    called: Sequence[str] = (),
) -> tuple[Signature, str]:
    """The signature that a call differs least from, and all of them in words, nearest first.

    Of inputs that are no tensors those are named in which one of them differs from the call.

    Args:
        signatures: one at least.
        elsewhere: of each, whether it would not do for these inputs either, for another reason.
        args: positional inputs of the call.
        kwargs: keyword inputs.
        called: what users call positional inputs; ``args[0]``, ... by default.
    """
    try:
        tensors, structure, _ = take_apart(args, kwargs, called)
    except InputError:  # inputs that cannot be looked into are as far from each
        tensors, structure = [], None
    given = _parts(structure, called) if structure is not None else {}
    found = []
    for signature, otherwise in zip(signatures, elsewhere, strict=True):
        parts = _parts(signature.structure, called)
        unlike: dict[str, int] = {}
        for path in (parts | given) if structure is not None else ():
            ways = _ways(parts.get(path), given.get(path), signature, tensors)
            if ways:
                unlike[path] = ways
        found.append(((len(unlike), sum(unlike.values()), otherwise), signature, parts, unlike))
    found.sort(key=lambda one: one[0])
    telling = {path for _, _, _, unlike in found for path in unlike}
    words: dict[str, None] = {}  # the same inputs under another autocast are listed once
    for _, signature, parts, _ in found:
        constants = ((path, part) for path, part in parts.items() if path in telling and isinstance(part, Constant))
        beside = (_was(path, part, given.get(path)) for path, part in islice(constants, SHOWN))
        words[", ".join((str(signature), *beside))] = None
    more = [f"and {len(words) - _LISTED} more"] if len(words) > _LISTED else []
    return found[0][1], "; ".join([*list(words)[:_LISTED], *more])


def _parts(structure: Structure, called: Sequence[str]) -> dict[str, Structure]:
    """Tensors, empty containers and what is neither, in ``(args, kwargs)``, by what users call them."""
    assert isinstance(structure, Node)
    positional, keyword = structure.children
    assert isinstance(positional, Node)
    assert isinstance(keyword, Node)
    names = [*called, *(f"args[{at}]" for at in range(len(called), len(positional.children)))]
    inputs = [*zip(names, positional.children, strict=False)]
    inputs += [(f"kwargs[{key!r}]", child) for key, child in zip(keyword.keys, keyword.children, strict=True)]
    found: dict[str, Structure] = {}

    def counted(part: Structure, ends: list[Structure]) -> Structure:
        if isinstance(part, Node) and part.children:
            return replace(part, children=tuple(counted(child, ends) for child in part.children))
        ends.append(part)
        return Leaf(len(ends) - 1)

    for name, child in inputs:
        ends: list[Structure] = []
        found.update(zip(leaf_paths(counted(child, ends), name), ends, strict=True))
    return found


def _ways(was: Structure | None, now: Structure | None, signature: Signature, tensors: Sequence[torch.Tensor]) -> int:
    """In how many ways an input differs from the prepared one: of a tensor each dimension is one."""
    if isinstance(was, Leaf) and isinstance(now, Leaf):
        (shape, dtype, device), tensor = signature.metas[was.index], tensors[now.index]
        if tensor.is_nested:  # has no shape
            return 1
        fewer = abs(tensor.ndim - len(shape))
        sizes = fewer or sum(a != b for a, b in zip(tensor.shape, shape, strict=True))
        return sizes + (tensor.dtype is not dtype) + (tensor.device != device)
    return 0 if was is not None and now is not None and same_structure(was, now) else 1


def _was(path: str, constant: Constant, given: Structure | None) -> str:
    """In words, what it was: one that may be changed in place may be another by now."""
    if constant.held is None or (isinstance(given, Constant) and same_structure(constant, given)):
        return f"{path}: {shown(constant.value)}"
    found = structure_difference(constant, given if isinstance(given, Constant) else Constant(None), path)
    return f"{found.path}: {found.was}"
