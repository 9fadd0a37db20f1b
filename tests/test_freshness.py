"""A model that is no longer the one that was prepared is noticed, and told from one whose values changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core import InputError, Nimble, Options
from nimble_core.freshness import Watch


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()


def replace_parameter(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.zeros(4, 4))


def replace_data(net: nn.Sequential) -> None:
    net[0].weight.data = torch.zeros(4, 4)


def replace_module(net: nn.Sequential) -> None:
    net[0] = nn.Linear(4, 4)


def assign_state(net: nn.Sequential) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def train_a_part(net: nn.Sequential) -> None:
    net[2].train()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (replace_parameter, "0.weight is another tensor"),
        (replace_data, "0.weight has other memory"),
        (replace_module, "0 is another module"),
        (assign_state, "another tensor"),
        (train_a_part, "2 is in training mode"),
        (nn.Module.double, "other memory"),
    ],
)
def test_what_a_replay_cannot_follow_is_refused(change: Callable[[nn.Sequential], object], word: str) -> None:
    net, x = model(), torch.randn(2, 4)
    watch = Watch(net)
    replayed = Nimble(net, Options(tune="off")).prepare(x)
    assert watch.change() == ""
    change(net)
    assert word in watch.change()
    with pytest.raises(InputError, match="prepare") as caught:
        replayed(x)
    assert word in str(caught.value)


@torch.no_grad()
def test_values_may_change() -> None:
    net, x = model(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off")).prepare(x)
    net[0].weight.mul_(2)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert torch.equal(replayed(x), net(x))


def test_a_function_has_nothing_to_watch() -> None:
    assert Watch(lambda x: x).change() == ""
