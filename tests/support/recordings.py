"""Recordings of a model, and their re-issue in any order that the hazards allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from nimble_core.ir.call_graph import CallGraph, successors
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.signature import Signature

CAPTURING = torch.cuda.is_current_stream_capturing


def recorded(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
    return record(model, Signature(args, kwargs), args=args, kwargs=kwargs)


def any_order(graph: CallGraph, rng: random.Random) -> list[int]:
    """One topological order of the hazards, drawn at random."""
    after = successors(graph, meg=True)
    waiting = [0] * graph.size
    for targets in after:
        for call in targets:
            waiting[call] += 1
    ready = [call for call in range(graph.size) if not waiting[call]]
    order = []
    while ready:
        call = ready.pop(rng.randrange(len(ready)))
        order.append(call)
        for target in after[call]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return order


def reissued(recording: Recording, inputs: Sequence[torch.Tensor], order: Sequence[int] | None = None) -> list[Any]:
    issuer = Issuer(recording, inputs)
    with issuing("cpu"):
        for call in range(len(recording.program.calls)) if order is None else order:
            issuer.issue(call)
        return issuer.outputs()


def owned(model: Callable[..., Any]) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Equal to the last bit, NaN included."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride() and torch.equal(bits(x), bits(y))
        for x, y in zip(a, b, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def assert_clean() -> None:
    assert torch.cuda.is_current_stream_capturing is CAPTURING
    assert _get_current_dispatch_mode() is None
    assert torch.is_grad_enabled()
