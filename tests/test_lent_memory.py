"""Backwards that use up what their forward saved: memory laid out as on a GPU, calls in any order that is allowed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from memory_models import happens_before
from torch import nn

from nimble_core import differentiable
from nimble_core.arena import MemoryPlan, Needs, check_memory, plan_memory
from nimble_core.devices.host import HostDevice
from nimble_core.differentiable import ForwardBackward
from nimble_core.fusing import fuse
from nimble_core.halves import halve
from nimble_core.pipeline import Stopwatch, record_static, schedule_by
from nimble_core.recording import Issuer, issuing
from nimble_core.signature import Signature


class PlacingIssuer(Issuer):
    """Runs calls in one block of memory, with what they make where a plan says.

    Args:
        recording: what to run.
        inputs: one tensor per program input.
        plan: where results lie.
        memory: all of it, as many bytes as the plan's last offset, lent ones first.
    """

    def __init__(self, recording: Any, inputs: Any, plan: MemoryPlan, memory: torch.Tensor) -> None:
        super().__init__(recording, inputs)
        self._plan, self._memory = plan, memory

    def _run(self, step: Any) -> None:
        super()._run(step)
        program = self.recording.program
        for slot in step.outputs:
            home, tensor = self.recording.storage_of[slot], self.tensors[slot]
            if slot < 0 or tensor is None or program.storages[home].role != "intermediate":
                continue
            start = self._memory.data_ptr() + self._plan.offsets[home]
            if self._plan.offsets[home] >= 0 and tensor.untyped_storage().data_ptr() != start:
                storage = torch._C._construct_storage_from_data_pointer(
                    start, tensor.device, program.storages[home].nbytes
                )
                storage.copy_(tensor.untyped_storage())
                self.tensors[slot] = tensor.new_empty(0).set_(
                    storage, tensor.storage_offset(), tensor.shape, tensor.stride()
                )


def small_net() -> nn.Module:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Hardswish())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.left(x) * self.right(x))

    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(), Block(), Block(), *head)


@pytest.mark.compiler
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("kind", ["none", "library", "inductor"])
def test_a_backward_in_lent_memory_finds_what_was_saved_in_any_order(kind: Any, policy: str) -> None:
    model, x, device = small_net(), torch.randn(4, 3, 8, 8), HostDevice()
    whole = ForwardBackward(model, ())
    example = ((x,), {}, [torch.ones(4, 5)])
    joint = record_static(device, whole, Signature(example, {}), example, {}, strict=True, step=Stopwatch())
    halves = halve(joint.recording, 1, 1)
    issuer = Issuer(halves.forward, [x])
    with issuing("cpu"):
        for call in range(len(halves.forward.program.calls)):
            issuer.issue(call)
        made = issuer.outputs()[1:]
    offsets = [0, *accumulate(-(-one.untyped_storage().nbytes() // 512) * 512 + 512 for one in made)]
    block = torch.zeros(offsets[-1] + (1 << 20), dtype=torch.uint8)
    block = block[-block.data_ptr() % 512 :]
    for at, (one, offset) in enumerate(zip(made, offsets, strict=False)):
        count = one.untyped_storage().nbytes()
        block[offset : offset + count] = one.new_empty(0, dtype=torch.uint8).set_(one.untyped_storage())
        start = block.storage_offset() + offset
        made[at] = one.new_empty(0).set_(
            block.untyped_storage(), start // one.element_size() + one.storage_offset(), one.shape, one.stride()
        )
    saved, lender = differentiable._lent(block[: offsets[-1]], made)
    assert lender is not None
    saved += [x for _ in halves.saved_inputs]
    gradients = [torch.randn(4, 5)]
    recorded = differentiable._recorded(halves.with_saved(saved), gradients, model)  # type: ignore[arg-type]  # not run
    if kind != "none":
        recorded = fuse(device, recorded, kind, measure=False, thorough=False, step=Stopwatch())
    recording, program = recorded.recording, recorded.recording.program
    before = block.clone()
    plain = Issuer(recording, gradients)
    with issuing("cpu"):
        for call in range(len(program.calls)):
            plain.issue(call)
        expected = [one.clone() for one in plain.outputs()]
    schedule = schedule_by(recorded, policy, None, None)
    lent = replace(lender.to(recording), least_nbytes=0)
    plan = check_memory(program, schedule, plan_memory(program, schedule, needs=Needs(lent=lent)))
    assert any(0 <= offset < plan.start for offset in plan.offsets), "nothing moved in"
    assert plan.start + plan.nbytes <= block.nbytes
    chance = random.Random(0)
    for _ in range(5):
        block.copy_(before)
        placing = PlacingIssuer(recording, gradients, plan, block)
        waiting = {call: set(first) for call, first in happens_before(schedule).pred.items()}
        with issuing("cpu"):
            while waiting:
                call = chance.choice(sorted(one for one, first in waiting.items() if not first))
                placing.issue(call)
                del waiting[call]
                for first in waiting.values():
                    first.discard(call)
            found = placing.outputs()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
