"""Compiled kernels launched ahead of the end of those before, and counters zeroed at once, on a real GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from nimble_core import DeviceError, Nimble
from nimble_core.autotune.capture_pipeline import device_for, observe
from nimble_core.runtime.cuda.device import CudaExecutable
from nimble_core.tracing.kernel_launches import Relaunch
from tests.support.cuda_models import graph_of
from tests.support.fused_models import MODELS, engine, fused, made, quick

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they would rather be told
]

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no kernels wait for others"
)


def turning(x: torch.Tensor) -> torch.Tensor:
    """Compiled kernels that read all that the ones before have written, each on two streams."""
    y = x
    for _ in range(4):
        x, y = (x.t() + y).softmax(-1), (y * 2 - y.mean(0, keepdim=True)).t().tanh()
    return x + y


def again(executable: CudaExecutable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [executable.run([x])[0] for x in inputs]


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("name", ["tower", "attention", "turning"])
def test_compiled_kernels_are_launched_ahead_and_wait(name: str, policy: str) -> None:
    model, draw = made(name) if name in MODELS else (turning, lambda: torch.randn(1500, 1500))
    model = model.cuda() if isinstance(model, nn.Module) else model
    inputs = [draw().cuda() for _ in range(20)]
    net = Nimble(model, quick("inductor", policy=policy)).prepare(inputs[0])
    executable, recording = engine(net).executable, engine(net).recorded.recording
    assert isinstance(executable, CudaExecutable)
    raw = executable.raw
    assert fused(net) == "inductor", engine(net).notes
    assert raw.ahead
    launched = {step.call: step.func for step in recording.steps if isinstance(step.func, Relaunch)}
    assert launched
    assert all(function.waits for function in launched.values())
    between = {(tail, head) for tail, head in raw.edges if raw.owner[head] in launched and raw.kinds[tail] == "kernel"}
    assert between
    assert between <= set(raw.ahead)
    found = again(executable, inputs)
    with executable.none_ahead():
        assert graph_of(executable).ahead == ()
        one_by_one = again(executable, inputs)
    assert graph_of(executable) == replace(raw, owner=())
    assert all(map(torch.equal, found, one_by_one))
    assert all(map(torch.equal, again(executable, inputs), one_by_one))
    torch.testing.assert_close(found[-1], model(inputs[-1]), rtol=1e-2, atol=1e-2)
    net.close()


@HOPPER
@torch.no_grad()
def test_what_a_kernel_costs_does_not_hold_its_wait_for_the_one_before() -> None:
    net = Nimble(turning, quick("inductor", policy="single")).prepare(torch.randn(1500, 1500, device="cuda"))
    found = engine(net)
    assert isinstance(found.executable, CudaExecutable)
    assert found.executable.raw.ahead, found.notes
    seen = observe(device_for(torch.device("cuda")), found.recorded, found.executable)
    assert seen.timeline.reliable, seen.timeline.note
    assert seen.costs.reliable
    spans = seen.timeline.spans
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(spans)), "one stream: one after the other"
    # Each is timed in replays of its own kind: clocks vary, and what is launched ahead may be done a little sooner.
    assert 0.8 * seen.timeline.length_ns < seen.costs.total_ns < 1.1 * seen.timeline.length_ns
    with found.executable.none_ahead():
        alone = observe(device_for(torch.device("cuda")), found.recorded, found.executable)
    assert alone.costs.total_ns == pytest.approx(seen.costs.total_ns, rel=0.1)
    net.close()


@HOPPER
@torch.no_grad()
def test_a_graph_that_cannot_be_instantiated_again_is_never_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 100, device="cuda")
    net = Nimble(turning, quick("inductor")).prepare(x)
    executable = engine(net).executable
    assert isinstance(executable, CudaExecutable)
    with executable.none_ahead(), executable.none_ahead():  # one of them waits for nobody
        assert executable.raw.ahead == ()
    assert executable.raw.ahead

    def refused(graph: torch.cuda.CUDAGraph) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "instantiate", refused)
        with (
            pytest.raises(DeviceError, match="could not be instantiated again: out of memory"),
            executable.none_ahead(),
        ):
            pytest.fail("nothing runs without a graph")
    with pytest.raises(DeviceError, match="closed"):
        net(x)
    net.close()
    again = Nimble(turning, quick("inductor")).prepare(x)
    torch.testing.assert_close(again(x), turning(x), rtol=1e-3, atol=1e-3)
    again.close()


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("fuse", ["none", "inductor"])
def test_kernels_that_wait_only_for_what_their_author_knew_of_are_not_launched_ahead(fuse: str) -> None:
    pytest.importorskip("triton")
    from tests.support import triton_kernels_for_tests as kernels

    def model(x: torch.Tensor) -> torch.Tensor:
        size, out = x.numel(), torch.empty_like(x)
        square = x @ x
        kernels.add_what_was_there[(-(-size // 1024),)](square, x, out, size, BLOCK=1024, launch_pdl=True)
        return out @ out

    x = torch.randn(512, 512, device="cuda")
    net = Nimble(model, quick(fuse)).prepare(x)
    found = engine(net)
    assert isinstance(found.executable, CudaExecutable)
    raw, calls = found.executable.raw, found.recorded.recording.program.calls
    (own,) = (call.index for call in calls if "add_what_was_there" in call.operator)
    assert not [edge for edge in raw.ahead if raw.owner[edge[1]] == own]
    assert [edge for edge in raw.edges if raw.owner[edge[1]] == own]
    torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-2)
    net.close()


class Attending(nn.Module):
    """Attention of cuDNN's, three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, False)[0].mul(2).tanh()
        return x


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("fuse", ["none", "inductor"])
def test_what_attention_counts_in_is_zero_from_the_beginning_whatever_was_there(fuse: str, policy: str) -> None:
    model = Attending()
    inputs = [torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.float16) for _ in range(6)]
    net = Nimble(model, quick(fuse, policy=policy)).prepare(inputs[0])
    found = engine(net)
    executable = found.executable
    assert isinstance(executable, CudaExecutable)
    raw = executable.raw
    if "memset" not in raw.kinds:
        pytest.skip("this cuDNN sets nothing to zero before its attention")
    assert [node for node, kind in enumerate(raw.kinds) if kind == "memset"] == [0]
    assert raw.owner[0] is None
    assert set(raw.owner[1:]) == set(range(len(found.recorded.recording.program.calls)))
    assert executable.counts.forks == 1
    assert executable.arena is not None
    for x in inputs:
        executable.arena.fill_(255)
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)
    seen = observe(device_for(torch.device("cuda")), found.recorded, executable)
    assert seen.timeline.reliable, seen.timeline.note
    net.close()
