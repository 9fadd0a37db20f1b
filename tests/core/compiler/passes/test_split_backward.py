"""Gradients split into calls of their own are the same gradients, and nothing waits for a weight's any more."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.split_backward import split_backward
from nimble_core.compiler.rerecord import tracked
from nimble_core.compiler.to_fx import CALL_PREFIX, calls_of, drop_unused, lift, movable, pinned, reference_of
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import TensorRef
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.recording import Rewritten
from tests.support.rewrite_models import (
    claimed,
    lifted,
    recorded,
    strides_that_matter,
    targets,
    unchanged_by,
)

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


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mix(x.flatten(2)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long())  # type: ignore[no-any-return]


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


def test_memory_that_is_written_later_stays_marked() -> None:
    _, module = lifted(Backward(small(), update=True), torch.randn(2, 3, 8, 8).double())
    assert all(pinned(node) for node in nodes_of(module, CONVOLUTION))
    split_backward(module)
    items = nodes_of(module, operator.getitem)
    for node in nodes_of(module, CONVOLUTION, LAYER_NORM):
        of_weights = node.args[-1][0] is False
        assert pinned(node) == of_weights
        assert [pinned(item) for item in items if item.args[0] is node] == [of_weights] * len(node.users)
    totals = [node for node in nodes_of(module, aten.sum.dim_IntList) if not node.name.startswith(CALL_PREFIX)]
    assert len(totals) == 3
    assert all(pinned(total) and not movable(total) for total in totals)


@pytest.mark.parametrize(
    ("model", "shape", "operators"),
    [
        (nn.BatchNorm2d(4), (2, 4, 3, 3), ["native_batch_norm_backward"]),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)), (2, 4), []),
        (nn.Bilinear(4, 4, 3), (2, 4), []),
        (nn.Sequential(nn.Conv1d(4, 4, 1, bias=False), nn.GroupNorm(2, 4)), (2, 4, 3), ["native_group_norm_backward"]),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU()), (2, 4), ["_prelu_kernel_backward"]),
        (Lookup(), (2, 4), ["embedding_dense_backward"]),
        (Attention(), (2, 3, 8), ["_scaled_dot_product_flash_attention_for_cpu_backward"]),
        (nn.RMSNorm(4), (2, 4), []),  # on the host; one call on CUDA
    ],
)
def test_what_is_left_whole(model: nn.Module, shape: Sequence[int], operators: list[str]) -> None:
    if isinstance(model, nn.Bilinear):
        model.forward = lambda x: nn.Bilinear.forward(model, x, x)  # type: ignore[method-assign]
    one = recorded(Backward(model), torch.randn(*shape).double())
    before = targets(lift(one.recording))

    def rewrite(module: fx.GraphModule) -> None:
        assert split_backward(module) == 0

    module = unchanged_by(rewrite, one, 1e-12)
    assert targets(module) == before
    left = [name for name in before if name.removesuffix(".default").endswith("_backward")]
    together = [name for name in left if name != "aten.convolution_backward.default"]
    assert together == [f"aten.{name}.default" for name in operators]


def test_the_layer_before_waits_for_the_inputs_gradient_alone() -> None:
    one, module = lifted(Backward(small()), torch.randn(2, 3, 8, 8).double())
    split_backward(module)
    run, provenance = tracked(module, one.recording.program)
    recording = HostDevice().record(one.model, one.signature, (), {}, Rewritten("library", run, provenance))
    program = recording.program
    graph = build_graph(program).to_networkx(program)
    parts: dict[int, list[Any]] = {}
    for call in program.calls:
        if call.eager and one.recording.program.calls[call.eager[0]].operator == str(CONVOLUTION):
            parts.setdefault(call.eager[0], []).append(call)
    masks = [[dict(call.arguments).get("output_mask", "sum") for call in calls] for calls in parts.values()]
    first, second, third = "[True, False, False]", "[False, True, False]", "sum"
    assert masks == [[first, second, third], [first, second], [first, second, third], [second, third]]
    for calls, kinds in zip(parts.values(), masks, strict=True):
        for call, kind in zip(calls, kinds, strict=True):
            assert bool(networkx.descendants(graph, call.index)) == (kind == first)
        assert calls[0].origins == one.recording.program.calls[calls[0].eager[0]].origins


# -- graphs that others made ------------------------------------------------------------------------------------------


def rms_norm(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    _, scale = aten._fused_rms_norm(x, [6], weight, 1e-5)
    return aten._fused_rms_norm_backward(gradient, x, [6], scale, weight, [True, True])


def test_rms_norms_by_shape() -> None:
    tensors = [torch.empty(*shape, device="meta") for shape in [(3, 4, 6), (3, 4, 6), (6,)]]
    module = traced(rms_norm, *tensors)
    wanted = module(*tensors)
    assert split_backward(module) == 1
    module.graph.lint()
    module.recompile()
    masks = [node.args[-1] for node in nodes_of(module, aten._fused_rms_norm_backward.default)]
    assert masks == [[True, False], [False, True]]
    made = module(*tensors)
    assert [one.shape for one in made] == [one.shape for one in wanted]
    assert strides_that_matter(made) == strides_that_matter(wanted)
    assert split_backward(module) == 0


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
