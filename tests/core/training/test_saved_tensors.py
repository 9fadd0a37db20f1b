"""Backwards that use up what their forward saved: memory laid out as on a GPU, calls in any order that is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.signature import Signature
from nimble_core.training.joint_function import ForwardBackward
from nimble_core.training.partition import halve
from nimble_core.training.saved_tensors import leading, lent


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
