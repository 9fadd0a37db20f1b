"""A Nimble stands for the wrapped model: parameters, attributes, mode and state are the model's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from tests.support.models import Deep, Norms
from tests.support.values import close

QUICK = Options(tune="off")


def test_parameters_and_state_are_the_models_own() -> None:
    model = Norms().eval()
    net = Nimble(model, QUICK)
    assert list(net.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(net.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(net.buffers(), model.buffers(), strict=True))
    assert [name for name, _ in net.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    assert net.convolution is model.convolution
    assert isinstance(net, nn.Module)
    before = copy.deepcopy(model.__dict__)
    net.prepare(torch.randn(1, 3, 4, 4))
    assert model.__dict__.keys() == before.keys()
    assert type(model) is Norms
    model.register_buffer("later", torch.ones(1))
    assert "later" in net.state_dict()
    net.close()


def test_a_function_can_be_wrapped() -> None:
    net = Nimble(torch.sin, QUICK).prepare(torch.ones(2))
    close(net(torch.zeros(2)), torch.zeros(2))
    assert list(net.parameters()) == []
    assert net.state_dict() == {}
    net.eval()
    net.train()
    net.close()


def test_copies_start_unprepared() -> None:
    model, x = Deep(), torch.randn(2, 8)
    net = Nimble(model, Options(tune="off", outputs="static")).prepare(x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin, Nimble)
        assert twin.engines == ()
        assert list(twin.state_dict()) == list(model.state_dict())
        assert next(twin.parameters()) is not next(net.parameters())
        close(twin.prepare(x)(x), model(x))
        twin.close()
    close(net(x), model(x))
    net.close()


class Scaled(nn.Module):
    """What it is lies in an attribute and in an extra state, too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_attributes_of_the_model_are_written_where_they_are_read() -> None:
    model = Scaled(1.0)
    net = Nimble(model, Options(tune="off"))
    net.scale = 5.0
    net.note = "mine"
    assert model.scale == 5.0
    assert not hasattr(model, "note")
    x = torch.randn(3, 2)
    with torch.no_grad():
        torch.testing.assert_close(net.prepare(x)(x), model(x))
    net.close()


@pytest.mark.parametrize("around", [lambda one: one, lambda one: nn.Sequential(one, nn.Linear(2, 2))])
def test_state_dicts_are_the_models_with_their_extra_state(around: Callable[[nn.Module], nn.Module]) -> None:
    for ours, theirs in ((Nimble(Scaled(2.0)), Scaled(3.0)), (Scaled(2.0), Nimble(Scaled(3.0)))):
        mine, other = around(ours), around(theirs)
        assert list(mine.state_dict()) == list(other.state_dict())
        mine.load_state_dict(other.state_dict())
        assert ours.scale == theirs.scale == 3.0
        torch.testing.assert_close(ours.layer.weight, theirs.layer.weight)
