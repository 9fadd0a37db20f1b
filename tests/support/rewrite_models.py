"""Random small models for the tests of rewrites, and what a run of one does: to its outputs, inputs and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler import pipeline
from nimble_core.compiler.passes.decisions import Timer
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.runtime.device import Timed
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorded import Recorded, record_static
from nimble_core.tracing.recording import issuing
from nimble_core.tracing.signature import Signature

HOST = torch.device("cpu")

Code = list[tuple[str, int, int, int]]

IMAGE_OPS = (
    "conv", "conv", "conv_norm", "conv_norm", "conv_norm_relu", "conv_add_relu", "norm", "transposed", "again",
    "relu", "relu_", "sigmoid", "add", "add_", "iadd", "mul_", "cat", "max_pool", "avg_pool", "slice", "slice_",
    "view_", "flat_view", "transposed_view", "chunk", "made_inside", "mean", "siblings", "count", "compare_",
    "squeeze_inside", "copy_", "fill_slice", "input_", "zero_dead", "clone",
)  # fmt: skip


class Drawn(nn.Module):
    """Runs drawn instructions over the tensors that it has so far; layers are made on the first run.

    Args:
        code: ``(operation, and three numbers that choose its operands)``.
        outputs: numbers that choose which tensors are returned.
        training: whether batch norms outside ``conv_norm`` train.
    """

    def __init__(self, code: Code, outputs: Sequence[int], *, training: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.code, self.outputs, self.dtype = code, outputs, dtype
        self.layers = nn.ModuleDict()
        self.norms_train = training
        self.register_buffer("count", torch.zeros((), dtype=dtype))
        self.scale = nn.Parameter(torch.full((1,), 1.25, dtype=dtype))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        values = [x, y]
        for place, (name, a, b, c) in enumerate(self.code):
            made = self._run(place, name, values, a, b, c)
            values += made if isinstance(made, list) else [made]
        chosen = [[*values, self.scale][-1 - one % (len(values) + 1)] for one in self.outputs]
        return {"last": values[-1], "others": chosen}

    def _layer(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in self.layers:
            layer = make().to(self.dtype).eval()
            for norm in (one for one in layer.modules() if isinstance(one, nn.BatchNorm2d)):
                for tensor, low, high in ((norm.running_mean, -1, 1), (norm.running_var, 0.5, 2)):
                    assert tensor is not None
                    tensor.uniform_(low, high)
                for vector in (norm.weight, norm.bias):
                    if vector is not None:
                        nn.init.uniform_(vector, 0.5, 1.5)
            self.layers[key] = layer
        return self.layers[key]

    def _convolution(self, key: str, x: torch.Tensor, b: int, c: int) -> torch.Tensor:
        channels, kernel = x.shape[1], 3 if b % 2 and min(x.shape[2:]) > 2 else 1
        groups = channels if b % 3 == 2 else 1
        out = channels if b % 5 < 3 else 4 * groups

        def make() -> nn.Module:
            stride, padding = (2, 1) if c % 7 == 3 else (1, kernel // 2)
            return nn.Conv2d(channels, out, kernel, stride, padding, groups=groups, bias=c % 2 == 0)

        return self._layer(key, make)(x)  # type: ignore[no-any-return]

    def _run(self, place: int, name: str, values: list[torch.Tensor], a: int, b: int, c: int) -> Any:
        images = [one for one in values if one.dim() == 4]
        x = images[-1 - a % min(3, len(images))]
        like = [one for one in images if one.shape == x.shape]
        other = like[b % len(like)]
        key = f"{place}_{x.shape[1]}"
        if name == "conv":
            return self._convolution(key, x, b, c)
        if name.startswith("conv_"):
            made = self._convolution(key, x, b, c)
            made = self._layer(f"n{key}", lambda: nn.BatchNorm2d(made.shape[1], affine=c % 3 > 0))(made)
            if name == "conv_add_relu":
                made += next((one for one in images if one.shape == made.shape), made)
            return made if name == "conv_norm" else F.relu(made, inplace=b % 2 == 0)
        if name == "norm":
            layer = self._layer(f"n{key}", lambda: nn.BatchNorm2d(x.shape[1]))
            return layer.train(self.norms_train and x.numel() > x.shape[1])(x)
        if name == "transposed":
            return self._layer(key, lambda: nn.ConvTranspose2d(x.shape[1], 3, 2, bias=c % 2 == 0))(x)
        if name == "again":  # a weight that is used twice
            made_before = [
                one for key, one in self.layers.items() if key[0].isdigit() and int(key.split("_")[0]) < place
            ]
            convolutions = [one for one in made_before if isinstance(one, nn.Conv2d) and one.in_channels == x.shape[1]]
            same = [one for one in convolutions if one.kernel_size[0] <= min(x.shape[2:])]
            return same[b % len(same)](x) if same else x + 1
        if name == "siblings":
            rows = x.mean((2, 3))
            layers = [
                self._layer(f"{key}_{n}", lambda n=n: nn.Linear(x.shape[1], 2 + n, bias=(b + n) % 2 == 0))
                for n in range(2 + c % 2)
            ]
            made = [layer(rows) for layer in layers]
            return [*made, layers[0](rows), (torch.cat(made, 1).sum() + x)]
        if name == "input_":
            values[0].mul_(0.9)
            return x * 1
        if name == "count":
            self.count += 1
            return x + self.count * 0.1
        if name == "made_inside":
            made = torch.arange(x.shape[3], dtype=x.dtype) * 0.1 + torch.ones(x.shape[3], dtype=x.dtype)
            return x + made if c % 2 else [made, x + made * self.scale]
        return SIMPLE[name](x, other, c)


def _iadd(x: torch.Tensor, other: torch.Tensor, c: int) -> torch.Tensor:
    x += other.float()
    return x


def _slice_written(x: torch.Tensor, other: torch.Tensor, c: int) -> torch.Tensor:
    x[:, c % x.shape[1]].mul_(2)
    return x


def _fill_slice(x: torch.Tensor, other: torch.Tensor, c: int) -> torch.Tensor:
    x[:, :, c % x.shape[2]] = other[:, :, 0]
    return x


def _view_written(x: torch.Tensor, other: torch.Tensor, c: int) -> list[torch.Tensor]:
    seen = x.reshape(-1)
    seen.add_(1)
    return [seen, x]


def _flat_view(x: torch.Tensor, other: torch.Tensor, c: int) -> list[torch.Tensor]:
    seen = x.flatten(1)
    x.relu_()
    return [seen, seen * 2]


def _squeeze_inside(x: torch.Tensor, other: torch.Tensor, c: int) -> torch.Tensor:
    made = x * 1
    made.unsqueeze_(0)
    made.squeeze_(0)
    return made


def _zero_dead(x: torch.Tensor, other: torch.Tensor, c: int) -> torch.Tensor:
    x.sin()
    torch.zeros(3).add_(1)
    return x - 1


SIMPLE: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "relu": lambda x, other, c: x.relu(),
    "relu_": lambda x, other, c: x.relu_(),
    "sigmoid": lambda x, other, c: torch.sigmoid(x),
    "add": lambda x, other, c: x + other,
    "add_": lambda x, other, c: x.add_(other, alpha=1 + c % 2),
    "iadd": _iadd,
    "mul_": lambda x, other, c: x.mul_(0.5),
    "cat": lambda x, other, c: torch.cat([x, other], 1)[:, : 2 + c % 5],
    "max_pool": lambda x, other, c: F.max_pool2d(x, 3, 1, 1) if c % 2 else F.max_pool2d(x, 1),
    "avg_pool": lambda x, other, c: F.avg_pool2d(x, 2, 1) if min(x.shape[2:]) > 1 else x * 1,
    "slice": lambda x, other, c: x[:, : 1 + c % x.shape[1]],
    "slice_": _slice_written,
    "fill_slice": _fill_slice,
    "view_": _view_written,
    "flat_view": _flat_view,
    "transposed_view": lambda x, other, c: x.transpose(2, 3),
    "chunk": lambda x, other, c: list(x.chunk(2, 1)),
    "mean": lambda x, other, c: [x.mean((2, 3)), x],
    "compare_": lambda x, other, c: x.clone().gt_(100.0) + x,
    "squeeze_inside": _squeeze_inside,
    "copy_": lambda x, other, c: x.clone().copy_(other),
    "zero_dead": _zero_dead,
    "clone": lambda x, other, c: x.clone(),
}
"""What an instruction does with one tensor, another of its shape, and a number."""


def _instructions() -> st.SearchStrategy[Code]:
    numbers = st.integers(0, 20)
    return st.lists(st.tuples(st.sampled_from(IMAGE_OPS), numbers, numbers, numbers), min_size=1, max_size=9)


@st.composite
def drawn_models(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> tuple[Drawn, tuple[torch.Tensor, ...]]:
    """Draw a random model and its inputs."""
    code = draw(_instructions())
    outputs = draw(st.lists(st.integers(0, 12), max_size=3))
    training, batch, size = draw(st.booleans()), draw(st.integers(1, 2)), draw(st.sampled_from([1, 4, 5]))
    torch.manual_seed(0)
    model = Drawn(code, outputs, training=training, dtype=dtype)
    inputs = tuple(torch.randn(batch, 3, size, size, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        model(*(one.clone() for one in inputs))
    model.count.zero_()
    return model, inputs


# -- what a run does -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effects:
    """All that a run can be seen to do: what it returns, and what it leaves in its inputs and in the model."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    state: list[torch.Tensor]


