"""Batch normalisation in evaluation mode, as a scale and a shift of the convolution before it; then into its weights.

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
_NORMS = {
    _aten.cudnn_batch_norm.default: ("input", "training", "epsilon"),
    _aten.native_batch_norm.default: ("input", "training", "eps"),
    _aten._native_batch_norm_legit.default: ("input", "training", "eps"),
    _aten._native_batch_norm_legit_no_training.default: ("input", "", "eps"),
    _aten._batch_norm_no_update.default: ("input", "", "eps"),
}
"""Operator → names of its input, of its training flag and of its epsilon."""


def norm_scale(gamma: torch.Tensor | None, variance: torch.Tensor, eps: float) -> torch.Tensor:
    """What a normalisation multiplies each channel by, ``[C]`` in float64."""
    scale = (variance.double() + eps).rsqrt()
    return scale if gamma is None else scale * gamma.double()


def norm_shift(
    bias: torch.Tensor | None, beta: torch.Tensor | None, mean: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """What it then adds, ``[C]`` in float64; ``bias`` is the convolution's own."""
    shift = ((bias.double() if bias is not None else 0.0) - mean.double()) * scale
    return shift if beta is None else shift + beta.double()


def narrowed(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``vector`` in the type in which tensors like ``like`` are scaled: float32 at least."""
    return vector.to(torch.promote_types(like.dtype, torch.float32))


def scaled_weight(weight: torch.Tensor, scale: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Weights of a convolution that also scales each output channel; strides and type as given."""
    shape = [1] * weight.dim()
    shape[1 if transposed else 0] = -1
    return torch.empty_like(weight).copy_(weight.double() * scale.double().view(shape))


def shift_as(shift: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A shift as a convolution's bias, in the type of its weight."""
    return shift.to(weight.dtype)


def affine(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """``x * scale + shift`` by channel, computed in the type of scale and shift, in the type of ``x``."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x.to(scale.dtype) * scale.view(shape) + shift.view(shape)).to(x.dtype)


def affine_norms(module: fx.GraphModule) -> int:
    """Make every batch normalisation that alone reads a convolution's result a scale and a shift; how many.

    Weights and statistics have to be given tensors that nobody writes. The convolution's bias becomes part of it.
    """
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _NORMS and not pinned(node) and _separated(module.graph, node):
            count += 1
    drop_unused(module)
    return count


def _separated(graph: fx.Graph, norm: fx.Node) -> bool:
    source, training, epsilon = _NORMS[norm.target]  # type: ignore[index]
    given = arguments_of(norm)
    convolution = given[source]
    if training and given[training]:
        return False
    if not isinstance(convolution, fx.Node) or convolution.target is not _aten.convolution.default:
        return False
    if len(convolution.users) > 1 or not movable(convolution):
        return False
    results = [user for user in norm.users if user.target is operator.getitem]
    if len(results) != len(norm.users) or any(user.args[1] != 0 and user.users for user in results):
        return False
    parts = arguments_of(convolution)
    constants = [parts["weight"], parts["bias"], given["weight"], given["bias"]]
    constants += [given["running_mean"], given["running_var"]]
    if any(one is not None and (one.op != "get_attr" or pinned(one)) for one in constants):
        return False
    if given["running_mean"] is None or given["running_var"] is None or (parts["transposed"] and parts["groups"] > 1):
        return False
    weight, bias, gamma, beta, mean, variance = constants
    with graph.inserting_before(norm):
        scale = graph.call_function(norm_scale, (gamma, variance, given[epsilon]))
        shift = graph.call_function(norm_shift, (bias, beta, mean, scale))
        plain_args = (*convolution.args[:2], None, *convolution.args[3:])
        plain = add_call(graph, convolution.target, plain_args, (convolution,))
        vectors = [graph.call_function(narrowed, (one, weight)) for one in (scale, shift)]
        result = next((user for user in results if user.args[1] == 0), norm)
        done = add_call(graph, affine, (plain, *vectors), (norm, result))
    for user in results:
        if user.args[1] == 0:
            user.replace_all_uses_with(done)
    return True


def fold_affine(module: fx.GraphModule) -> int:
    """Move every scale and shift that alone reads a convolution's result into its weights; how many."""
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
    """Nodes of the weight and the bias that do what ``node``, a scale and shift, does after a convolution."""
    scale, shift = node.args[1:3]
    scaled = graph.call_function(scaled_weight, (weight, scale, transposed))
    return scaled, graph.call_function(shift_as, (shift, weight))
