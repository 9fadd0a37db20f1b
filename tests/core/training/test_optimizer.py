"""Captured optimizers against the user's own, step by step; what stays untouched."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError
from tests.support.optimizers import (
    CASES,
    FUSED,
    Kind,
    Replayed,
    assert_same,
    eager,
    everything,
    gradients_of,
    in_two_groups,
    members,
    parameters,
    twins,
)

each_case = pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=[f"{kind.__name__}-{'-'.join(options)}" for kind, options in CASES]
)

SCENARIOS = {
    "fresh": "s" * 12,
    "resumed": "eee" + "s" * 5,
    "eager steps between": "sssseesss",
    "a state loaded": "ssksssslsss",
    "rates halved": "sshsshsss",
    "a checkpoint in a new eager optimizer": "ssssnee",
}
"""One letter an action: a step replayed, or in eager; the state kept, or loaded; rates halved; a new optimizer made."""


@each_case
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_replays_of_one_recording_follow_eager(kind: Kind, options: dict[str, Any], scenario: str) -> None:
    mine, other = twins(kind, options)
    actions = SCENARIOS[scenario]
    for step in range(actions.index("s")):
        for one in (mine, other):
            eager(one, gradients_of(members(one), step))
    own = {id(value) for entry in mine.state.values() for value in entry.values()}
    replayed = Replayed(CapturedOptimizer(mine, "cpu"))
    kept: list[Any] = []
    for step, action in enumerate(actions[actions.index("s") :], actions.index("s")):
        if action == "k":
            kept = [copy.deepcopy(one.state_dict()) for one in (mine, other)]
        if action == "l":
            for one, state in zip((mine, other), kept, strict=True):
                one.load_state_dict(copy.deepcopy(state))
        if action == "h":
            for group in (*mine.param_groups, *other.param_groups):
                group["lr"] *= 0.5
        if action == "n":
            copies = [torch.nn.Parameter(one.detach().clone()) for one in members(mine)]
            resumed = kind(in_two_groups(copies), **options)
            resumed.load_state_dict(copy.deepcopy(mine.state_dict()))
            mine = resumed
        if action == "s":
            replayed.step(gradients_of(members(mine), step))
        if action == "e":
            eager(mine, gradients_of(members(mine), step))
        if action in "se":
            eager(other, gradients_of(members(other), step))
        assert_same(mine, other)
    assert replayed.replays >= actions.count("s") - (scenario != "resumed")  # but for the first, which makes the state
    if scenario == "resumed":
        assert {id(value) for entry in mine.state.values() for value in entry.values()} == own


@each_case
def test_buckets_give_the_same_bits(kind: Kind, options: dict[str, Any]) -> None:
    one, two = twins(kind, options)
    whole = Replayed(CapturedOptimizer(one, "cpu"))
    parts = Replayed(CapturedOptimizer(two, "cpu"), buckets=[[3, 0], [], [2], [1]])
    assert len(parts.tape.calls) > len(whole.tape.calls)
    for step in range(5):
        whole.step(gradients_of(members(one), step))
        parts.step(gradients_of(members(two), step))
    assert_same(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_types_of_parameters(kind: Kind, dtype: torch.dtype) -> None:
    if kind is optim.SGD and dtype is not torch.float64:
        with pytest.raises(InputError, match=f"SGD has no form that stays on the device: on cpu for {dtype}"):
            CapturedOptimizer(kind(parameters(dtype=dtype), lr=0.1), "cpu")
        return
    mine, other = twins(kind, {"lr": 0.1}, dtype=dtype)
    replayed = Replayed(CapturedOptimizer(mine, "cpu"))
    for step in range(6):
        replayed.step(gradients_of(members(mine), step))
        eager(other, gradients_of(members(other), step))
    assert_same(mine, other, **({"rtol": 5e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}))


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_found_inf_leaves_a_step_out(kind: Kind, options: dict[str, Any]) -> None:
    mine, other = twins(kind, options)
    captured = CapturedOptimizer(mine, "cpu")
    captured.require_scaling()
    found_inf = torch.zeros(())
    replayed = Replayed(captured, found_inf=found_inf)
    for step in range(6):
        found_inf.fill_(float(step in (2, 3)))
        replayed.step(gradients_of(members(mine), step))
        if step not in (2, 3):
            eager(other, gradients_of(members(other), step))
        assert_same(mine, other)


# -- nothing else is touched -------------------------------------------------------------------------------------------


@each_case
def test_construction_and_update_change_values_alone(kind: Kind, options: dict[str, Any]) -> None:
    mine, _ = twins(kind, options)
    members(mine)[1].grad = torch.ones(5)
    before = everything(mine)
    captured = CapturedOptimizer(mine, "cpu")
    captured.refresh()
    captured.sync()
    assert everything(mine) == before
    flags = [dict(group) for group in mine.param_groups]
    grads, states = [one.grad for one in members(mine)], dict(mine.state)
    captured.update(gradients_of(members(mine), 0))
    assert [dict(group) for group in mine.param_groups] == flags
    assert all(one.grad is grad for one, grad in zip(members(mine), grads, strict=True))
    assert mine.state == states


class Failing(TorchDispatchMode):
    """Lets the first calls pass, then fails."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device is gone")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failing_update_puts_gradients_back(after: int) -> None:
    mine, _ = twins(optim.NAdam, {})
    captured = CapturedOptimizer(mine, "cpu")
    members(mine)[1].grad = kept = torch.ones(5)
    with pytest.raises(RuntimeError, match="the device is gone"), Failing(after):
        captured.update(gradients_of(members(mine), 0))
    assert members(mine)[0].grad is None
    assert members(mine)[1].grad is kept
    assert not mine.state
    assert "cpu" not in sys.modules["torch.optim.nadam"]._get_capturable_supported_devices()


