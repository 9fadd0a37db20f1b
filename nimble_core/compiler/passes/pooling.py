"""Pooling in the layout in which it is fast: torch's own pools of channels-last tensors can take many times as long.

Changing the layout there and back costs two copies; whether that pays is measured for each distinct pool.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.channels_last import writes_through_views
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.to_fx import drop_unused, pinned, reference_of, use_calls

__all__ = ["choose_pools"]

_aten = torch.ops.aten
_POOLS = {_aten.max_pool2d_with_indices.default, _aten.avg_pool2d.default}


def choose_pools(module: fx.GraphModule, device: torch.device, decisions: Decisions) -> int:
    """Let pools of channels-last tensors run contiguous where that is faster; how many do then.

    Their results are channels last, whatever they read; where memory is written through views, all pools stay.
    """
    if writes_through_views(module):
        return 0
    chosen: dict[Any, bool] = {}
    count = 0
    for node in list(module.graph.nodes):
        if node.target not in _POOLS or pinned(node):
            continue
        source = reference_of(node.args[0])
        results = [user for user in node.users if user.target is operator.getitem]
        if source is None or len(source.sizes) != 4 or any(user.args[1] for user in results):
            continue
        key = (node.target, source.sizes, source.dtype, str(node.args[1:]), str(node.kwargs))
        timer = decisions.timer
        if key not in chosen and timer is None:
            chosen[key] = False
        elif key not in chosen and timer is not None:
            x = torch.empty(source.sizes, dtype=getattr(torch, source.dtype), device=device).uniform_(-1, 1)
            x = x.to(memory_format=torch.channels_last)
            ways = [partial(node.target, x, *node.args[1:], **node.kwargs)]
            ways.append(partial(_contiguous, node.target, x, *node.args[1:], **node.kwargs))
            as_is, turned = timer(ways)
            chosen[key] = as_is is not None and turned is not None and turned < as_is
        if decisions.take(node, "contiguous pool", wanted=chosen[key]):
            with module.graph.inserting_before(node):
                made = module.graph.call_function(_contiguous, (node.target, *node.args), dict(node.kwargs))
            use_calls(made, node)
            made.meta["ref"] = reference_of(results[0] if results else node)
            for one in results or [node]:
                one.replace_all_uses_with(made)
            count += 1
    drop_unused(module)
    return count


def _contiguous(pool: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``pool`` on a contiguous copy, its result in channels last."""
    made = pool(x.contiguous(), *args, **kwargs)
    return (made if isinstance(made, torch.Tensor) else made[0]).contiguous(memory_format=torch.channels_last)
