"""Seeds of attention's dropout, brought to where its backward looks for them.

Memory-efficient attention keeps seeds for its backward on the device if it is captured, and on the host if it is not;
its backward looks where a forward that runs as it does would have kept them. A backward that is cut from its forward is
given what the captured forward left on the device. To be compiled and compared it has to run outside of a capture as
well, where reading these seeds ends the process. Operators of our own bring them to the host there; in a capture they
are ATen's. Other kernels of attention keep seeds on the device at all times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import arguments_of
from nimble_core.torch_compat.dispatch import OpOverload

__all__ = ["bring_seeds"]

_SEEDS = ("philox_seed", "philox_offset")
_aten = torch.ops.aten
_BACKWARDS = {
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._efficient_attention_backward.default,
}

_NAMESPACE = "nimble"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def bring_seeds(module: fx.GraphModule) -> int:
    """Let backwards of attention find dropout seeds made ahead of the graph, and return how many do."""
    count = 0
    for node in module.graph.nodes:
        if node.target in _BACKWARDS and _drops_as_given(node):
            node.target = _bringing(node.target)
            count += 1
    if count:
        module.recompile()
    return count


def _drops_as_given(node: fx.Node) -> bool:
    """Whether a call drops what a forward outside of the graph dropped."""
    given = arguments_of(node)
    return given["dropout_p"] != 0.0 and given["philox_seed"].op in ("get_attr", "placeholder")


@cache
def _bringing(func: OpOverload) -> OpOverload:
    """Define ``func`` under a name of our own, where it finds seeds on the device at all times."""
    schema = func._schema
    _, _, signature = str(schema).partition("::")
    name = signature.partition("(")[0]
    at = [place for place, one in enumerate(schema.arguments) if one.name in _SEEDS]

    def brought(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        return func(*(one.cpu() if place in at else one for place, one in enumerate(args)), **kwargs)

    _define(name, signature, brought, func)
    found: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def _define(name: str, signature: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define an operator whose arguments keep their recorded layout, as libraries' kernels need it."""
    _library.define(signature, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_library)
