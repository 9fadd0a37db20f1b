"""Engines with folded weights: constants follow the weights that they were made of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.tracing.folded_weights import Folded
from nimble_core.utils.errors import DeviceError
from tests.support.folded_models import Foldable, example, folded_engine, made, with_folds
from tests.support.values import close

QUICK = Options(tune="off")


def step(model: nn.Module, **options: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    torch.optim.AdamW(model.parameters(), lr=0.05, **options).step()


def train_statistics(model: Foldable) -> None:
    model.norm.train()(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    model.norm.eval()


@torch.no_grad()
def add_in_place(model: Foldable) -> None:
    model.k.weight.add_(0.25)
    model.scale.add_(1)


@torch.no_grad()
def set_a_row(model: Foldable) -> None:
    model.conv.weight[1] = 0.75


def load(model: Foldable) -> None:
    model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})


@torch.inference_mode()
def average(model: Foldable) -> None:
    model.norm.running_var.lerp_(torch.full((4,), 2.0, dtype=torch.float64), 0.5)


def write_data(model: Foldable) -> None:
    model.v.weight.data.mul_(-1)
    model.norm.running_mean.numpy()[0] += 0.5


SHOWN: list[Callable[[Foldable], object]] = [
    step,
    lambda model: step(model, fused=True),
    train_statistics,
    add_in_place,
    set_a_row,
    load,
    average,
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*SHOWN, write_data]), st.integers(0, 3)), max_size=5),
    st.booleans(),
    st.sampled_from(["single", "nimble"]),
)
def test_folded_weights_follow_whatever_changes_them(
    changes: list[tuple[Callable[[Foldable], object], int]], first: bool, policy: str
) -> None:
    model = made()
    net, _ = folded_engine(model, check_first=first, options=Options(tune="off", policy=policy))
    for change, calls in ((lambda model: None, 1), *changes, (lambda model: None, 1)):
        change(model)
        if change is write_data:
            net.refresh()
        for seed in range(calls):
            with torch.no_grad():
                torch.testing.assert_close(net(example(seed)), model(example(seed)), rtol=1e-9, atol=1e-9)
    net.close()


def test_writes_past_the_version_counter_need_refresh() -> None:
    model = made()
    net, counted = folded_engine(model, check_first=False)
    before = net(example())
    write_data(model)
    assert torch.equal(net(example()), before)
    net.refresh()
    assert counted.times == 1
    with torch.no_grad():
        close(net(example()), model(example()))
    assert counted.times == 1
    net.close()
    net.refresh()
    Nimble(model).refresh()


@pytest.mark.parametrize("first", [True, False])
def test_folding_that_fails_is_tried_again(first: bool) -> None:
    model = made()
    net, counted = folded_engine(model, check_first=first)
    compute = counted.compute

    def fail() -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    add_in_place(model)
    counted.compute = fail
    for _ in range(2):
        with pytest.raises(DeviceError, match="out of memory"):
            net(example())
    counted.compute = compute
    with torch.no_grad():
        close(net(example()), model(example()))
    net.close()


class Statistics(nn.Module):
    """Running statistics without anything that counts how often they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


def test_what_another_engine_writes_is_noticed() -> None:
    model, x = Statistics().eval(), torch.randn(8, 4) + 3
    folds = Folded(lambda: [model.mean * -1], (torch.zeros(4),), (("mean", model.mean),))
    net = with_folds(model, folds, lambda x: x + folds.constants[0], x, check_first=True)
    training = Nimble(model.train(), QUICK).prepare(x)
    version = model.mean._version
    training(x)
    assert model.mean._version == version  # as in eager: a backward pass may need it
    model.eval()
    assert model.mean.abs().min() > 0
    close(net(x), x - model.mean)
    for one in (net, training):
        one.close()


def test_refresh_leaves_engines_of_the_other_mode_for_later() -> None:
    model = made()
    net, counted = folded_engine(model, check_first=True)
    model.train()
    write_data(model)
    net.refresh()
    assert counted.times == 0
    model.eval()
    with torch.no_grad():
        close(net(example()), model(example()))
    assert counted.times == 1
    net.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_threads_that_find_folded_weights_stale(policy: str, first: bool) -> None:
    size = 50_000
    weight = torch.zeros(size)
    computed: list[int] = []

    def compute() -> list[torch.Tensor]:
        computed.append(1)
        return [weight + 1, weight * -1]

    folds = Folded(compute, (torch.ones(size), torch.zeros(size)), (("weight", weight),))
    plus, minus = folds.constants

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * plus, x + minus

    options = Options(tune="off", policy=policy)
    net = with_folds(nn.Identity().eval(), folds, run, torch.ones(size), check_first=first, options=options)
    rounds, threads = 15, 4
    barrier = threading.Barrier(threads)
    wrong: list[str] = []

    def work() -> None:
        for turn in range(1, rounds + 1):
            if barrier.wait() == 0:
                with torch.no_grad():
                    weight.fill_(turn)
            barrier.wait()
            for _ in range(2):
                grown, shrunk = net(torch.ones(size))
                seen = set(grown.unique().tolist()), set(shrunk.unique().tolist())
                if seen != ({turn + 1.0}, {1.0 - turn}):
                    wrong.append(f"round {turn}: {seen}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong
    assert len(computed) == 1 + rounds
    net.close()
