"""What eager makes of fresh inputs: without a trace, with what is written, and with enough of what rounding may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.validation.eager_cases import eager_cases
from nimble_core.validation.rounding_noise import perturbed
from nimble_viz import compare
from tests.support.tent_maps import Chaotic, recorded_step

BETWEEN = 11
"""Times after which rounding is far above the usual tolerance, and far below what inputs do."""


def recorded(model: nn.Module, x: torch.Tensor) -> Recorded:
    return record_static(FakeDevice(), model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())


class Counting(nn.Module):
    """Outputs that say nothing of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.mul_(0.9).add_(y.mean(0))
        return torch.dropout(self.norm(y), 0.5, self.training)


@pytest.mark.parametrize("truth", [False, True])
def test_they_leave_no_trace_and_are_the_same_each_time(truth: bool) -> None:
    model = Counting().train()
    found = recorded(model, torch.randn(16, 8))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = eager_cases(found, truth=truth), eager_cases(found, truth=truth)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    for (inputs, outputs), (again, others) in zip(first.eager, second.eager, strict=True):
        assert torch.equal(inputs[0], again[0])
        assert torch.equal(outputs[0], others[0])
    assert not torch.equal(first.eager[0][0][0], first.eager[1][0][0])
    assert ("random numbers" in first.why) == truth


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_inference_writes_is_compared(loses: bool, dtype: torch.dtype) -> None:
    model = Counting().eval().to(dtype)
    found = recorded(model, torch.randn(16, 8, dtype=dtype))

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        before = model.seen.clone()
        with torch.no_grad():
            made = model(*inputs)
            if loses:
                model.seen.copy_(before)
        return [made]

    kept = model.seen.clone()
    check = eager_cases(found, truth=True).judged("found", found, run)
    assert torch.equal(model.seen, kept)
    assert check.differs == loses, check.reason
    assert check.passed != loses
    assert ("seen was not updated" in check.reason) == loses


def moved(found: Recorded, inputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return what an honest step with other rounding makes of ``inputs``."""
    with state_kept(found), perturbed(seed), torch.no_grad():
        return [one.clone() for one in flatten(found.model(*inputs))[0]]


def test_an_honest_replay_is_not_convicted_by_one_run_in_which_rounding_did_little() -> None:
    found = recorded_step(Chaotic(BETWEEN))
    once, thorough = (replace(eager_cases(found, thorough=many), written=()) for many in (False, True))
    quiet = replace(once, moved=[outputs for _, outputs in once.eager])
    assert quiet.judged("moved", found, lambda inputs: moved(found, inputs, 99)).differs
    assert thorough.judged("moved", found, lambda inputs: moved(found, inputs, 99)).passed


class Branches(nn.Module):
    """Writes where the recorded calls do not: for other strides, and in any run but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), None
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            self.seen.add_(1)
        if self.last is not None:
            self.seen.add_(10)
        self.last = x
        return self.layer(x).relu()


COMPILED = [pytest.mark.compiler, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:the forward changes attributes")
@pytest.mark.parametrize("way", ["prepare", "compare"])
@pytest.mark.parametrize("fuse", ["none", "library", pytest.param("inductor", marks=COMPILED)])
def test_runs_that_take_another_branch_leave_no_trace(way: str, fuse: Any) -> None:
    model, x = Branches(), torch.randn(3, 8)[:, ::2]
    before = {name: one.clone() for name, one in model.state_dict().items()}
    options = Options(fuse=fuse, tune="off", budget_s=0.1)
    Nimble(model, options).prepare(x) if way == "prepare" else compare(model, x, options=options)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.last is None


class Masking(Chaotic):
    """Some of its outputs are infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(torch.eye(8, 64, dtype=torch.bool), -torch.inf)


@pytest.mark.parametrize("thorough", [False, True])
def test_what_rounding_does_is_known_of_what_is_partly_infinite(thorough: bool) -> None:
    found = recorded_step(Masking(3), loss=lambda y: y.nan_to_num(neginf=0).sum())
    cases = eager_cases(found, thorough=thorough)
    assert any(one.isinf().any() for one in cases.eager[0][1])
    for (_, outputs), moved in zip(cases.eager, cases.moved or (), strict=True):
        for one, other in zip(outputs, moved, strict=True):
            assert not torch.equal(one, other)
            assert torch.equal(one.isinf(), other.isinf())
