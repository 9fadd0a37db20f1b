"""What Inductor takes apart for ``torch.compile``, but not by the names that eager's calls have.

Eager calls some operators whole that Dynamo never sees: ``torch.nn`` takes its own fast path for attention in
evaluation, and autograd hands interpolation on by another name. Inductor would run eager's kernels for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nimble_core.torch_compat.compiler import DECOMPOSED, DECOMPOSITIONS

__all__ = ["taken_apart"]

_aten = torch.ops.aten
_INTERPOLATIONS = (
    _aten.upsample_bilinear2d.default,
    _aten.upsample_bicubic2d.default,
    _aten.upsample_trilinear3d.default,
)
"""Eager's kernels for these took half of a SegFormer's time."""
_OF_KEYS = 1
"""The type of a mask ``[batch, keys]``; others can be broadcast to ``[batch, heads, queries, keys]``."""


@contextmanager
def taken_apart() -> Iterator[None]:
    """Let Inductor compile them inside."""
    table, find = DECOMPOSITIONS.find(), DECOMPOSED.find()
    if table is None or find is None:
        yield
        return
    added = {op: how for op, how in {**find(_INTERPOLATIONS), **_ATTENTIONS}.items() if op not in table}
    table.update(added)
    try:
        yield
    finally:
        for op in added:
            del table[op]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """``aten::_native_multi_head_attention`` of batches first, with a mask of what is not looked at."""
    if query.is_nested:
        return NotImplemented
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        projected = tuple(F.linear(one, weight, bias) for one, weight, bias in parts)
    queries, keys, values = (one.unflatten(-1, (num_head, -1)).transpose(1, 2) for one in projected)
    hides = None if mask is None else mask.to(torch.bool)
    if hides is not None and mask_type == _OF_KEYS:
        hides = hides[:, None, None, :]
    weights: Tensor | None = None
    if need_weights:
        # In this form Inductor finds an attention, where nobody reads the weights.
        scores = (queries @ keys.transpose(-2, -1)).div(math.sqrt(queries.shape[-1]))
        weights = (scores if hides is None else scores.masked_fill(hides, -math.inf)).softmax(-1)
        found = weights @ values
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        looks = None if hides is None else hides.logical_not()
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=looks)
    return F.linear(found.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """``aten::_transformer_encoder_layer_fwd`` of batches first: attention, and two linear layers."""
    if src.is_nested:
        return NotImplemented

    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attention(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        found: Tensor = _attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]
        return found

    def forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    if norm_first:
        src = src + attention(first(src))
        return src + forward(second(src))
    src = first(src + attention(src))
    return second(src + forward(src))


_ATTENTIONS: Mapping[Any, Callable[..., Any]] = {
    _aten._native_multi_head_attention.default: _attention,
    _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
