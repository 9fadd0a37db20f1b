"""The arena: who shares memory in it, that nobody reads what the run did not write, and who can fill it."""

from __future__ import annotations

import random
from collections.abc import Callable

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.autotune.capture_pipeline import capture
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.host.buffers import OUT_VARIANTS, can_fill, filling_step
from nimble_core.runtime.host.device import HostDevice, HostExecutable
from nimble_core.scheduling.policies import single
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.scheduling.simulator import EXACT
from nimble_core.tracing.recorded import Stopwatch, record_static, state_kept
from nimble_core.tracing.recording import Slot, Step, fill
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import DeviceError
from nimble_core.validation.eager_cases import eager_cases, from_same_state
from tests.support import models
from tests.support.host_models import Prepared, drawn_streams, eager, interpreted, poison, programs, same
from tests.support.memory_models import happens_before


@pytest.mark.parametrize("name", models.CASES)
def test_nothing_is_read_from_the_arena_that_the_run_did_not_write(name: str) -> None:
    model, args, kwargs = models.make(name)
    device, signature = HostDevice(), Signature(args, kwargs)
    recorded = record_static(device, model, signature, strict=False, step=Stopwatch())
    if recorded.whole or recorded.recording.draws:
        return  # eager's cases are drawn from seeds of their own
    draw = random.Random(name)
    with state_kept(recorded):
        for lanes in (1, 2, 4):
            executable = capture(device, recorded, drawn_streams(recorded.graph, draw, lanes))
            assert isinstance(executable, HostExecutable)
            run = from_same_state(recorded, executable.run)
            for inputs, expected in eager_cases(recorded).eager:
                poison(executable)
                torch.testing.assert_close(run([one.clone() for one in inputs]), list(expected), equal_nan=True)
            executable.close()


@settings(max_examples=60)
@given(programs(), st.randoms(use_true_random=False))
def test_memory_of_several_workers_holds_in_any_order_that_they_may_run_in(
    steps: list[tuple[str, int, int, int]], draw: random.Random
) -> None:
    model = interpreted(steps)
    made = Prepared(model, torch.randn(4, 4))
    several = drawn_streams(made.graph, draw, 3)
    memory = made.plan(several)
    ranks = [draw.random() for _ in range(made.graph.size)]
    order = list(networkx.lexicographical_topological_sort(happens_before(several), key=ranks.__getitem__))
    one = plan_streams(made.graph, [0] * made.graph.size, policy="one of the runs", order=order)
    executable = made.device.capture(made.recording, one, made.signature.tensors, made.layout(several), memory)
    x = torch.randn(4, 4)
    poison(executable)
    assert same(executable.run([x]), eager(model, [x]))
    executable.close()


class Stages(nn.Module):
    """Independent chains, whose results are small beside what they need on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([((x.repeat(8) + i).sin() * 2).exp().sum() for i in range(8)])


def test_a_memory_limit_adds_order_or_says_the_smallest_that_works() -> None:
    x = torch.randn(512)
    recorded = record_static(HostDevice(), Stages(), Signature([x], {}), strict=True, step=Stopwatch())
    device = HostDevice()
    device.model = EXACT  # type: ignore[misc]  # else one stream is the faster way to fit
    lanes = [call.index % 4 for call in recorded.recording.program.calls]
    schedule = plan_streams(recorded.graph, lanes, policy="four")
    free = capture(device, recorded, schedule)
    one = capture(device, recorded, single(recorded.graph, uniform_costs(recorded.graph.size)))
    limit = one.nbytes + x.nbytes + 1024
    assert limit < free.nbytes
    limited = capture(device, recorded, schedule, memory_limit=limit)
    assert limited.nbytes <= limit
    assert limited.schedule.stream == schedule.stream
    assert limited.schedule != schedule
    y = torch.randn(512)
    for executable in (free, one, limited):
        assert isinstance(executable, HostExecutable)
        poison(executable)
        assert same(executable.run([y]), eager(recorded.model, [y]))
        executable.close()
    with pytest.raises(DeviceError, match=r"memory_limit=.* is too little: .* the smallest has \d+"):
        capture(device, recorded, schedule, memory_limit=4096)


ARGUMENTS: dict[str, Callable[[torch.Tensor], tuple[object, ...]]] = {
    "aten::_log_softmax": lambda x: (x, -1, False),
    "aten::_softmax": lambda x: (x, 0, False),
    "aten::add.Tensor": lambda x: (x, x.flip(0)),
    "aten::addmm": lambda x: (x[0], x, x.t().contiguous().t()),
    "aten::baddbmm": lambda x: (x[None], x.expand(2, *x.shape), x.t().expand(2, *x.shape)),
    "aten::bmm": lambda x: (x.expand(2, *x.shape), x.t().expand(2, *x.shape)),
    "aten::cat": lambda x: ([x, x[:1], x[:0]],),
    "aten::div.Tensor": lambda x: (x, 3),
    "aten::maximum": lambda x: (x, x.t()),
    "aten::mean.dim": lambda x: (x, [1], True),
    "aten::minimum": lambda x: (x, x.t()),
    "aten::mm": lambda x: (x, x.t()),
    "aten::mul.Tensor": lambda x: (x, 0.1),
    "aten::pow.Tensor_Scalar": lambda x: (x, 3),
    "aten::sub.Tensor": lambda x: (x, x[0]),
    "aten::sum.dim_IntList": lambda x: (x, [0]),
}
EXAMPLES = {
    "contiguous": lambda: torch.rand(40, 40),
    "transposed": lambda: torch.rand(40, 40).t(),
    "every second": lambda: torch.rand(40, 80)[:, ::2],
    "float64": lambda: torch.rand(5, 5, dtype=torch.float64),
    "bfloat16": lambda: torch.rand(5, 5).bfloat16(),
    "one": lambda: torch.rand(1, 1),
}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", OUT_VARIANTS)
def test_a_variant_leaves_the_bits_that_the_operator_allocates(name: str, example: str) -> None:
    torch.manual_seed(0)
    args = ARGUMENTS.get(name, lambda x: (x,))(EXAMPLES[example]())
    packet, _, overload = name.removeprefix("aten::").partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    step = Step(func, args, (), (0,), (), 0)
    assert can_fill(step)
    result = func(*args)
    filling = filling_step(step)
    assert filling.kwargs == (("out", Slot(0)),)
    memory = torch.full((result.numel() + 64,), float("nan"), dtype=result.dtype)
    given = memory[32:-32].as_strided(result.shape, result.stride())
    filling.func(*args, **{key: fill(value, {0: given}) for key, value in filling.kwargs})
    assert torch.equal(given, result)
    assert memory[:32].isnan().all()
    assert memory[-32:].isnan().all()
