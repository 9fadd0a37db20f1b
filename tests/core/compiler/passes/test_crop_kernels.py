"""Convolutions without what only meets padding give what they give with it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.compiler.passes.crop_kernels import crop_kernels, used_elements
from nimble_core.compiler.passes.split_backward import split_backward
from nimble_core.compiler.pipeline import fuse
from nimble_core.compiler.to_fx import lift, reference_of
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.device import Device
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.single import single
from nimble_core.tracing.recorded import Recorded
from nimble_core.validation.eager_cases import eager_cases
from tests.support.rewrite_models import claimed, recorded, strides_that_matter, unchanged_by

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def kernels(module: fx.GraphModule) -> list[tuple[int, ...]]:
    """Sizes of the kernels that convolutions read."""
    places = {CONVOLUTIONS[0]: 1, CONVOLUTIONS[1]: 2}
    found = [reference_of(node.args[places[node.target]]) for node in module.graph.nodes if node.target in places]
    return [one.sizes[2:] if one is not None else () for one in found]


@dataclass(frozen=True)
class Convolution:
    """A convolution and its backward: shapes of input and weight, and which gradients are read."""

    sizes: list[int]
    kernel: list[int]
    last: tuple[bool, bool]
    parameters: tuple[Any, ...]
    mask: list[bool]

    def tensors(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = [torch.randn(*shape, dtype=torch.float64) for shape in (self.sizes, self.kernel)]
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(self.sizes), torch.contiguous_format)
        x, weight = (one.to(memory_format=layout) if last else one for one, last in zip(made, self.last, strict=True))
        return [x, weight, torch.randn(self.kernel[0], dtype=torch.float64)]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        result = aten.convolution(x, weight, bias, *self.parameters)
        found = CONVOLUTIONS[1](result.cos(), x, weight, [bias.numel()], *self.parameters, self.mask)
        return [result, *(one for one, wanted in zip(found, self.mask, strict=True) if wanted)]


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    image, kernel = ([draw(st.integers(1, most)) for _ in range(dims)] for most in (4, 5))
    stride, dilation = ([draw(st.integers(1, 3)) for _ in range(dims)] for _ in range(2))
    padding = [draw(st.integers(0, 4)) for _ in range(dims)]
    for size, *about in zip(image, kernel, padding, dilation, strict=True):
        assume(size + 2 * about[1] > about[2] * (about[0] - 1))
    return Convolution(
        sizes=[draw(st.integers(1, 3)), into, *image],
        kernel=[out, into // groups, *kernel],
        last=draw(st.tuples(st.booleans(), st.booleans())),
        parameters=(stride, padding, dilation, False, [0] * dims, groups),
        mask=draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any)),
    )


@settings(max_examples=200)
@given(convolutions(), st.booleans())
def test_any_convolution(one: Convolution, split: bool) -> None:
    tensors = one.tensors()
    record = recorded(one, *tensors)

    def rewrite(module: fx.GraphModule) -> None:
        if split:
            split_backward(module)
        before = str(module.graph)
        stride, padding, dilation, *_ = one.parameters
        about = zip(one.sizes[2:], one.kernel[2:], stride, padding, dilation, strict=True)
        used = [used_elements(*dim) for dim in about]
        less = [last - first for first, last, _ in used] != one.kernel[2:]
        convolutions = [node for node in module.graph.nodes if node.target in CONVOLUTIONS]
        assert crop_kernels(module) == less * len(convolutions)
        assert less or str(module.graph) == before
        assert set(kernels(module)) == {tuple(last - first for first, last, _ in used)}
        assert crop_kernels(module) == 0, "nothing is left to be cropped"

    module = unchanged_by(rewrite, record)
    assert claimed(module) == claimed(lift(record.recording))
    assert strides_that_matter(module(*tensors)) == strides_that_matter(one(*tensors))
    Referring(module).run(*tensors)


class Referring(fx.Interpreter):
    """Holds every tensor against what its node says of it."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        about = reference_of(n)
        if isinstance(made, torch.Tensor) and about is not None:
            assert tuple(made.shape) == about.sizes, n
        return made


@given(*(st.integers(low, high) for low, high in ((1, 9), (1, 7), (1, 4), (0, 9), (1, 9))))
def test_what_is_left_out_never_meets_the_image(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    assume(size + 2 * padding > dilation * (kernel - 1))
    first, last, needed = used_elements(size, kernel, stride, padding, dilation)
    assert 0 <= first < last <= kernel
    assert 0 <= needed <= padding
    image = torch.arange(1.0, size + 1).view(1, 1, -1)
    outside = torch.ones(kernel)
    outside[first:last] = 0
    met = nn.functional.conv1d(image, outside.view(1, 1, -1), None, stride, padding, dilation)
    assert not met.any()


@pytest.mark.parametrize(
    ("layer", "size", "kernel"),
    [
        (nn.Conv2d(4, 6, 3, padding=1), 1, (1, 1)),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4), 2, (3, 3)),
        (nn.Conv2d(4, 6, 3, 2, padding=1), 2, (2, 2)),
        (nn.Conv2d(4, 6, 3, padding=12, dilation=12), 10, (1, 1)),
        (nn.Conv2d(4, 6, 3, padding=1), 2, (3, 3)),
        (nn.ConvTranspose2d(4, 6, 3, padding=1), 1, (3, 3)),
    ],
)
def test_kernels_of_layers_that_end_on_few_pixels(layer: nn.Module, size: int, kernel: tuple[int, ...]) -> None:
    module = unchanged_by(crop_kernels, recorded(layer.double(), torch.randn(2, 4, size, size).double()))
    assert kernels(module) == [kernel]


class Small(nn.Module):
    """Ends on a single pixel, with whole and depthwise kernels; the same weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.last, self.depthwise = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 5, 1, 2, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.depthwise(torch.tanh(self.last(torch.tanh(self.last(x))))).flatten(1)


def read_by_convolutions(one: Recorded) -> set[tuple[int, ...]]:
    """Sizes of the images and kernels that convolutions read."""
    names = {f"aten.{kind}.default" for kind in ("convolution", "convolution_backward")}
    calls = [call for call in one.recording.program.calls if call.operator in names]
    return {ref.sizes[2:] for call in calls for ref in call.reads if len(ref.sizes) == 4}


def assert_learns_the_same(device: Device, kind: Any, where: str, **more: Any) -> None:
    model, x = Small().to(where, **more), torch.randn(4, 3, 2, 2, device=where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainStep(model, torch.sum, optimizer, options=Options(tune="off"), clip_grad_norm=0.5).prepare(x)
    assert step.engine is not None
    before = step.engine.recorded
    after = fuse(device, before, kind, measure=False, step=lambda name: nullcontext())
    assert max(max(one) for one in read_by_convolutions(before)) == 5
    assert max(max(one) for one in read_by_convolutions(after)) == 2
    executable = capture(device, after, single(after.graph, uniform_costs(after.graph.size)))
    check = eager_cases(before).judged("cropped", after, executable.run)
    assert check.passed, check.reason
    executable.close()
    step.close()


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_learns_the_same(layout: torch.memory_format) -> None:
    assert_learns_the_same(HostDevice(), "library", "cpu", memory_format=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["library", "inductor"])
def test_a_step_learns_the_same_on_a_gpu(kind: Any, layout: torch.memory_format) -> None:
    from nimble_core.runtime.cuda.device import CudaDevice

    assert_learns_the_same(CudaDevice(torch.device("cuda")), kind, "cuda", memory_format=layout)
