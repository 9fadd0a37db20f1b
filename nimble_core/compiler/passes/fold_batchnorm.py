"""Batch normalisation in evaluation mode: a scale and shift, and then part of a convolution's weights.

With fixed statistics, normalisation scales and shifts each channel. A compiler does that while it stores what follows,
in float32, with the weights as they are. A library wants it inside the convolution: scaled weights and a bias do the
same, rounded once more. Both are computed in float64 from the live weights.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import add_call, arguments_of, drop_unused, movable, pinned

__all__ = [
    "affine",
    "affine_norms",
    "fold_affine",
    "folded_into",
    "narrowed",
    "norm_scale",
    "norm_shift",
    "scaled_weight",
    "shift_as",
]

_aten = torch.ops.aten
_NORMS = {_aten.cudnn_batch_norm.default, _aten.native_batch_norm.default}


def norm_scale(gamma: torch.Tensor | None, variance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what a normalisation multiplies each channel by, ``[C]`` in float64."""
    scale = (variance.double() + eps).rsqrt()
    return scale if gamma is None else scale * gamma.double()


def norm_shift(
    bias: torch.Tensor | None, beta: torch.Tensor | None, mean: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return what it then adds, ``[C]`` in float64; ``bias`` is the convolution's own."""
    shift = ((bias.double() if bias is not None else 0.0) - mean.double()) * scale
    return shift if beta is None else shift + beta.double()


def narrowed(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Convert ``vector`` to the type in which tensors like ``like`` are scaled: float32 at least."""
    return vector.to(torch.promote_types(like.dtype, torch.float32))


def scaled_weight(weight: torch.Tensor, scale: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Scale each output channel of a convolution's weight; strides and type stay as given."""
    shape = [1] * weight.dim()
    shape[1 if transposed else 0] = -1
    return torch.empty_like(weight).copy_(weight.double() * scale.double().view(shape))


def shift_as(shift: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convert a shift to a convolution's bias, of the type of its weight."""
    return shift.to(weight.dtype)


def affine(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Compute ``x * scale + shift`` by channel, in their type, and return it in the type of ``x``."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x.to(scale.dtype) * scale.view(shape) + shift.view(shape)).to(x.dtype)


def affine_norms(module: fx.GraphModule) -> int:
    """Make batch norms that alone read a convolution's result scales and shifts, and return how many.

    Weights and statistics have to be given tensors that nobody writes. The convolution's bias becomes part of it.
    """
    norms = [node for node in module.graph.nodes if node.target in _NORMS and not pinned(node)]
    count = sum(_separate(module.graph, norm) for norm in norms)
    drop_unused(module)
    return count


def _separate(graph: fx.Graph, norm: fx.Node) -> bool:
    """Put a scale and a shift in the place of a norm; False if it has to stay."""
    given = arguments_of(norm)
    convolution = given["input"]
    if given["training"] or convolution.target is not _aten.convolution.default:
        return False
    if len(convolution.users) > 1 or not movable(convolution):
        return False
    read = [user for user in norm.users if user.users]
    if [user.args[1] for user in read if user.target is operator.getitem] != [0]:
        return False
    parts = arguments_of(convolution)
    if parts["transposed"] and parts["groups"] > 1:
        return False
    weight, mean, variance = required = [parts["weight"], given["running_mean"], given["running_var"]]
    bias, gamma, beta = optional = [parts["bias"], given["weight"], given["bias"]]
    constants = [*required, *(one for one in optional if one is not None)]
    if any(one is None or one.op != "get_attr" or pinned(one) for one in constants):
        return False
    with graph.inserting_before(norm):
        scale = graph.call_function(norm_scale, (gamma, variance, given.get("eps", given.get("epsilon"))))
        shift = graph.call_function(norm_shift, (bias, beta, mean, scale))
        plain_args = (*convolution.args[:2], None, *convolution.args[3:])
        plain = add_call(graph, convolution.target, plain_args, (convolution,))
        vectors = [graph.call_function(narrowed, (one, weight)) for one in (scale, shift)]
        done = add_call(graph, affine, (plain, *vectors), (norm, read[0]))
    read[0].replace_all_uses_with(done)
    return True


def fold_affine(module: fx.GraphModule) -> int:
    """Move scales and shifts that alone read a convolution into its weights, and return how many."""
    count = 0
    for node in list(module.graph.nodes):
        convolution = node.args[0] if node.target is affine else None
        if not isinstance(convolution, fx.Node) or len(convolution.users) > 1:
            continue
        if convolution.target is not _aten.convolution.default or convolution.args[2] is not None:
            continue
        with module.graph.inserting_before(node):
            weight, bias = folded_into(module.graph, convolution.args[1], node, arguments_of(convolution)["transposed"])
            args = (convolution.args[0], weight, bias, *convolution.args[3:])
            folded = add_call(module.graph, convolution.target, args, (convolution, node))
        node.replace_all_uses_with(folded)
        count += 1
    drop_unused(module)
    return count


def folded_into(graph: fx.Graph, weight: Any, node: fx.Node, transposed: bool = False) -> tuple[fx.Node, fx.Node]:
    """Add a weight and a bias that do what ``node``, a scale and shift, does after a convolution."""
    scale, shift = node.args[1:3]
    scaled = graph.call_function(scaled_weight, (weight, scale, transposed))
    return scaled, graph.call_function(shift_as, (shift, weight))
