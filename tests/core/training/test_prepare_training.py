"""What is made of a forward and a backward that were recorded together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.runtime.host.device import HostDevice, HostExecutable
from nimble_core.scheduling.options import Options
from nimble_core.training import prepare_training
from nimble_core.utils.errors import NimbleError
from tests.core.api.test_train_step import assert_values, one_thread
from tests.core.training.test_autograd_function import assert_same_gradients, pair, prepared

__all__ = ["one_thread"]  # a fixture


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_are_wrong_together_are_left_out(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = prepare_training._unlike_eager, []

    def unlike(joint: Any, forward: Any, backward: Any, count: int) -> str:
        asked.append(backward.tuned.recorded.recording.program.fuse)
        return real(joint, forward, backward, count) if asked[-1] == "none" else "replays are not what eager computes"

    monkeypatch.setattr(prepare_training, "_unlike_eager", unlike)
    options = Options(fuse="inductor", tune="off", strict=strict)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 3)
    if strict:
        with pytest.raises(NimbleError, match="not what eager computes"):
            pair(model, x, options=options)
        return
    net, eager = pair(model, x, options=options)
    assert asked == ["inductor", "none"]
    assert net.engines[0].recorded.recording.program.fuse == "none"
    assert net.engines[0].notes[0] == "inductor: left out: replays are not what eager computes"
    for module in (net, eager):
        module(x).square().sum().backward()
    assert_same_gradients(model, eager, rtol=1e-5)
    net.close()


def test_a_backward_can_be_made_once_more() -> None:
    _, net, _ = prepared("resnet")
    half = net.engines[0].backward
    assert half is not None
    spare = prepare_training._sparing(HostDevice(), half.tuned, None)
    tensors = half.recorded.signature.tensors
    inputs = [torch.randn_like(one) if one.is_floating_point() else one for one in tensors]
    assert_values(spare.run(inputs), half.executable.run(inputs))
    spare.close()
    net.close()


def attention_of_seeds(name: str, seed: Callable[[], int]) -> Callable[..., Any]:
    """An operator that returns a seed for its backward, as attention does, and draws nothing."""
    tests = torch.library.Library("nimble_seed_tests", "FRAGMENT")
    given = "Tensor philox_seed, float dropout_p=0.0"
    tags = (torch.Tag.nondeterministic_seeded,)
    tests.define(f"{name}(Tensor q, float dropout_p=0.0) -> (Tensor out, Tensor philox_seed)", tags=tags)
    tests.define(f"{name}_backward(Tensor grad, Tensor q, {given}) -> Tensor")
    tests.impl(name, lambda q, dropout_p=0.0: (q.sin(), torch.tensor(seed())), "CPU")
    tests.impl(f"{name}_backward", lambda grad, q, seed, dropout_p=0.0: grad * q.cos(), "CPU")
    forward = getattr(torch.ops.nimble_seed_tests, name)
    backward = getattr(torch.ops.nimble_seed_tests, f"{name}_backward")

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.dropout = inputs[1]

    torch.library.register_autograd(
        f"nimble_seed_tests::{name}",
        lambda ctx, grad, _: (backward(grad, *ctx.saved_tensors, ctx.dropout), None),
        setup_context=save,
        lib=tests,
    )
    return lambda q, dropout: (forward(q, dropout)[0], tests)[0]  # which lives as long as this


def test_seeds_that_nothing_is_dropped_by_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are whatever was in their memory: fused kernels of attention without dropout were left out for that."""
    replaying, run = [False], HostExecutable.run

    def watched(self: HostExecutable, *args: Any, **kwargs: Any) -> Any:
        replaying[0] = True
        try:
            return run(self, *args, **kwargs)
        finally:
            replaying[0] = False

    monkeypatch.setattr(HostExecutable, "run", watched)
    attend = attention_of_seeds("attend", lambda: 1 << 40 if replaying[0] else 0)

    class Attends(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](F.gelu(attend(self[0](x), 0.0)))

    model, x = Attends(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    net = Nimble(model, Options(fuse="library", tune="off")).prepare(x, training=True)
    assert not net.engines[0].notes
    assert net.engines[0].recorded.recording.program.fuse == "library"
    net(x).sum().backward()
    eager(x).sum().backward()
    assert_same_gradients(model, eager)