def recorded(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Recorded:
    """Record a model on the host."""
    signature = Signature(args, kwargs)
    return record_static(HostDevice(), model, signature, strict=True, step=lambda name: nullcontext())


def lifted(model: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Recorded, fx.GraphModule]:
    """Record a model on the host, and lift it."""
    one = recorded(model, *args, **kwargs)
    return one, lift(one.recording)


def live(one: Recorded) -> list[torch.Tensor]:
    """Return the tensors that a model has besides its inputs."""
    owned: list[torch.Tensor] = []
    if isinstance(one.model, nn.Module):
        owned = [*one.model.parameters(), *one.model.buffers()]
    return [tensor.detach() for tensor in (*owned, *one.recording.given.values())]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides."""
    if any(stride == 0 for stride in tensor.stride()):
        return tensor.detach().clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(tensor.detach())


def effects(run: Callable[..., Any], one: Recorded) -> Effects:
    """Return what ``run`` does to copies of the inputs and to the model, which is put back."""
    mine = live(one)
    before = [tensor.clone() for tensor in mine]
    inputs = [copied(tensor) for tensor in one.signature.tensors]
    torch.manual_seed(3)
    with issuing("cpu"):
        outputs = list(run(*inputs))
        found = Effects(outputs, inputs, [tensor.clone() for tensor in mine])
        found = Effects([copied(tensor) for tensor in outputs], [copied(tensor) for tensor in inputs], found.state)
        for tensor, value in zip(mine, before, strict=True):
            tensor.copy_(value)
    return found


def eager_effects(one: Recorded) -> Effects:
    """Return what the model itself does."""
    build = builder(one.signature.structure)

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        args, kwargs = build(list(inputs))
        return flatten(one.model(*args, **kwargs), what="output")[0]

    return effects(run, one)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    largest = float(b.abs().nan_to_num().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True)


def strides_that_matter(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Strides of each tensor, in dimensions of more than one element."""
    return [[step for size, step in zip(one.shape, one.stride(), strict=True) if size > 1] for one in tensors]


def same(found: Effects, wanted: Effects, tolerance: float = 0.0, *, strides: bool = False) -> bool:
    """Whether two runs did the same; to the bit if ``tolerance`` is zero."""
    for mine, theirs in ((found.outputs, wanted.outputs), (found.inputs, wanted.inputs), (found.state, wanted.state)):
        if len(mine) != len(theirs) or not all(_close(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)):
            return False
    if strides:
        return strides_that_matter(found.outputs) == strides_that_matter(wanted.outputs)
    return True


def unchanged_by(
    rewrite: Callable[[fx.GraphModule], object], one: Recorded, tolerance: float = 1e-10, *, strides: bool = False
) -> fx.GraphModule:
    """Rewrite a lifted graph, check that it is sound and does what eager does, and return it."""
    module = lift(one.recording)
    wanted = eager_effects(one)
    rewrite(module)
    module.graph.lint()
    module.recompile()
    assert same(effects(module, one), wanted, tolerance, strides=strides), module.graph
    return module


def claimed(module: fx.GraphModule) -> set[int]:
    """Eager calls that some node stands for."""
    return {call for node in module.graph.nodes for call in calls_of(node)}


def targets(module: fx.GraphModule) -> list[str]:
    """List what the graph runs, in order."""
    return [
        str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")
        for node in module.graph.nodes
    ]


def fake_timer(numbers: Sequence[float]) -> Timer:
    """Make a timer that runs every call once, and then returns the given times in turn."""

    def timer(calls: Sequence[Timed]) -> list[float | None]:
        for one in calls:
            for call in one if isinstance(one, tuple) else (one,):
                call()
        return [numbers[place % len(numbers)] for place in range(len(calls))]

    return timer


def results_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad all results with two dimensions, as Inductor does on GPUs with products of odd widths."""
    compile_graph = pipeline.compile_graph

    def compiled_and_padded(module: Any, inputs: Any, **how: Any) -> Any:
        compiled = compile_graph(module, inputs, **how)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [nn.functional.pad(one, (0, 3))[:, :-3] if one.dim() == 2 else one for one in compiled(*tensors)]

        return run

    monkeypatch.setattr(pipeline, "compile_graph", compiled_and_padded)