def test_update_refuses_parameters_that_were_converted() -> None:
    mine, _ = twins(optim.SGD, {"lr": 0.1})
    captured = CapturedOptimizer(mine, "cpu")
    members(mine)[0].data = members(mine)[0].data.t().contiguous().t()
    before = everything(mine)
    with pytest.raises(InputError, match="moved or converted"):
        captured.update([None] * 4)
    assert everything(mine) == before


# -- captured in CUDA graphs -------------------------------------------------------------------------------------------


@contextmanager
def no_wait() -> Iterator[None]:
    """Inside, waiting for the device raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Graphed:
    """An update captured once, replayed at each step."""

    def __init__(self, captured: CapturedOptimizer, **update: Any) -> None:
        self.captured = captured
        self.buffers = [torch.zeros_like(one) for one in captured.parameters]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            captured.update(self.buffers, **update)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        with no_wait():
            self.captured.sync()
        assert not self.captured.fresh_for(set(range(len(gradients))))
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer.copy_(gradient)
        self.graph.replay()


@pytest.mark.gpu
@each_case
def test_replays_of_a_cuda_graph_follow_eager(kind: Kind, options: dict[str, Any]) -> None:
    mine, other = twins(kind, options, device="cuda")
    captured = CapturedOptimizer(mine, "cuda")
    for one in (mine, other):
        eager(one, gradients_of(members(one), 0))
    captured.sync()  # counters from the host, which waits
    graphed = Graphed(captured, buckets=[[0, 3], [1, 2]])
    schedules = [optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (mine, other)]
    captured.sync()
    for step in range(1, 12):
        gradients = gradients_of(members(mine), step)
        if step == 5:
            eager(mine, gradients)
        else:
            graphed.step(gradients)
        eager(other, gradients)
        for schedule in schedules:
            schedule.step()
    assert_same(mine, other)


@pytest.mark.gpu
def test_rates_on_the_device_are_followed_without_waiting() -> None:
    rate = torch.tensor(0.1, device="cuda")
    captured = CapturedOptimizer(optim.Adam(parameters(device="cuda"), lr=rate, fused=True), "cuda")
    rate.data.fill_(0.5)
    with no_wait():
        captured.sync()
    assert captured.rates[0].item() == 0.5
