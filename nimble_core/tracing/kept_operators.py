"""Operators under a name of our own, which rewrites and compilers do not know and so leave as they are.

What runs under the recorder is written down as the operator itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from numbers import Number
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import OpOverload

__all__ = ["eager_form", "kept_form"]

_NAMESPACE = "nimble_kept"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_eager_forms: dict[OpOverload, OpOverload] = {}


def kept_form(func: Any, args: Sequence[Any]) -> OpOverload | None:
    """Return an operator that does what ``func`` does; None if that writes, shows or draws, or is no operator.

    Args:
        func: an operator that is given a tensor; by its tensors the dispatcher finds the device.
        args: of the call: only ATen's own operators take numbers for tensors.
    """
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    arguments = func._schema.arguments
    if any(one.alias_info is not None for one in (*arguments, *func._schema.returns)):
        return None
    pairs = zip(arguments, args, strict=False)
    return _defined(func, tuple(one.name for one, given in pairs if isinstance(given, Number) and _is_tensor(one)))


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


@cache
def _defined(func: OpOverload, numbers: tuple[str, ...]) -> OpOverload:
    """Define ``func`` once more, with numbers in the place of these tensors."""
    name = "_".join((func.name().replace("::", "_").replace(".", "_"), *numbers))
    signature = str(func._schema).partition("(")[2]
    for one in numbers:
        signature = re.sub(rf"\bTensor(\??) {one}\b", rf"Scalar\1 {one}", signature)
    _library.define(f"{name}({signature}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    for device in ("CPU", "CUDA"):
        _library.impl(name, func, device)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", func, lib=_library)
    found: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _eager_forms[found] = func
    return found


def eager_form(func: Any) -> OpOverload | None:
    """Return the operator that a kept one does; None for others."""
    return _eager_forms.get(func) if _eager_forms else None
