"""Channels last inside, eager's strides outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.compiler.passes.channels_last import convolutions_alone, keep_strides, to_channels_last
from nimble_core.compiler.passes.conv_algorithms import sites_of
from nimble_core.compiler.pipeline import fuse
from nimble_core.compiler.to_fx import lift
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.device import Device
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.single import single
from nimble_core.tracing.recorded import Recorded
from nimble_core.utils.errors import CaptureError
from nimble_core.validation.eager_cases import eager_cases
from tests.support.rewrite_models import lifted, recorded, results_are_padded, unchanged_by
from tests.support.training_steps import both

aten = torch.ops.aten
CONV = nn.Conv2d(3, 4, 3)
IMAGES = torch.randn(2, 3, 6, 6)
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def clones(module: fx.GraphModule) -> list[tuple[int, ...]]:
    """Sizes of what is converted."""
    return [node.meta["ref"].sizes for node in module.graph.nodes if node.target is aten.clone.default]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: CONV(x),
        lambda x: CONV(x).flatten(2).transpose(1, 2),
        lambda x: CONV(x).permute(0, 2, 3, 1),
        lambda x: CONV(x).mean((2, 3), keepdim=True).expand(-1, -1, 2, 2),
        lambda x: CONV(x)[:, :, 1],
        lambda x: (CONV(x), CONV(x).relu(), x, CONV.weight),
        lambda x: CONV(x).unsqueeze(1),
        lambda x: CONV(x).sum((0, 1)),
    ],
)
def test_outputs_of_any_shape_keep_eagers_strides(forward: Callable[..., Any]) -> None:
    def rewrite(module: fx.GraphModule) -> None:
        assert to_channels_last(module) > 0
        keep_strides(module)
        once = str(module.graph)
        keep_strides(module)
        assert str(module.graph) == once

    unchanged_by(rewrite, recorded(forward, IMAGES), 1e-5, strides=True)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_read_and_write_channels_last(layout: torch.memory_format, channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)).eval()
    x = torch.randn(2, channels, 8, 8).to(memory_format=layout)
    _, module = lifted(model, x)
    assert to_channels_last(module) == 2
    sizes = {site.sizes[0] for site, _ in sites_of(module, channels_last=True)}
    assert sizes == {(2, channels, 8, 8), (2, 4, 6, 6)}
    seen = []

    class Watch(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            made = super().call_function(target, args, kwargs)
            if target is aten.convolution.default:
                seen.extend([*args[:2], made])
            return made

    Watch(module).run(x)
    assert len(seen) == 6
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in seen)


def strided_by_hand(x: torch.Tensor) -> Any:
    return CONV(x).as_strided((2, 3), (4, 2))


def strided_behind_a_view(x: torch.Tensor) -> Any:
    return CONV(x).flatten(2).as_strided((2, 3), (4, 2))


def written_through(view: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        images = CONV(x) * 1
        view(images).mul_(0.5)
        return images * 2

    return forward


@pytest.mark.parametrize(
    "forward",
    [
        strided_by_hand,
        strided_behind_a_view,
        written_through(lambda images: images.view(2, -1)),
        written_through(lambda images: images[:, :, :1, :1].view(-1)),
        written_through(lambda images: images[:, :, :1, :1].view(1, -1, 1, 1)),
        written_through(lambda images: images[:, :, 0, 0].view(-1, 1, 1, 1)),
    ],
)
def test_graphs_that_depend_on_the_layout_stay(forward: Callable[..., Any]) -> None:
    module = unchanged_by(to_channels_last, recorded(forward, IMAGES), 1e-5)
    assert to_channels_last(module) == 0


class Shrinks(nn.Module):
    """The last convolution sees a single pixel, which is in every layout at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).flatten(1)


