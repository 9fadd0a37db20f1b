"""Autograd: its engine, its nodes, version counters, and the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import forward_ad

from nimble_core.torch_compat.private import ENTRIES, function, private

if TYPE_CHECKING:
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
else:
    preserve_version_counter = private(
        "torch.autograd.grad_mode:_unsafe_preserve_version_counter",
        "put values back without a backward that saved them being refused",
    ).require()

__all__ = [
    "KNOWN_WHETHER_KEPT",
    "batched_or_wrapped",
    "current_node",
    "forward_ad_level",
    "graph_is_kept",
    "preserve_version_counter",
    "profiler_enabled",
    "queue_callback",
    "sequence_number",
    "set_grad_enabled",
    "set_stale_capture_stream",
    "set_version_counter",
    "stale_capture_stream",
    "transforms_active",
    "will_execute",
    "wrapped",
]

set_grad_enabled: Callable[[bool], None] = function(
    "torch._C:_set_grad_enabled",
    "switch gradients in C, which an interrupt cannot leave half done",
    "torch.set_grad_enabled, which is Python: slower, and an interrupt may leave it switched",
    fallback=torch.set_grad_enabled,
)
sequence_number: Callable[[], int] = function(
    "torch._C:_autograd._get_sequence_nr",
    "know which nodes of autograd's graph an operator made",
    "calls of a backward have no source line",
    fallback=lambda: 0,
)
current_node: Callable[[], Any] = function(
    "torch._C:_current_autograd_node",
    "know which node a call of a backward belongs to",
    "calls of a backward have the source line of the call before them",
    fallback=lambda: None,
)
set_version_counter: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = function(
    "torch._C:_autograd._unsafe_set_version_counter",
    "leave version counters as they were after a preparation",
    "autograd refuses a backward whose forward ran before the preparation",
    fallback=lambda tensors, versions: None,
)
profiler_enabled: Callable[[], bool] = function(
    "torch._C:_autograd._profiler_enabled",
    "leave CUPTI to a profiler that runs on this thread",
    "only profilers that torch.autograd.profiler knows of are noticed",
    fallback=lambda: False,
)
will_execute: Callable[[Any], bool] = function(
    "torch._C:_will_engine_execute_node", "tell backward() from a search for some gradients"
)
_KEPT = "torch._C:_autograd._get_current_graph_task_keep_graph"
graph_is_kept: Callable[[], bool] = function(
    _KEPT,
    "know whether another backward may follow (retain_graph=True)",
    "a backward's memory is never lent its forward's: it takes more",
    fallback=lambda: False,
)
KNOWN_WHETHER_KEPT = ENTRIES[_KEPT].find() is not None
"""Whether ``graph_is_kept`` knows."""

set_stale_capture_stream: Callable[[bool], None] | None = private(
    "torch._C:_set_override_stale_capture_stream",
    "capture a backward while older graphs are kept",
    "such a capture is refused; the error says to let go of old losses",
    since="2.13",
).find()
stale_capture_stream: Callable[[], bool] = function(
    "torch._C:_override_stale_capture_stream",
    "put that setting back",
    "such a capture is refused; the error says to let go of old losses",
    fallback=lambda: False,
    since="2.13",
)

_ENGINE = private("torch.autograd:Variable._execution_engine", "run something when a backward ends")


def queue_callback(do: Callable[[], None]) -> None:
    """Call ``do`` when the backward that runs on this thread ends. Raises DeviceError if torch cannot."""
    _ENGINE.require().queue_callback(do)


_TRANSFORMS = "refuse calls inside of torch.func's transforms, which a replay cannot follow"
_innermost: Callable[[], Any] = function("torch._C:_functorch.peek_interpreter_stack", _TRANSFORMS)
transforms_active: Callable[[], bool] = function(
    "torch._C:_are_functorch_transforms_active",
    _TRANSFORMS,
    "the innermost transform is asked for, which takes longer",
    fallback=lambda: _innermost() is not None,
)
_WRAPPERS: tuple[Callable[[torch.Tensor], bool], ...] = (
    function(
        "torch._C:_functorch.is_functorch_wrapped_tensor",
        "notice tensors of torch.func's transforms",
        "every tensor under a transform counts as one of its",
        fallback=lambda tensor: transforms_active(),
    ),
    function(
        "torch._C:_functorch.is_legacy_batchedtensor",
        "notice batches of gradients (is_grads_batched=True)",
        "batches of gradients end in an error of torch's",
        fallback=lambda tensor: False,
    ),
)
wrapped: Callable[[torch.Tensor], bool] = _WRAPPERS[0]


def batched_or_wrapped(tensor: torch.Tensor) -> bool:
    """Whether this stands for several tensors: a transform's, or a batch of gradients."""
    return any(asked(tensor) for asked in _WRAPPERS)


private(
    "torch.autograd.forward_ad:_current_level",
    "refuse calls under forward-mode AD, which a replay cannot follow",
    "each call looks at all inputs for tangents, which takes longer",
)
_forward_ad = vars(forward_ad)


forward_ad_level = cast("Callable[[], int]", partial(_forward_ad.get, "_current_level", 0))
"""How deep forward-mode AD is nested now; -1 outside of it, 0 where this torch does not say."""
