"""Channels last inside, eager's strides outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.compiler.passes.channels_last import keep_strides, to_channels_last, train_channels_last
from nimble_core.compiler.passes.conv_algorithms import sites_of
from nimble_core.compiler.passes.fold_batchnorm import affine_norms
from nimble_core.compiler.pipeline import fuse
from nimble_core.compiler.to_fx import lift
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.single import single
from nimble_core.tracing.recorded import Recorded
from nimble_core.utils.errors import CaptureError
from nimble_core.validation.eager_cases import eager_cases
from tests.core.api.test_train_step import both, train_both
from tests.support.rewrite_models import (
    Drawn,
    claimed,
    drawn_models,
    eager_effects,
    effects,
    lifted,
    recorded,
    results_are_padded,
    strides_that_matter,
    unchanged_by,
)

aten = torch.ops.aten


@settings(max_examples=30)
@given(drawn_models())
def test_any_model_computes_the_same_in_eagers_strides(made: tuple[Drawn, tuple[torch.Tensor, ...]]) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    module = unchanged_by(to_channels_last, one)
    assert claimed(module) == claimed(lift(one.recording))
    wanted = eager_effects(one).outputs
    assert strides_that_matter(effects(module, one).outputs) == strides_that_matter(wanted)


CONV = nn.Conv2d(3, 4, 3)


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
def test_outputs_of_any_shape_have_eagers_strides(forward: Callable[..., Any]) -> None:
    one, module = lifted(forward, torch.randn(2, 3, 6, 6))
    assert to_channels_last(module) > 0
    wanted = [ref.strides for ref in one.recording.program.outputs]
    found = effects(module, one).outputs
    sizes = [one.shape for one in found]
    real = module(*one.signature.tensors)
    kept = [
        [stride for size, stride in zip(shape, strides, strict=True) if size > 1]
        for shape, strides in zip(sizes, wanted, strict=True)
    ]
    assert strides_that_matter(list(real)) == kept


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_read_and_write_channels_last(channels_last: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)).eval()
    x = torch.randn(2, 3, 8, 8)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    _, module = lifted(model, x)
    assert to_channels_last(module) == 2
    seen = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            made = super().call_function(target, args, kwargs)
            if target is aten.convolution.default:
                seen.extend([*args[:2], made])
            return made

    Watch(module).run(x)
    assert len(seen) == 6
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in seen)


def test_inputs_and_weights_are_converted_once() -> None:
    _, module = lifted(
        lambda x: CONV(x) + CONV(x.relu()) + nn.functional.conv2d(x, CONV.weight * 2), torch.randn(2, 3, 6, 6)
    )
    assert to_channels_last(module) == 3
    assert sum(node.target is aten.clone.default for node in module.graph.nodes) == 3


def test_inputs_that_are_written_are_converted_each_time() -> None:
    def forward(x: torch.Tensor) -> Any:
        first = CONV(x)
        x.mul_(2)
        return first, CONV(x)

    unchanged_by(to_channels_last, recorded(forward, torch.randn(2, 3, 6, 6)), 1e-5)


def test_the_first_convolution_is_a_site_like_any_other() -> None:
    _, module = lifted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval(), torch.randn(1, 3, 8, 8))
    to_channels_last(module)
    sizes = [site.sizes[0] for site, _ in sites_of(module, channels_last=True)]
    assert sorted(sizes) == [(1, 3, 8, 8), (1, 4, 6, 6)]


def written_through_a_view(x: torch.Tensor) -> Any:
    y = CONV(x).relu()
    y.view(2, -1)[0] = 0
    return y * 2


def strided_by_hand(x: torch.Tensor) -> Any:
    return CONV(x).as_strided((2, 3), (4, 2))


def seen_through_a_view(x: torch.Tensor) -> Any:
    y = CONV(x)
    flat = y.flatten()
    y.mul_(2)
    return flat + 1


@pytest.mark.parametrize("forward", [written_through_a_view, strided_by_hand, seen_through_a_view])
def test_graphs_that_depend_on_strides_stay(forward: Callable[..., Any]) -> None:
    one = recorded(forward, torch.randn(2, 3, 6, 6))
    module = unchanged_by(to_channels_last, one, 1e-5)
    assert to_channels_last(module) == 0


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Conv1d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.ReLU()])
def test_without_convolutions_of_images_nothing_changes(model: nn.Module) -> None:
    shape = {nn.Conv1d: (2, 3, 8), nn.Conv3d: (1, 3, 5, 5, 5)}.get(type(model), (2, 4))
    _, module = lifted(model.eval(), torch.randn(*shape))
    before = str(module.graph)
    assert to_channels_last(module) == 0
    assert str(module.graph) == before


def test_folds_and_layout_agree() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).eval().double()

    def both(module: torch.fx.GraphModule) -> None:
        assert affine_norms(module) == 1
        assert to_channels_last(module) == 2

    unchanged_by(both, recorded(model, torch.randn(2, 3, 6, 6, dtype=torch.float64)), strides=True)


def test_strides_are_kept_once() -> None:
    _, module = lifted(CONV, torch.randn(2, 3, 6, 6))
    to_channels_last(module)
    before = str(module.graph)
    keep_strides(module)
    assert str(module.graph) == before


# -- training steps --------------------------------------------------------------------------------------------------


def turned(step: TrainStep) -> Recorded:
    """The step in library calls, channels last as if that had been measured to be faster."""
    assert step.engine is not None
    rec = step.engine.recorded
    first = next(call.index for call in rec.recording.program.calls if call.operator == "aten.convolution.default")
    choices = [KernelChoice(first, "channels last")]
    return fuse(HostDevice(), rec, "library", choices=choices, step=lambda name: nullcontext())


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
    before, after = step.engine.recorded, turned(step)
    for operator in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert image_strides(before, operator) == {False}
        assert image_strides(after, operator) == {True}
    assert {choice.kernel for choice in after.recording.program.choices} == {"channels last"}
    executable = capture(HostDevice(), after, single(after.graph, uniform_costs(after.graph.size)))
    check = eager_cases(before).judged("library, single", after, executable.run)
    assert check.passed, check.reason
    outputs = [ref.strides for ref in after.recording.program.outputs]
    assert outputs == [ref.strides for ref in before.recording.program.outputs]
    executable.close()
    step.close()


def test_a_step_that_is_channels_last_already_converts_nothing() -> None:
    _, step, _ = both("channels_last")
    assert step.engine is not None
    module = lift(step.engine.recorded.recording)
    assert train_channels_last(module) > 0
    assert not any(node.target is aten.clone.default for node in module.graph.nodes)
    step.close()


@pytest.mark.parametrize("through", [lambda one: one, lambda one: one[:2], lambda one: one.detach().transpose(0, 1)])
def test_weights_that_change_between_forward_and_backward_are_not_shared(through: Callable[..., Any]) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.randn(4, 3, 3, 3))
            self.register_buffer("changing", torch.randn(4, 3, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = nn.functional.conv2d(x, self.kept) + nn.functional.conv2d(x, self.changing)
            with torch.no_grad():
                through(self.changing).mul_(0.9)
            return first + nn.functional.conv2d(x, self.changing)

    model, x = Changing(), torch.randn(2, 3, 8, 8)
    whole = TrainStep(model, torch.sum, torch.optim.SGD([model.kept], lr=0.1), options=Options(tune="off"))
    step = whole.prepare(x)
    module = lift(step.engine.recorded.recording)  # type: ignore[union-attr]
    assert train_channels_last(module) == 3
    names = [node.args[0].name for node in module.graph.nodes if node.target is aten.clone.default]
    assert len(names) == 2  # the image and the weight that stays
    step.close()


def test_steps_that_take_images_by_their_strides_stay() -> None:
    conv = nn.Conv2d(3, 4, 3)

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.conv(x)
            return made.as_strided((2, 4, 3, 3), made.stride()).sum()

    step = TrainStep(Windows(), torch.sum, torch.optim.SGD(conv.parameters(), lr=0.1), options=Options(tune="off"))
    step.prepare(torch.randn(2, 3, 8, 8))
    assert train_channels_last(lift(step.engine.recorded.recording)) == 0  # type: ignore[union-attr]
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
    model = Flattened(pixels)
    step = TrainStep(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=Options(tune="off"))
    before = step.prepare(torch.randn(2, 3, 8, 8)).engine.recorded  # type: ignore[union-attr]
    assert train_channels_last(lift(before.recording)) == 2 * turned_too
    after = turned(step)
    assert image_strides(after, "aten.convolution.default") == {turned_too}
    executable = capture(HostDevice(), after, single(after.graph, uniform_costs(after.graph.size)))
    check = eager_cases(before).judged("library, single", after, executable.run)
    assert check.passed, check.reason
    executable.close()
    step.close()


@pytest.mark.parametrize(
    "through",
    [
        lambda images: images[:, :, :1, :1].view(-1),
        lambda images: images[:, :, :1, :1].view(1, -1, 1, 1),
        lambda images: images[:, :, 0, 0].view(-1, 1, 1, 1),
    ],
)
def test_pixels_of_larger_images_are_not_viewed_alike_in_any_layout(through: Callable[..., Any]) -> None:
    class Dims(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 6, 3).requires_grad_(False), nn.Conv2d(6, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images = self.first(x) * 1
            through(images).mul_(0.5)
            return self.second(images)

    model = Dims()
    step = TrainStep(model, torch.sum, torch.optim.SGD(model.second.parameters(), lr=0.1), options=Options(tune="off"))
    recording = step.prepare(torch.randn(1, 3, 8, 8)).engine.recorded.recording  # type: ignore[union-attr]
    assert train_channels_last(lift(recording)) == 0
    step.close()


class Shrinks(nn.Module):
    """The last convolution sees a single pixel, which is in every layout at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).flatten(1)


