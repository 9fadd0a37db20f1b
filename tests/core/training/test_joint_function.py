"""Forward and backward as one function, in the layout that is faster."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.signature import Signature
from nimble_core.training import prepare_training
from nimble_core.training.joint_function import ForwardBackward, in_better_layout, turnable
from tests.support.drop_in import Place, assert_same_gradients, pair, prepared
from tests.support.training_problems import Residual, images


def turn(device: Any, whole: Any, joint: Any, options: Any, step: Any) -> Any:
    """Channels last, measured or not."""
    turned = ForwardBackward(whole.model, whole.leaves, turnable(joint.recording.program))
    return record_static(device, turned, joint.signature, strict=True, step=step)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
@pytest.mark.parametrize("fuse", ["none", "library"])
def test_training_channels_last_equals_eager(name: str, fuse: Any, on: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_training, "in_better_layout", turn)
    found, net, eager = prepared(name, Options(fuse=fuse, policy="nimble", budget_s=1.0), on.device)
    program = net.engines[0].recorded.recording.program
    images = [ref for call in program.calls for ref in call.writes if len(ref.sizes) == 4 and min(ref.sizes[1:]) > 1]
    assert images
    assert all(ref.strides[1] == 1 for ref in images)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (net, eager)]
    for _ in range(3):
        inputs, targets = found.draw()
        for model, optimizer in zip((net, eager), optimizers, strict=True):
            optimizer.zero_grad()
            found.loss_fn(model(inputs), targets).backward()
            optimizer.step()
        assert_same_gradients(net, eager, rtol=1e-3)
    assert [one.stride() for one in net.parameters()] == [one.stride() for one in eager.parameters()]
    net.close()


def test_weights_that_see_single_pixels_stay_as_they_are() -> None:
    class Shrinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.point, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.point(self.first(x)))).flatten(1)

    for size, names in ((2, {"first.weight"}), (4, {"first.weight", "last.weight"})):
        for cast in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            whole = ForwardBackward(Shrinks(), ())
            example = ((torch.randn(2, 3, size, size),), {}, [torch.ones(2, 8 * (size // 2) ** 2)])
            with cast:
                one = record_static(HostDevice(), whole, Signature(example, {}), strict=True, step=Stopwatch())
            assert turnable(one.recording.program) == names


@pytest.mark.gpu
def test_convolutions_train_in_the_layout_that_was_measured_to_be_faster() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 64, 3, padding=1), nn.Flatten())
    x = torch.randn(16, 64, 56, 56, device="cuda")
    with torch.autocast("cuda", torch.float16):
        net = Nimble(wide.cuda(), Options(budget_s=5.0)).prepare(x, training=True)
    chosen = net.engines[0].recorded
    program = (chosen.eager or chosen).recording.program
    made = [ref for call in program.calls if "convolution" in call.operator for ref in call.writes]
    assert {ref.strides[1] for ref in made} == {1}, "half precision on tensor cores is read channels last"
    net.close()


@pytest.mark.parametrize("shape", ["image", "view of an image"])
def test_copies_of_outputs_have_eagers_strides_whatever_was_turned(
    shape: str, on: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, where outputs are no copies, nothing is turned: there it is only seen what copies would have."""
    monkeypatch.setattr(prepare_training, "in_better_layout", turn)
    ways = {"image": (), "view of an image": (nn.Flatten(2),)}
    x = on(images()[0])
    net, eager = pair(on(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *ways[shape])), x)
    backward = net.engines[0].backward
    assert backward is not None
    found, expected = net(x), eager(x)
    assert backward.layouts == (expected.stride(),)
    if on.cuda:
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=on.near, atol=on.near)
    for output in (found, expected):
        output.flatten(1).square().sum().backward()
    assert_same_gradients(net, eager, rtol=1e-3)
    net.close()


class Views(nn.Module):
    """Asks for a view that there is in one layout only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).view(len(x), -1))


class Timed(HostDevice):
    """The host, which says that it is a GPU and how long runs took."""

    kind = "cuda"  # type: ignore[assignment]

    def __init__(self, *times_ns: float | None) -> None:
        self.times_ns = list(times_ns)

    def call_times_ns(self, calls: Any) -> list[float | None]:
        for call in calls:
            call()
        return self.times_ns


@pytest.mark.parametrize(
    ("model", "times_ns", "turned"),
    [
        (Residual(), (2.0, 1.0), True),
        (Residual(), (1.0, 2.0), False),
        (Residual(), (1.0, None), False),
        (Residual().to(memory_format=torch.channels_last), (2.0, 1.0), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (2.0, 1.0), True),
        (Views(), (2.0, 1.0), False),
    ],
    ids=[
        "faster", "slower", "failed", "already", "images", "views",
    ],
)  # fmt: skip
@pytest.mark.parametrize("fuse", ["auto", "library"])
def test_the_layout_is_that_of_the_faster_run(
    model: nn.Module, times_ns: tuple[float | None, ...], turned: bool, fuse: Any
) -> None:
    x = images()[0]
    whole = ForwardBackward(model, ())
    whole((x,), {})
    example = ((x,), {}, list(whole.templates))
    step = Stopwatch()
    joint = record_static(HostDevice(), whole, Signature(example, {}), strict=True, step=step)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    found = in_better_layout(Timed(*times_ns), whole, joint, Options(fuse=fuse), step)
    assert (found is not joint) is turned
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
