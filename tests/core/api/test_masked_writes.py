"""Assignments where a mask is true: recorded where nobody waits to count the places, else refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError
from tests.support.values import close

QUICK = Options(tune="off")


class _NumbersWhereTrue(nn.Module):
    """Writes numbers where masks are true, which counts no places on a GPU, either."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(x)
        scores[x > 0.5] = -math.inf
        rows = x.clone()
        rows[x[:, 0] > 0] = 2
        rows[:, x[0] > 0] = torch.tensor(3.0)
        rows[:, :2][x[:, :2] > 1] = 0.25
        return scores.softmax(1), rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_written_where_a_mask_is_true_have_no_gradient(device: str) -> None:
    model = _NumbersWhereTrue().to(device)
    eager = copy.deepcopy(model)
    net = Nimble(model, QUICK).prepare(torch.randn(4, 4, device=device) - 1, training=True)
    for _ in range(3):
        x = torch.randn(4, 4, device=device) - 1
        for called in (net, eager):
            probabilities, rows = called(x)
            (probabilities.square().sum() + rows.sum()).backward()
    close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_what_was_computed_is_written_where_a_mask_is_true_on_a_gpu(fuse: Any) -> None:
    def model(x: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        means, given, columns = x.clone(), x * 1, x.t().clone()
        means[x > 0] = x.mean()
        given[given < -1] = value
        columns[:, x[:, 0] > 0] = value[None]
        columns.t()[x[:, 1] > 0] = x[0]
        return means, given.sum(1), columns

    x, value = torch.randn(4, 5, device="cuda"), torch.ones((), device="cuda")
    net = Nimble(model, Options(tune="off", fuse=fuse)).prepare(x, value)
    for _ in range(5):
        inputs = torch.randn(4, 5, device="cuda"), torch.randn((), device="cuda")
        close(net(*inputs), model(*inputs))


@pytest.mark.gpu
def test_numbers_of_the_host_that_change_between_reads() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step, total, filled = torch.tensor(1.0), x * 0, x.clone()
        for row in range(3):
            total = total + x * step
            filled[row][x[row] > 0] = step
            step += 1
        return total, filled

    net = Nimble(model, QUICK).prepare(torch.randn(4, 4, device="cuda"))
    for _ in range(3):
        x = torch.randn(4, 4, device="cuda")
        close(net(x), model(x))


@pytest.mark.gpu
def test_a_gradient_of_what_is_written_where_a_mask_is_true_is_refused_on_a_gpu() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.most = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[x > 1] = self.most
            return y

    with pytest.raises(CaptureError, match="shape depends on data"):
        Nimble(Clipped().cuda(), QUICK).prepare(torch.randn(4, 4, device="cuda"), training=True)


@pytest.mark.gpu
def test_many_values_written_where_a_mask_is_true_are_refused_on_a_gpu_with_what_to_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x[:, 0] > 0] = x * 2
        return y

    with pytest.raises(CaptureError, match="writes where a mask is true") as caught:
        Nimble(model, QUICK).prepare(torch.ones(4, 4, device="cuda"))
    assert "torch.where" in caught.value.fix
