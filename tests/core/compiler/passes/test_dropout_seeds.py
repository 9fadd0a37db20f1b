"""Seeds of attention's dropout: backwards cut from their forward drop what it dropped, in kernels of any kind."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nimble_core import Nimble, Options
from nimble_core.compiler.passes.dropout_seeds import bring_seeds
from nimble_core.ir.program import Fuse

_aten = torch.ops.aten
_EFFICIENT = _aten._scaled_dot_product_efficient_attention_backward.default
_FLASH = _aten._scaled_dot_product_flash_attention_backward.default
_FORWARD = _aten._scaled_dot_product_efficient_attention.default


def backward(target: Any, dropout: float, *, forward: bool = False) -> fx.GraphModule:
    """Make a graph of one backward; its seeds are inputs, or of the forward ahead of it."""
    graph = fx.Graph()
    x, seed = graph.placeholder("x"), graph.placeholder("seed")
    if forward:
        made = graph.call_function(_FORWARD, (x, x, x, None, True, dropout))
        seed = graph.call_function(operator.getitem, (made, 2))
    if target is _EFFICIENT:
        given: tuple[Any, ...] = (x, x, x, x, None, x, x, seed, seed, dropout, [True, True, True, False])
    else:
        given = (x, x, x, x, x, x, None, None, 8, 8, dropout, False, seed, seed)
    graph.output((graph.call_function(target, given),))
    return fx.GraphModule(nn.Module(), graph)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if "backward" in str(node.target)]


@pytest.mark.parametrize(
    ("target", "dropout", "forward", "count"),
    [(_EFFICIENT, 0.1, False, 1), (_EFFICIENT, 0.0, False, 0), (_EFFICIENT, 0.1, True, 0), (_FLASH, 0.1, False, 0)],
    ids=["brought", "nothing dropped", "forward in the same graph", "kept on the device"],
)
def test_seeds_that_come_from_elsewhere_are_brought(target: Any, dropout: float, forward: bool, count: int) -> None:
    module = backward(target, dropout, forward=forward)
    assert bring_seeds(module) == count
    assert targets(module) == [str(target).replace("aten.", "nimble.") if count else str(target)]
    assert bring_seeds(module) == 0


class Attends(nn.Module):
    """Attention in which ``v`` is linear, between layers that make it worth compiling."""

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x.sin(), x.cos(), v, dropout_p=0.5)


_KERNELS = {
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "efficient in float16": (SDPBackend.EFFICIENT_ATTENTION, torch.float16),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.float16),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.float16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["library", "inductor"])
@pytest.mark.parametrize("kernels", _KERNELS)
def test_a_backward_of_other_kernels_drops_what_its_forward_dropped(fuse: Fuse, kernels: str) -> None:
    backend, dtype = _KERNELS[kernels]
    torch.manual_seed(0)
    x, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype) for _ in range(2))
    with sdpa_kernel(backend):
        net = Nimble(Attends(), Options(fuse=fuse)).prepare(x, v.requires_grad_(), training=True)
    behind = net.engines[0].backward
    assert behind is not None
    halves = (net.engines[0].recorded, behind.tuned.recorded)
    assert [one.recording.program.fuse for one in halves] == [fuse, fuse], net.engines[0].notes
    seen = []
    for _ in range(3):
        v.grad = None
        out = net(x, v)
        out.double().sum().backward()
        assert v.grad is not None
        seen.append(v.grad)
        torch.testing.assert_close((v.grad.double() * v).sum(), out.double().sum(), rtol=2e-2, atol=0.5)
    assert not torch.equal(seen[0], seen[1]), "each step drops something else"
    net.close()