def test_weights_that_read_single_pixels_stay_as_they_are() -> None:
    model = Shrinks()
    step = TrainStep(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=Options(tune="off"))
    module = lift(step.prepare(torch.randn(2, 3, 2, 2)).engine.recorded.recording)  # type: ignore[union-attr]
    assert train_channels_last(module) == 2
    clones = [node for node in module.graph.nodes if node.target is aten.clone.default]
    assert [tuple(node.meta["ref"].sizes) for node in clones] == [(8, 3, 3, 3), (2, 3, 2, 2)]
    step.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["library", "inductor"])
@pytest.mark.parametrize("size", [2, 4])
def test_single_pixels_train_in_either_layout_on_a_gpu(kind: Any, size: int) -> None:
    from nimble_core.runtime.cuda.device import CudaDevice

    model, device = Shrinks().cuda(), CudaDevice(torch.device("cuda"))
    step = TrainStep(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=Options(tune="off"))
    rec = step.prepare(torch.randn(2, 3, size, size, device="cuda")).engine.recorded  # type: ignore[union-attr]
    first = next(call.index for call in rec.recording.program.calls if call.operator == "aten.convolution.default")
    choices = [KernelChoice(first, "channels last")]
    after = fuse(device, rec, kind, choices=choices, step=lambda name: nullcontext())
    executable = capture(device, after, single(after.graph, uniform_costs(after.graph.size)))
    check = eager_cases(rec).judged(kind, after, executable.run)
    assert check.passed, check.reason
    executable.close()
    step.close()


