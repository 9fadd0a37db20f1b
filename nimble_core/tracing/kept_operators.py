"""Operators under a name of our own, which rewrites and compilers do not know and so leave as they are.

What runs under the recorder is written down as the operator itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import OpOverload

__all__ = ["eager_form", "kept_form"]

_NAMESPACE = "nimble_kept"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_eager_forms: dict[OpOverload, OpOverload] = {}


@cache
def kept_form(func: Any) -> OpOverload | None:
    """Return an operator that does what ``func`` does; None if that writes, shows or draws, or is no operator."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    schema = func._schema
    if any(one.alias_info is not None for one in (*schema.arguments, *schema.returns)):
        return None
    name = func.name().replace("::", "_").replace(".", "_")
    _library.define(
        f"{name}({str(schema).partition('(')[2]}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    )
    for device in ("CPU", "CUDA"):
        _library.impl(name, func, device)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", func, lib=_library)
    found: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _eager_forms[found] = func
    return found


def eager_form(func: Any) -> OpOverload | None:
    """Return the operator that a kept one does; None for others."""
    return _eager_forms.get(func) if _eager_forms else None
