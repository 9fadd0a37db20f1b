"""Gradients split into calls of their own are the same gradients, and nothing waits for a weight's any more."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.split_backward import split_backward
from nimble_core.compiler.to_fx import calls_of, drop_unused, lift, reference_of
from nimble_core.ir.program import TensorRef
from tests.support.rewrite_models import claimed, recorded, strides_that_matter, unchanged_by

aten = torch.ops.aten
CONVOLUTION = aten.convolution_backward.default
LAYER_NORM = aten.native_layer_norm_backward.default
BIAS_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from(list(BIAS_TOLERANCE))


def nodes_of(module: fx.GraphModule, *wanted: Any) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in wanted]


def is_sound(module: fx.GraphModule) -> None:
    """Every result that is read was asked for, and every one that was asked for is read."""
    module.graph.lint()
    for node in nodes_of(module, CONVOLUTION, LAYER_NORM):
        mask = node.args[-1]
        assert {user.args[1] for user in node.users} == {place for place, one in enumerate(mask) if one}


def traced(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.GraphModule:
    """Trace with ``make_fx``, and note on every node what ``lift`` notes."""
    module = make_fx(function)(*tensors)

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            if n.op == "call_function":
                n.meta["eager"] = calls_of(n.args[0]) if n.target is operator.getitem else (len(n.graph.nodes),)
            if isinstance(made, torch.Tensor):
                dtype = str(made.dtype).removeprefix("torch.")
                n.meta["ref"] = TensorRef(0, 0, tuple(made.shape), made.stride(), dtype, made.element_size())
            return made

    Noting(module).run(*tensors)
    drop_unused(module)
    return module


# -- any convolution -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A backward: shapes of input and weight, whether they are channels last, and which of its results are read."""

    sizes: list[int]
    kernel: list[int]
    dtype: torch.dtype
    last: tuple[bool, bool]
    expanded: bool
    parameters: tuple[Any, ...]
    mask: list[bool]
    read: list[int]

    def tensors(self) -> list[torch.Tensor]:
        """Gradient of the output, input, weight."""
        torch.manual_seed(0)
        x, weight = (torch.randn(*shape, dtype=self.dtype) for shape in (self.sizes, self.kernel))
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
        x, weight = (
            one.to(memory_format=layout) if last else one for one, last in zip((x, weight), self.last, strict=True)
        )
        gradient = torch.randn_like(aten.convolution(x, weight, None, *self.parameters))
        return [gradient[:1, :1].expand_as(gradient) if self.expanded else gradient, x, weight]

    def __call__(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        found = CONVOLUTION(gradient, x, weight, [gradient.shape[1]], *self.parameters, self.mask)
        return [found[place] for place in self.read]


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    dims, groups, transposed = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4])), draw(st.booleans())
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    stride, dilation = ([draw(st.integers(1, 2)) for _ in range(dims)] for _ in range(2))
    padding = [draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True)]
    beyond = [draw(st.integers(0, max(s, d) - 1)) * transposed for s, d in zip(stride, dilation, strict=True)]
    mask = draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any))
    return Convolution(
        sizes=[draw(st.integers(1, 3)), into, *(draw(st.integers(5, 7)) for _ in range(dims))],
        kernel=[*((into, out // groups) if transposed else (out, into // groups)), *kernel],
        dtype=draw(DTYPES),
        last=draw(st.tuples(st.booleans(), st.booleans())),
        expanded=draw(st.booleans()),
        parameters=(stride, padding, dilation, transposed, beyond, groups),
        mask=mask,
        read=sorted(draw(st.sets(st.sampled_from([at for at, one in enumerate(mask) if one]), min_size=1))),
    )


@settings(max_examples=150)
@given(convolutions())
def test_any_convolution(one: Convolution) -> None:
    tensors = one.tensors()
    module = traced(one, *tensors)
    items = {node.args[1]: reference_of(node) for node in nodes_of(module, operator.getitem)}
    (whole,) = nodes_of(module, CONVOLUTION)
    arguments, calls, before = str(whole.args[:-1]), calls_of(whole), str(module.graph)
    assert split_backward(module) == (len(one.read) > 1)
    assert split_backward(module) == 0
    if len(one.read) == 1:
        assert str(module.graph) == before
        return
    is_sound(module)
    module.recompile()
    made, wanted = module(*tensors), one(*tensors)
    tolerance = BIAS_TOLERANCE[one.dtype] * float(wanted[-1].abs().max())
    for place, mine, theirs in zip(one.read, made, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, rtol=0.0, atol=tolerance if place == 2 else 0.0)
    assert strides_that_matter(made) == strides_that_matter(wanted)
    parts, totals = nodes_of(module, CONVOLUTION), nodes_of(module, aten.sum.dim_IntList)
    assert [part.args[-1] for part in parts] == [[a == b for b in range(3)] for a in one.read if a < 2]
    assert all(str(part.args[:-1]) == arguments for part in parts)
    kept = nodes_of(module, operator.getitem)
    assert [calls_of(node) for node in (*parts, *totals, *kept)] == [calls] * (len(one.read) + len(parts))
    assert {node.args[1]: reference_of(node) for node in kept} == {at: ref for at, ref in items.items() if at != 2}
    assert [reference_of(total) for total in totals] == [ref for at, ref in items.items() if at == 2]


# -- layer norms -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    inner=st.integers(1, 3),
    affine=st.sampled_from([(False, False), (True, False), (True, True)]),
    dtype=DTYPES,
    frozen=st.lists(st.booleans(), min_size=3, max_size=3),
)
@example(shape=[3, 4], inner=1, affine=(True, True), dtype=torch.float32, frozen=[False, False, False])
@example(shape=[3, 4], inner=1, affine=(True, True), dtype=torch.float32, frozen=[True, False, False])
def test_any_layer_norm(
    shape: list[int], inner: int, affine: tuple[bool, bool], dtype: torch.dtype, frozen: list[bool]
) -> None:
    torch.manual_seed(0)
    normalized = shape[-min(inner, len(shape) - 1) :]
    x = torch.randn(shape, dtype=dtype)
    weight, bias = (torch.randn(normalized, dtype=dtype) if one else None for one in affine)
    mask = [not cold and one is not None for cold, one in zip(frozen, (x, weight, bias), strict=True)]

    def forward(gradient: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        _, mean, scale = aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
        found = LAYER_NORM(gradient, x, normalized, mean, scale, weight, bias, mask)
        return [one for one in found if one is not None] or [mean]

    one = recorded(forward, torch.randn_like(x), x)
    splits = mask[0] and (mask[1] or mask[2])

    def rewrite(module: fx.GraphModule) -> None:
        assert split_backward(module) == splits
        assert split_backward(module) == 0

    module = unchanged_by(rewrite, one, 0.0, strides=True)
    assert claimed(module) == claimed(lift(one.recording))
    is_sound(module)
    if splits:
        assert [node.args[-1] for node in nodes_of(module, LAYER_NORM)] == [[True, False, False], [False, *mask[1:]]]


# -- whole backwards -------------------------------------------------------------------------------------------------


class Backward(nn.Module):
    """Loss and gradients of a model; with ``update``, clipped in place and taken by the parameters."""

    def __init__(self, model: nn.Module, update: bool = False) -> None:
        super().__init__()
        self.model, self.update = model.double(), update

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        with torch.enable_grad():
            loss = self.model(x).square().sum()
            gradients = torch.autograd.grad(loss, parameters)
        if self.update:
            torch._foreach_mul_(gradients, 0.5)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.detach().sub_(gradient, alpha=0.01)
        return [loss.detach(), *gradients]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.PReLU(4),
        nn.Conv2d(4, 6, 3, bias=False), nn.Flatten(2), nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(36),
        nn.Linear(36, 5),
    )  # fmt: skip


@pytest.mark.parametrize("update", [False, True])
def test_a_whole_step(update: bool) -> None:
    one = recorded(Backward(small(), update), torch.randn(2, 3, 8, 8).double())
    before = claimed(lift(one.recording))

    def rewrite(module: fx.GraphModule) -> None:
        assert split_backward(module) == 5
        share_equal(module)

    module = unchanged_by(rewrite, one, 1e-12, strides=True)
    is_sound(module)
    assert claimed(module) == before
    # The first convolution's input needs no gradient, the third has no bias.
    assert [node.args[-1].index(True) for node in nodes_of(module, CONVOLUTION)] == [0, 1, 0, 1, 0, 1, 1]


# -- graphs that others made ------------------------------------------------------------------------------------------


def rms_norm(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    _, scale = aten._fused_rms_norm(x, [6], weight, 1e-5)
    return aten._fused_rms_norm_backward(gradient, x, [6], scale, weight, [True, True])


def layer_norm(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    _, mean, scale = aten.native_layer_norm(x, [6], weight, weight, 1e-5)
    return LAYER_NORM(gradient, x, [6], mean, scale, weight, weight, [True, True, True])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "channels last", "grouped", "depthwise", "transposed", "rms", "layer"])
def test_on_cuda(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    if kind in ("rms", "layer"):
        function = rms_norm if kind == "rms" else layer_norm
        tensors = [torch.randn(*shape, dtype=dtype, device="cuda") for shape in [(3, 4, 6), (3, 4, 6), (6,)]]
    else:
        groups = {"grouped": 2, "depthwise": 8}.get(kind, 1)
        layout = torch.channels_last if kind == "channels last" else torch.contiguous_format
        shapes = [(4, 8, 9, 9), (4, 8, 9, 9), (8, 8 // groups, 3, 3)]
        tensors = [torch.randn(*one, dtype=dtype, device="cuda").to(memory_format=layout) for one in shapes]

        def function(*given: torch.Tensor) -> Any:
            transposed = kind == "transposed"
            return CONVOLUTION(*given, [8], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, [True] * 3)

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        module = traced(function, *tensors)
        wanted = module(*tensors)
        assert split_backward(module) == 1
        module.recompile()
        made = module(*tensors)
    for mine, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, check_stride=True)
