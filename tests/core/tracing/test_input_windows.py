"""An input that the forward gives another window is refused; one that has its own again is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core import Nimble, NotStaticError, TrainStep
from nimble_core.tracing.input_windows import require_same_windows, windows_of


@pytest.mark.parametrize(
    "change", [lambda x: x.as_strided_((2, 2), (3, 1), 1), lambda x: setattr(x, "data", torch.ones(3, 3))]
)
def test_another_window_is_refused_by_name(change: Callable[[torch.Tensor], object]) -> None:
    tensors = [torch.ones(2), torch.ones(3, 3)]
    before = windows_of(tensors)
    require_same_windows(before, tensors, ["x", "y"])
    change(tensors[1])
    with pytest.raises(NotStaticError, match="the memory of y in place"):
        require_same_windows(before, tensors, ["x", "y"])


def test_written_values_and_a_window_that_is_back_are_accepted() -> None:
    x = torch.ones(2, 3)
    before = windows_of([x])
    x.mul_(2).t_().t_()
    require_same_windows(before, [x], ["x"])


class TurnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.clone())
        x.t_()
        return y  # type: ignore[no-any-return]


def turns_its_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.unsqueeze_(0)).square().mean()


def step(model: nn.Module, loss: Callable[..., torch.Tensor]) -> TrainStep:
    return TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        (lambda x: Nimble(TurnsItsInput()).prepare(x), r"args\[0\]"),
        (lambda x: Nimble(TurnsItsInput()).prepare(x, training=True), "input 0"),
        (lambda x: step(TurnsItsInput(), nn.functional.mse_loss).prepare(x, x.clone()), "inputs"),
        (lambda x: step(nn.Linear(4, 4), turns_its_target).prepare(x.clone(), x), "targets"),
    ],
    ids=["inference", "training", "whole step", "loss"],
)
def test_every_way_to_prepare_refuses_it_and_puts_it_back(prepare: Callable[[torch.Tensor], object], name: str) -> None:
    x = torch.rand(4, 4).mT
    with pytest.raises(NotStaticError, match=f"the memory of {name} in place"):
        prepare(x)
    assert (x.shape, x.stride()) == ((4, 4), (1, 4))
