"""Backwards that use up what their forward saved: memory laid out as on a GPU, calls in any order that is allowed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.autotune.capture_pipeline import schedule_by
from nimble_core.compiler.pipeline import fuse
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.memory_planner import MemoryPlan, Needs, check_memory, plan_memory
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.recording import Issuer, issuing
from nimble_core.tracing.signature import Signature
from nimble_core.training import prepare_training
from nimble_core.training.joint_function import ForwardBackward
from nimble_core.training.partition import halve
from nimble_core.training.saved_tensors import leading, lent
from tests.support.memory_models import happens_before


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


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("kind", ["none", "library", "inductor"])
def test_a_backward_in_lent_memory_finds_what_was_saved_in_any_order(kind: Any, policy: str) -> None:
    model, x, device = small_net(), torch.randn(4, 3, 8, 8), HostDevice()
    whole = ForwardBackward(model, ())
    example = ((x,), {}, [torch.ones(4, 5)])
    joint = record_static(device, whole, Signature(example, {}), strict=True, step=Stopwatch())
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
    saved, lender = lent(block[: offsets[-1]], made)
    assert lender is not None
    saved += [x for _ in halves.saved_inputs]
    gradients = [torch.randn(4, 5)]
    recorded = prepare_training._recorded(halves.with_saved(saved), gradients, model)  # type: ignore[arg-type]  # not run
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
    uses_up = replace(lender.to(recording), least_nbytes=0)
    plan = check_memory(program, schedule, plan_memory(program, schedule, needs=Needs(lent=uses_up)))
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


def saved_in(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors in one block, as a forward's outputs lie in its arena."""

    def at(offset: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        return memory[offset : offset + count].view(dtype).view(sizes)

    floats = at(1024, torch.float32, 4, 8)
    return {
        "floats": floats,
        "across": at(2048, torch.float32, 4, 8).t(),
        "mask": at(2560, torch.bool, 100),
        "positions": at(3072, torch.int64, 10),
        "one": at(3584, torch.float32, 64),
        "its part": at(3584, torch.float32, 64)[32:],
        "between": at(4100, torch.float32, 8),
    }


def test_what_the_backward_may_use_up_has_storages_of_its_own() -> None:
    memory = torch.zeros(8192 + 512, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 512 :][:8192]
    named = saved_in(memory)
    elsewhere = torch.ones(3)
    saved, lender = lent(memory, [*named.values(), elsewhere])
    assert lender is not None
    found = dict(zip(named, saved, strict=False))
    own = {name for name, one in found.items() if one is not named[name]}
    assert own == {"floats", "across", "mask", "between"}
    assert lender.kept == ((3072, 80), (3584, 256)), "parts that overlap are one"
    assert saved[-1] is elsewhere
    memory.random_(255)
    for name, one in named.items():
        assert (found[name].data_ptr(), found[name].stride()) == (one.data_ptr(), one.stride())
        assert torch.equal(found[name].nan_to_num(), one.nan_to_num())

    def uses(*tensors: torch.Tensor) -> torch.Tensor:
        floats, across, mask, between = tensors
        return floats @ across.t().t() + mask[:4].float() + between[:4]

    given = [found[name] for name in ("floats", "across", "mask", "between")]

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + uses(*given)

    args = (torch.ones(4, 4),)
    recorded = record_static(HostDevice(), Reads(), Signature(args, {}), strict=True, step=Stopwatch())
    uses_up = lender.to(recorded.recording)
    assert sorted(offset for _, offset in uses_up.homes) == [1024, 2048, 2560]
    assert uses_up.kept == ((3072, 80), (3584, 256), (4100, 32)), "what does not begin where blocks do stays"
    assert uses_up.nbytes == 8192


def test_what_is_shown_to_the_caller_is_not_used_up() -> None:
    memory = torch.zeros(8192 + 512, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 512 :][:8192]
    named = saved_in(memory)
    apart = memory[512:544].view(torch.float32)
    saved, lender = lent(memory, list(named.values()), (), [named["floats"][1:], apart, torch.ones(3)])
    assert lender is not None
    assert saved[0] is named["floats"]
    assert len(saved) == len(named)
    assert lender.kept == ((512, 32), (1024, 128), (3072, 80), (3584, 256))


class Looks(torch.autograd.Function):
    """Keeps positions as numbers, and its backward goes where they say."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp(), positions + 0.5)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scales, positions = ctx.saved_tensors
        return gradient * scales[(positions * 1).long()], None


def test_what_leads_to_positions_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return Looks.apply(torch.relu(self.layer(x)), positions)  # type: ignore[no-untyped-call]  # torch's has no types

    args = (torch.randn(4, 4), torch.tensor([3.0, 1.0, 0.0, 2.0]))
    whole = ForwardBackward(Model(), ())
    example = (args, {}, [torch.ones(4, 4)])
    joint = record_static(HostDevice(), whole, Signature(example, {}), strict=True, step=Stopwatch())
    halves = halve(joint.recording, 2, 1)
    backward = halves.backward
    leads = leading(backward, halves.saved_outputs + len(halves.saved_inputs))
    sizes = [backward.program.storages[backward.storage_of[slot]].nbytes for slot in backward.inputs[1:]]
    assert [sizes[at] for at in leads] == [16], "the positions alone: what they choose from may be anything"
    assert len(sizes) > 2


def test_nothing_is_lent_where_there_is_no_memory() -> None:
    saved = [torch.ones(3)]
    assert lent(None, saved) == (saved, None)