@pytest.mark.parametrize("free", [0, 1, 2])
def test_results_that_are_copied_out_may_have_any_strides(free: int) -> None:
    x = torch.randn(2, 3, 6, 6)
    one, module = lifted(lambda x: (CONV(x), CONV(x).relu()), x)
    assert train_channels_last(module, free=free) == 2
    module.recompile()
    turned = [result.is_contiguous(memory_format=torch.channels_last) for result in module(x)]
    assert turned == [at < free for at in range(2)]
    assert strides_that_matter(module(x)[free:]) == strides_that_matter(one.model(x)[free:])


def test_a_result_that_is_returned_twice_is_free_only_where_both_are() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = CONV(x)
        return found, found

    for free in range(3):
        x = torch.randn(2, 3, 6, 6)
        _, module = lifted(twice, x)
        train_channels_last(module, free=free)
        module.recompile()
        assert {one.is_contiguous() for one in module(x)} == {free < 2}


@pytest.mark.slow
def test_results_that_a_compiler_padded_are_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results_are_padded(monkeypatch)
    given, step, eager = both("mlp", options=Options(fuse="inductor", policy="single"))
    assert step.engine is not None
    program = step.engine.recorded.recording.program
    assert program.fuse == "inductor", step.engine.notes
    assert any("constant_pad" in call.operator for call in program.calls)
    train_both(given, step, eager, rtol=1e-5)
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
    executable = capture(HostDevice(), made, single(made.graph, uniform_costs(made.graph.size)))
    assert eager_cases(one).judged("inductor", made, executable.run).passed
    executable.close()


def test_gradients_in_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step, _ = both("mobilenet")
    monkeypatch.setattr("nimble_core.compiler.passes.channels_last.laid_out", lambda tensor, strides: tensor)
    with pytest.raises(CaptureError, match=r"result \d+ of the library kernels has strides"):
        turned(step)
    step.close()
