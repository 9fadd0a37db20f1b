"""Caches of Hugging Face models, known by name: ``transformers`` need not be installed, and is never imported."""

from __future__ import annotations

import re

import torch

from nimble_core.tracing.plain_values import attributes

__all__ = ["is_cache"]

_KNOWN = re.compile(r"transformers(_modules)?\..*(Cache|Layer|KVSharingDict)$")
"""Classes of caches and of their layers, also in the files that models bring along."""


def is_cache(value: object) -> bool:
    """Whether ``value`` is a cache, or a layer of one, that consists of its attributes and nothing else.

    Such an object can be made again from tensors and attributes, without its constructor. Classes that derive from a
    known one count as well.
    """
    cls = type(value)
    return (
        any(_KNOWN.match(f"{base.__module__}.{base.__name__}") for base in cls.__mro__)
        and cls.__new__ is object.__new__
        and attributes(value).keys() == getattr(value, "__dict__", {}).keys()
        and not isinstance(value, torch.nn.Module)
    )
