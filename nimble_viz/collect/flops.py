"""Count the floating-point operations of calls from a recording's shapes, without running anything.

Products, convolutions and attention are counted by the formulas of ``torch.utils.flop_counter``, and by the same
arithmetic where it has none. For everything else the order of magnitude matters: one operation for each element written
or reduced, a few for norms and softmax, none for what only moves data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.program import Program
from nimble_core.tracing.recording import Recording, Step, fill, flat_tensors
from nimble_viz.report.data import Work

__all__ = ["call_flops", "count_work", "shared_flops"]

_MOVES = frozenset([
    "_assert_async", "_copy_from", "_foreach_copy", "_foreach_zero", "_to_copy", "_unsafe_index",
    "_unsafe_index_put", "_unsafe_masked_index", "arange", "bernoulli", "cat", "clone", "constant_pad_nd", "copy",
    "embedding", "embedding_dense_backward", "empty", "expand", "eye", "fill", "flip", "full", "full_like",
    "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "lift_fresh_copy",
    "masked_fill", "masked_scatter", "masked_select", "native_dropout", "nonzero", "normal", "one_hot", "ones",
    "ones_like", "pixel_shuffle", "pixel_unshuffle", "rand", "rand_like", "randint", "randn", "randn_like",
    "random", "reflection_pad1d", "reflection_pad2d", "repeat", "replication_pad1d", "replication_pad2d", "roll",
    "scalar_tensor", "scatter", "select_backward", "select_scatter", "slice_backward", "slice_scatter",
    "split_with_sizes_copy", "stack", "tril", "triu", "unfold_backward", "uniform", "zero", "zeros", "zeros_like",
])  # fmt: skip
"""Operators that move, make up or draw numbers."""

_PER_ELEMENT = {
    **dict.fromkeys(_MOVES, 0),
    **dict.fromkeys(("all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "norm", "prod", "std"), 1),
    **dict.fromkeys(("std_mean", "sum", "var", "var_mean"), 1),
    **dict.fromkeys(("_softmax", "_log_softmax"), 5),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 4),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm"), 4),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), 7),
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), 7),
    **dict.fromkeys(("_fused_rms_norm", "_fused_rms_norm_backward"), 5),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), 12),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"), 12),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"), 1),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "cumsum", "cumprod"), 1),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), 1),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "mse_loss", "_foreach_norm", "linalg_vector_norm"), 2),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d"), 8),
    **dict.fromkeys(("_fused_sgd", "_fused_adagrad"), 4),
    **dict.fromkeys(("_fused_adam", "_fused_adamw"), 12),
}
"""Operations for each element of the largest tensor, counted as written out; a root counts as one."""

_Formula = Callable[[Sequence[Any], Any], int]


def _product(args: Sequence[Any], out: Any) -> int:
    matrix = next(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 2)
    return 2 * matrix.numel()


def _convolution(args: Sequence[Any], out: Any) -> int:
    return int(flop_counter.conv_flop_count(list(args[0].shape), list(args[1].shape), list(out.shape)))


def _attention(args: Sequence[Any], out: Any) -> int:
    return int(flop_counter.sdpa_flop_count(*(arg.shape for arg in args[:3])))


_FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(("mv", "addmv"), _product),
    **dict.fromkeys(("dot", "vdot"), lambda args, out: 2 * int(args[0].numel())),
    # torch reads the flag "benchmark" of these as "transposed".
    **dict.fromkeys(("cudnn_convolution", "cudnn_convolution_relu", "cudnn_convolution_add_relu"), _convolution),
    **dict.fromkeys(("_convolution_pointwise", "_convolution_pointwise_", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(
        ("_linear_pointwise", "linear", "mkldnn_linear"),
        lambda args, out: 2 * int(args[0].numel()) * int(args[1].shape[0]),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
}


def count_work(recording: Recording, eager: Recording | None, processors: Multiprocessors | None) -> Work:
    """Count FLOPs of the calls of ``recording``, and of those of ``eager`` where it stands for them."""
    own = call_flops(recording)
    if eager is None:
        return Work(tuple(count for count, _ in own), (), processors)
    of_eager = tuple(count for count, _ in call_flops(eager))
    return Work(shared_flops(recording.program, own, of_eager), of_eager, processors)


def call_flops(recording: Recording) -> tuple[tuple[int | None, bool], ...]:
    """Count FLOPs of each call, None if not known, and say whether a formula for products did."""
    if not recording.refs:
        return ((None, False),) * len(recording.program.calls)
    made: dict[tuple[int, ...], torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}
    for slot, ref in enumerate(recording.refs):
        if ref.sizes not in made:
            made[ref.sizes] = torch.empty(ref.sizes, device="meta")
        tensors[slot] = made[ref.sizes]
    return tuple(_flops(step, tensors) for step in recording.steps if step.call is not None)


def shared_flops(
    program: Program, own: Sequence[tuple[int | None, bool]], eager: Sequence[int | None]
) -> tuple[int | None, ...]:
    """Count FLOPs of calls that stand for eager calls; ``own`` also says whether a call's are a product's.

    A call whose operator is known does what that operator does. Any other does what the eager calls that it stands for
    do, except products that a call of the first kind does for them. Kernels that stand for the same eager call share
    its operations equally.
    """
    done = {one for call, (_, product) in zip(program.calls, own, strict=True) if product for one in call.eager}
    sharers: dict[int, int] = {}
    for call, (count, _) in zip(program.calls, own, strict=True):
        if count is None:
            for one in call.eager:
                sharers[one] = sharers.get(one, 0) + 1

    def taken_over(indices: Sequence[int]) -> int | None:
        counts = [eager[one] for one in indices if one not in done]
        known = [count // sharers[one] for one in indices if one not in done and (count := eager[one]) is not None]
        return sum(known) if len(known) == len(counts) and indices else None

    return tuple(
        count if count is not None else taken_over(call.eager)
        for call, (count, _) in zip(program.calls, own, strict=True)
    )


def _flops(step: Step, tensors: Mapping[int, torch.Tensor]) -> tuple[int | None, bool]:
    packet = getattr(step.func, "overloadpacket", None)
    if packet is None:
        return None, False
    args = [fill(arg, tensors) for arg in step.args]
    kwargs = {name: fill(value, tensors) for name, value in step.kwargs}
    outputs = [tensors[slot] for slot in step.outputs if slot >= 0] or flat_tensors([*args, kwargs.get("out")])[:1]
    name = packet.__name__.removesuffix("_") if packet.__name__ not in _FORMULAS else packet.__name__
    out = outputs[0] if len(outputs) == 1 else tuple(outputs)
    if name in _FORMULAS or packet in flop_counter.flop_registry:
        try:
            if name in _FORMULAS:
                return _FORMULAS[name](args, outputs[0]), True
            return int(flop_counter.flop_registry[packet](*args, **kwargs, out_val=out)), True
        except (AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError):
            return None, False  # called in a way that the formula does not know: a nested tensor, say
    touched = [*outputs, *flat_tensors([*args, *kwargs.values()])]
    largest = max((prod(tensor.shape) for tensor in touched), default=0)
    tags = getattr(step.func, "tags", ())
    if name in _PER_ELEMENT:
        each = flat_tensors(args[0]) if name.startswith(("_fused_", "_foreach_")) and args else []
        return _PER_ELEMENT[name] * (sum(tensor.numel() for tensor in each) or largest), False
    if name.startswith("_foreach_"):
        return sum(tensor.numel() for tensor in flat_tensors(args[0])), False
    if torch.Tag.pointwise in tags:
        return max((tensor.numel() for tensor in outputs), default=0), False
    return None, False
