"""A call that fails is named, and leaves parameters, buffers, inputs and random state as eager leaves them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.utils.errors import DeviceError, NimbleError
from tests.support.host_models import Prepared, drawn_streams, eager, same


def lookup(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.exp() @ table.sin().index_select(0, indices).t()


@pytest.mark.parametrize("worker", [0, 1])
def test_an_error_names_the_call_and_leaves_the_executable_usable(worker: int) -> None:
    good, table = torch.tensor([0, 1]), torch.randn(4, 4)
    made = Prepared(lookup, good, table)
    assert [call.label for call in made.recording.program.calls] == ["exp", "sin", "index_select", "mm"]
    other = 1 - worker
    executable = made.capture(plan_streams(made.graph, [other, worker, worker, other], policy="mine"))
    expected = eager(lookup, [good, table])
    for _ in range(3):
        assert same(executable.run([good, table]), expected)
        with pytest.raises(DeviceError) as caught:
            executable.run([torch.tensor([0, 9]), table])
        assert "index_select" in caught.value.where
        assert __file__.rpartition("/")[2] in caught.value.where
        assert isinstance(caught.value.__cause__, IndexError)
    assert same(executable.run([good, table]), expected)
    executable.close()


class Counting(nn.Module):
    """Looks rows up, and changes what stays on the way: in program order some before, some after."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.norm = nn.BatchNorm1d(4)
        self.counts = nn.ParameterList(nn.Parameter(torch.zeros(4), requires_grad=False) for _ in range(3))

    def forward(
        self, table: torch.Tensor, written: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> list[torch.Tensor]:
        found = []
        for kind, which in self.steps:
            if kind == "look up":
                found.append((table * which).index_select(0, (first, second)[which % 2]))
            elif kind == "count":
                self.counts[which].add_(1)
            elif kind == "normalise":
                found.append(self.norm(table))
            elif kind == "draw":
                found.append(torch.rand(2) + which)
            elif kind == "write":
                written[which].mul_(2)
            else:
                found.append((table @ table.t()).exp())
        return [*found, table.sum()]

    def state(self, written: torch.Tensor) -> list[torch.Tensor]:
        return [one.clone() for one in (*self.state_dict().values(), written, torch.get_rng_state())]


counting = st.lists(
    st.tuples(
        st.sampled_from(["look up", "look up", "count", "count", "normalise", "draw", "write", "compute"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(counting, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_a_call_that_fails_leaves_what_stays_as_eager_leaves_it(
    steps: list[tuple[str, int]], draw: random.Random, one_fails: bool, in_turn: bool
) -> None:
    good, bad, table = torch.tensor([0, 1]), torch.tensor([0, 9]), torch.randn(4, 4)
    args = (table, torch.ones(4, 3).t() if draw.random() < 0.5 else torch.ones(3, 4), good, good.clone())
    model = Counting(steps)
    made = Prepared(model, *args)
    order = None
    if not in_turn:
        ranks = [draw.random() for _ in range(made.graph.size)]
        order = list(networkx.lexicographical_topological_sort(made.graph.to_networkx(), key=ranks.__getitem__))
    executable = made.capture(drawn_streams(made.graph, draw, draw.randint(1, 3), order))
    begin = copy.deepcopy(model.state_dict())
    for indices in ((good, good), (bad, good) if one_fails else (bad, bad), (good, bad), (good, good)):
        left = []
        for run in (model, lambda *given: executable.run(given)):
            model.load_state_dict(begin)
            torch.manual_seed(3)
            written = torch.ones(3, 4)  # in other strides than the recorded ones, or not
            with torch.no_grad():
                try:
                    returned = run(table, written, *indices)
                except (IndexError, DeviceError):
                    returned = []
            left.append([*model.state(written), *returned])
        expected, found = left
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    executable.close()


@pytest.mark.parametrize(("policy", "streams"), [("single", 1), ("nimble", 3), ("critical_path", 2)])
def test_a_training_step_whose_loss_fails_changes_what_eager_changes(policy: str, streams: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, good = torch.randn(4, 4), torch.tensor([0, 1, 2, 3])
    options = Options(fuse="none", policy=policy, max_streams=streams)
    step = TrainStep(model, nn.CrossEntropyLoss(), optimizer, options=options).prepare(x, good)
    before = copy.deepcopy(model.state_dict())
    step(x, good)
    after = copy.deepcopy(model.state_dict())
    for count in (2, 3, 4):
        with pytest.raises(NimbleError, match="out of bounds"):
            step(x, torch.tensor([9, 1, 2, 3]))
        assert int(model[1].num_batches_tracked) == count  # the forward came to that
    assert [int(kept["step"]) for kept in optimizer.state.values()] == [1] * 4
    assert all(torch.equal(one, after[name]) for name, one in model.named_parameters())
    assert not any(torch.equal(one, before[name]) for name, one in model.named_parameters())
    step(x, good)
    assert [int(kept["step"]) for kept in optimizer.state.values()] == [2] * 4


class ReadAfterTaking(nn.Module):
    """A result is read by several calls, between what may fail and what changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(8, 8))
        self.register_buffer("second", torch.zeros(8, 8))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x)
        b = a.exp()
        self.first.add_(a)
        c = x.index_select(0, index)
        self.second.add_(c)
        d = a.sin()
        return b.cos().sinh() + d


def in_any_order(seed: int) -> Callable[[CallGraph, Any], Schedule]:
    """A policy that puts calls on two streams, in an order of its own."""

    def policy(graph: CallGraph, costs: Any) -> Schedule:
        draw, ranks = random.Random(seed), list(range(graph.size))
        draw.shuffle(ranks)
        order = list(networkx.lexicographical_topological_sort(graph.to_networkx(), key=ranks.__getitem__))
        return drawn_streams(graph, draw, 2, order)

    return policy


def test_calls_that_move_within_their_stream_leave_reuse_of_memory_in_order() -> None:
    x, index = torch.randn(8, 8), torch.arange(8)
    for seed in range(100):
        model = ReadAfterTaking()
        eager = copy.deepcopy(model)
        net = Nimble(model, Options(fuse="none", tune="off", policy=in_any_order(seed))).prepare(x, index)
        torch.testing.assert_close(net(x, index), eager(x, index))
        with pytest.raises(NimbleError):
            net(x, index + 1)
        with pytest.raises(IndexError):
            eager(x, index + 1)
        torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))
        net.close()