class Changing(nn.Module):
    """Writes a weight between two convolutions, through any view."""

    def __init__(self, through: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.through = through
        self.register_buffer("kept", torch.randn(4, 3, 3, 3))
        self.register_buffer("changing", torch.randn(4, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.conv2d(x, self.kept) + nn.functional.conv2d(x, self.changing)
        self.through(self.changing).mul_(0.9)
        return first + nn.functional.conv2d(x, self.changing)


@pytest.mark.parametrize("through", [lambda one: one, lambda one: one[:2], lambda one: one.transpose(0, 1)])
def test_weights_that_change_in_between_are_not_converted(through: Callable[..., torch.Tensor]) -> None:
    module = unchanged_by(to_channels_last, recorded(Changing(through), IMAGES), 1e-5)
    assert clones(module) == [(4, 3, 3, 3), (2, 3, 6, 6)], "the weight that stays, and the image"


# -- training steps --------------------------------------------------------------------------------------------------


class CallCounter(TorchDispatchMode):
    """Counts convolutions with their layouts, copies to another layout, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.copies = self.rest = 0
        self.layouts: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in CONVOLUTIONS:
            self.convolutions += 1
            images = [one for one in args if torch.is_tensor(one) and one.dim() == 4 and min(one.shape[1:]) > 1]
            self.layouts |= {one.stride(1) == 1 for one in images}
        elif func in (aten.clone.default, aten.copy_.default):
            self.copies += 1
        else:
            self.rest += func is not aten.empty_strided.default and not func.is_view
        return func(*args, **(kwargs or {}))


def stepped(model: nn.Module, x: torch.Tensor) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, torch.sum, optimizer, options=Options(tune="off")).prepare(x)


def turned(rec: Recorded, device: Device | None = None, kind: Any = "library") -> Recorded:
    """Make other kernels for a step, channels last as if that had been measured to be faster."""
    first = next(call.index for call in rec.recording.program.calls if call.operator == "aten.convolution.default")
    choices = [KernelChoice(first, "channels last")]
    return fuse(device or HostDevice(), rec, kind, choices=choices, step=lambda name: nullcontext())


def assert_right(before: Recorded, after: Recorded, device: Device | None = None) -> None:
    executable = capture(device or HostDevice(), after, single(after.graph, uniform_costs(after.graph.size)))
    check = eager_cases(before).judged("channels last", after, executable.run)
    assert check.passed, check.reason
    executable.close()


def image_strides(rec: Recorded, operator: str) -> set[bool]:
    """Whether inputs of these calls are channels last."""
    found = set()
    for call in rec.recording.program.calls:
        if call.operator == operator:
            images = [one.ref for one in call.accesses if not one.write and len(one.ref.sizes) == 4]
            found |= {ref.strides[1] == 1 for ref in images if min(ref.sizes[1:]) > 1}
    return found


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_a_training_step_learns_the_same_channels_last(name: str) -> None:
    _, step, _ = both(name)
    assert step.engine is not None
    before, after = step.engine.recorded, turned(step.engine.recorded)
    for operator in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert image_strides(before, operator) == {False}
        assert image_strides(after, operator) == {True}
    assert {choice.kernel for choice in after.recording.program.choices} == {"channels last"}
    assert_right(before, after)
    outputs = [ref.strides for ref in after.recording.program.outputs]
    assert outputs == [ref.strides for ref in before.recording.program.outputs]
    step.close()


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_convolutions_are_timed_without_the_rest_in_either_layout(name: str) -> None:
    _, step, _ = both(name)
    assert step.engine is not None
    recording = step.engine.recorded.recording
    for changed in (False, True):
        module = lift(recording)
        assert not changed or to_channels_last(module)
        run = convolutions_alone(module, torch.device("cpu"), channels_last=changed)
        with CallCounter() as seen:
            run()
        convolutions = [node for node in module.graph.nodes if node.target in CONVOLUTIONS]
        assert seen.convolutions == len(convolutions) > 0
        assert seen.layouts == {changed}
        assert (seen.copies > 0) == changed, "weights and images, there and back"
        assert seen.rest == 0
    step.close()


class Bytes(nn.Module):
    """Converts images itself, of a type that no convolution reads."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x.contiguous(memory_format=torch.channels_last).float())


def test_what_the_model_converts_itself_is_not_timed() -> None:
    step = stepped(Bytes(), torch.randint(256, (2, 3, 6, 6), dtype=torch.uint8))
    assert step.engine is not None
    module = lift(step.engine.recorded.recording)
    assert clones(module) == [(2, 3, 6, 6)]
    assert to_channels_last(module) == 1
    with CallCounter() as seen:
        convolutions_alone(module, torch.device("cpu"), channels_last=True)()
    assert seen.copies == 1, "the weight; eager's own gradient is channels last here"
    step.close()


class Flattened(nn.Module):
    """Writes in place what is a view of pooled images, as classifiers with in-place dropout do."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.pool, self.last = nn.AdaptiveAvgPool2d(pixels), nn.Linear(6 * pixels * pixels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.second(torch.relu(self.first(x)))).flatten(1)
        return self.last(pooled.mul_(0.8))


@pytest.mark.parametrize(("pixels", "turned_too"), [(1, True), (2, False)])
def test_single_pixels_may_be_written_through_a_view(pixels: int, turned_too: bool) -> None:
    """A view of more pixels would be a copy of them channels last, and what is written there would be lost."""
    step = stepped(Flattened(pixels), torch.randn(2, 3, 8, 8))
    before = step.engine.recorded  # type: ignore[union-attr]
    assert to_channels_last(lift(before.recording)) == 2 * turned_too
    after = turned(before)
    assert image_strides(after, "aten.convolution.default") == {turned_too}
    assert_right(before, after)
    step.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["library", "inductor"])
@pytest.mark.parametrize("size", [2, 4])
def test_single_pixels_train_in_either_layout_on_a_gpu(kind: Any, size: int) -> None:
    from nimble_core.runtime.cuda.device import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    step = stepped(Shrinks().cuda(), torch.randn(2, 3, size, size, device="cuda"))
    rec = step.engine.recorded  # type: ignore[union-attr]
    assert_right(rec, turned(rec, device, kind), device)
    step.close()


@pytest.mark.parametrize("free", [0, 1, 2])
def test_results_that_a_compiler_padded_and_that_are_copied_out_stay(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_are_padded(monkeypatch)
    one = replace(recorded(lambda x: (x.exp(), x.sin()), torch.randn(4, 5)), trained=True, copied_out=free)
    made = fuse(HostDevice(), one, "inductor", step=lambda name: nullcontext())
    strides = [ref.strides for ref in made.recording.program.outputs]
    assert strides == [(8, 1) if at < free else (5, 1) for at in range(2)]
    copies = [call for call in made.recording.program.calls if call.operator == "aten.copy_.default"]
    assert len(copies) == 2 - free
    assert_right(one, made)


def test_gradients_in_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step, _ = both("mobilenet")
    monkeypatch.setattr("nimble_core.compiler.passes.channels_last.laid_out", lambda tensor, strides: tensor)
    with pytest.raises(CaptureError, match=r"result \d+ of the library kernels has strides"):
        turned(step.engine.recorded)  # type: ignore[union-attr]
    step.close()
