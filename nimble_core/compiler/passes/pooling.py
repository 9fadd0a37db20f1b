"""Pooling in its fast layout: torch's own pools can take many times as long channels last.

Changing the layout there and back costs two copies; whether that pays is measured for each distinct pool.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.channels_last import layout_matters
from nimble_core.compiler.passes.decisions import Decisions, example
from nimble_core.compiler.to_fx import drop_unused, pinned, reference_of, use_calls
from nimble_core.ir.program import TensorRef
from nimble_core.runtime.device import Timed

__all__ = ["choose_pools"]

_aten = torch.ops.aten
_POOLS = {_aten.max_pool2d_with_indices.default, _aten.avg_pool2d.default}


def choose_pools(module: fx.GraphModule, device: torch.device, decisions: Decisions) -> int:
    """Let pools of channels-last tensors run contiguous where that is faster.

    Their results are channels last, whatever they read.

    Args:
        module: changed in place; if its results depend on the layout, all pools stay.
        device: where it runs.
        decisions: if nothing is measured, all pools stay.

    Returns:
        How many pools run contiguous.
    """
    if layout_matters(module):
        return 0
    count = 0
    for node in list(module.graph.nodes):
        if node.target not in _POOLS or pinned(node):
            continue
        source = reference_of(node.args[0])
        results = [user for user in node.users if user.target is operator.getitem]
        if source is None or len(source.sizes) != 4 or any(user.args[1] for user in results):
            continue
        key = (node.target, source.sizes, source.dtype, str(node.args[1:]), str(node.kwargs))
        wanted = decisions.second_is_faster(key, partial(_ways, node, source, device))
        if decisions.take(node, "contiguous pool", wanted=wanted):
            with module.graph.inserting_before(node):
                made = module.graph.call_function(_contiguous, (node.target, *node.args), dict(node.kwargs))
            use_calls(made, node)
            made.meta["ref"] = reference_of(results[0] if results else node)
            for one in results or [node]:
                one.replace_all_uses_with(made)
            count += 1
    drop_unused(module)
    return count


def _ways(pool: fx.Node, source: TensorRef, device: torch.device) -> list[Timed]:
    """Make calls of a pool on a channels-last example, as it is and contiguous."""
    x = example(source.sizes, getattr(torch, source.dtype), device, torch.channels_last)
    run: Any = pool.target
    return [partial(run, x, *pool.args[1:], **pool.kwargs), partial(_contiguous, run, x, *pool.args[1:], **pool.kwargs)]


def _contiguous(pool: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``pool`` on a contiguous copy, and return its first result in channels last."""
    made = pool(x.contiguous(), *args, **kwargs)
    return (made if isinstance(made, torch.Tensor) else made[0]).contiguous(memory_format=torch.channels_last)
