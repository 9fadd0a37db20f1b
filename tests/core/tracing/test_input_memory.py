"""Inputs that the forward reshapes in place, or that share memory with one that it writes, are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core import InputError, Nimble, NotStaticError, Options, TrainStep
from nimble_core.tracing.input_memory import require_same_windows, windows_of


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


QUICK = Options(fuse="none", tune="off")


def adds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_inputs_that_share_memory_are_refused_before_anything_is_written(policy: str) -> None:
    net = Nimble(adds, Options(fuse="none", policy=policy)).prepare(torch.randn(3, 3), torch.randn(3, 3))
    s, z, m = torch.randn(4, 3), torch.randn(3, 3), torch.randn(17)  # of the last, one element is both of theirs
    for a, b in ((z, z), (z, z.t()), (s[:3], s[1:]), (m[:9].view(3, 3), m[8:].view(3, 3))):
        before = s.clone(), z.clone()
        with pytest.raises(InputError, match=r"args\[0\], which the model writes.*args\[1\][\s\S]*clone"):
            net(a, b)
        assert torch.equal(s, before[0])
        assert torch.equal(z, before[1])
    expected = s[1:] * 2
    torch.testing.assert_close(net(s[:3].clone(), s[1:]), expected)
    net.close()


def test_inputs_that_are_only_read_may_share_memory() -> None:
    net = Nimble(torch.add, QUICK).prepare(torch.randn(3, 3), torch.randn(3, 3))
    z = torch.randn(3, 3)
    torch.testing.assert_close(net(z, z.t()), z + z.t())
    assert net.engines[0].apart is None
    net.close()
