"""A wrapper that passes for what it wraps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.tracing.step_wrapper import Around, require_training_mode
from nimble_core.utils.errors import InputError


def test_names_mode_and_type_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    around = Around(model)
    assert dict(around.named_modules()) == dict(model.named_modules())
    assert [name for name, _ in around.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in around.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert not around.training
    model.train()
    assert around.training
    around.double()
    assert all(one.dtype is torch.float64 for one in model.parameters())


def test_what_is_trained_is_in_training_mode_and_parts_of_it_need_not_be() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    require_training_mode(model)
    model[1].eval()
    require_training_mode(model)
    with pytest.raises(InputError, match="Sequential is in evaluation mode") as refused:
        require_training_mode(model.eval())
    assert "model.train()" in refused.value.fix


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_frozen_modules_are_not_trained() -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    with pytest.raises(InputError, match=r"frozen \(torch\.jit\.freeze\)"):
        require_training_mode(frozen)
    with pytest.raises(InputError, match=r"frozen \(torch\.jit\.freeze\)"):
        Nimble(frozen).prepare(torch.ones(1, 2), training=True)
