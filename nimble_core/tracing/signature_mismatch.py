"""Which prepared signature a refused call comes nearest to, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nimble_core.tracing.signature import SHOWN, Signature, in_words, take_apart
from nimble_core.tracing.structure import Leaf, Structure, in_short, parts, same_structure, structure_difference
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
    """Return the signature that a call differs least from, and a list of all in words, nearest first.

    Of inputs that are no tensors, those are named in which a signature differs from the call.

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
        return signatures[0], _listed(map(str, signatures))
    given = dict(parts(structure))
    found = []
    for signature, otherwise in zip(signatures, elsewhere, strict=True):
        prepared = dict(parts(signature.structure))
        ways = {path: _ways(prepared.get(path), given.get(path), signature, tensors) for path in prepared | given}
        unlike = [path for path, count in ways.items() if count]
        found.append(((len(unlike), sum(ways.values()), otherwise), signature, prepared, unlike))
    found.sort(key=lambda one: one[0])
    telling = {path for _, _, _, unlike in found for path in unlike}
    words = []
    for _, signature, prepared, _ in found:
        beside = [(path, part) for path, part in prepared.items() if path in telling and not isinstance(part, Leaf)]
        told = (_told(path, part, given.get(path), called) for path, part in beside[:SHOWN])
        words.append(", ".join((str(signature), *told)))
    return found[0][1], _listed(words)


def _listed(signatures: Iterable[str]) -> str:
    different = list(dict.fromkeys(signatures))  # the same inputs under another autocast are listed once
    more = [f"and {len(different) - _LISTED} more"] if len(different) > _LISTED else []
    return "; ".join([*different[:_LISTED], *more])


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


def _told(path: str, was: Structure, now: Structure | None, called: Sequence[str]) -> str:
    # Where this signature does not differ, what it was prepared with.
    found = now and structure_difference(was, now, path)
    place, words = (found.path, found.was) if found else (path, in_short(was))
    return f"{in_words(place, called)}: {words}"
