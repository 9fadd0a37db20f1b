"""What a model reads or writes past the dispatcher is noticed: such a model is called as it is, or refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, NimbleWarning, NotStaticError
from tests.support.values import close

QUICK = Options(tune="off")


def test_values_from_numpy_are_captured_as_a_whole_or_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    with pytest.warns(NimbleWarning, match="called as it is") as caught:
        net = Nimble(forward, QUICK).prepare(torch.randn(3))
    assert len(caught) == 1
    x = torch.randn(3)
    close(net(x), x * 3)
    assert "called as it is" in net.engines[0].notes[-1]
    assert "launch" not in net.engines[0].notes[-1]  # there are none on the host
    net.close()
    with pytest.raises(CaptureError, match="outside of torch"):
        Nimble(forward, Options(strict=True)).prepare(torch.randn(3))


def through_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[0] += 1


def through_dlpack(x: torch.Tensor) -> None:
    import numpy

    numpy.from_dlpack(x.detach())[-1] = 3


@pytest.mark.parametrize("place", ["output", "middle", "slice"])
def test_results_filled_past_the_dispatcher_are_noticed(place: str) -> None:
    """What a C++ extension does: torch makes the memory, and no call fills it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return y if place == "output" else y[1:].neg() if place == "slice" else y * 2

    x = torch.randn(4)
    with pytest.warns(NimbleWarning, match="called as it is.*no call has filled"):
        net = Nimble(model, QUICK).prepare(x)
    x = torch.randn(4)
    close(net(x), model(x))
    net.close()
    with pytest.raises(CaptureError, match=r"outside of torch .*C\+\+"):
        Nimble(model, Options(strict=True)).prepare(x)


@pytest.mark.parametrize("fuse", ["none", "library"])
def test_a_model_whose_replays_are_wrong_is_called_as_it_is(fuse: Any) -> None:
    """Whatever the reason is, such as a write that nothing shows."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, (x * 3).relu()
        ctypes.memmove(y.data_ptr(), z.data_ptr(), x.nbytes)
        return y * 2 + z.exp()

    x = torch.randn(4, 4)
    with pytest.warns(NimbleWarning, match="called as it is.*a one-stream replay is not what eager computes"):
        net = Nimble(model, Options(fuse=fuse, budget_s=0.2)).prepare(x)
    assert net.engines[0].plan is None
    x = torch.randn(4, 4)
    close(net(x), model(x))
    net.close()
    with pytest.raises(CaptureError, match="not what eager computes"):
        Nimble(model, Options(fuse=fuse, budget_s=0.2, strict=True)).prepare(x)


def test_memory_that_is_filled_by_calls_or_counts_for_nothing_is_no_news() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.mul(x, 2, out=y)
        z = x.new_empty(4, 4)
        z[0], z[1:] = y, 1
        return torch.addmm(torch.empty(4, 4), z, z, beta=0) + torch.empty(0).sum() + torch.empty(4).fill_(1)

    x = torch.randn(4)
    net = Nimble(model, Options(strict=True)).prepare(x)
    x = torch.randn(4)
    close(net(x), model(x))
    net.close()


def by_permutation(x: torch.Tensor) -> None:
    x.detach().numpy().sort()


@pytest.mark.parametrize("change", [through_numpy, through_dlpack, by_permutation])
@pytest.mark.parametrize("what", ["result", "output", "constant", "input", "weight"])
def test_results_changed_out_of_sight_are_noticed(change: Callable[[torch.Tensor], None], what: str) -> None:
    """What numpy writes into a tensor is no call: a replay would go on with what was there before."""
    pytest.importorskip("numpy")
    weight = nn.Parameter(torch.randn(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            constant = torch.arange(3.0).flip(0)
            change({"result": y, "output": y, "constant": constant, "input": x, "weight": self.weight}[what])
            return y if what == "output" else y + constant

    model, x, kept = Model(), torch.tensor([2.0, 3.0, 1.0]), weight.detach().clone()
    with pytest.warns(NimbleWarning, match=r"memory handed out in the model at .*test_hidden_state.py"):
        net = Nimble(model, QUICK).prepare(x)
    assert torch.equal(weight, kept)
    assert torch.equal(x, torch.tensor([2.0, 3.0, 1.0]))
    with pytest.raises(CaptureError, match="changed outside of torch") as caught:
        Nimble(model, Options(strict=True)).prepare(x)
    assert "test_hidden_state.py" in caught.value.where
    x = torch.randn(3)
    mine = net(x.clone())
    with torch.no_grad():
        weight.copy_(kept)
    close(mine, model(x.clone())) if what != "weight" else None
    net.close()


def test_a_refusal_holds_though_the_model_catches_it() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            scale = x.sum().item()
        except Exception:
            scale = 1.0
        return x * scale

    with pytest.raises(CaptureError, match="gives the host a tensor") as caught:
        Nimble(forward, QUICK).prepare(torch.rand(3))
    assert "test_hidden_state.py" in caught.value.where


def test_an_error_about_values_that_the_model_catches_is_refused() -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        for more in (0.0, 1.0):
            try:
                return torch.linalg.cholesky(x + more * torch.eye(3))
            except RuntimeError:
                pass
        return x

    with pytest.raises(NotStaticError, match="caught the error of a call, which may depend on values") as caught:
        Nimble(factor, QUICK).prepare(-0.5 * torch.eye(3))
    assert "_linalg_check_errors" in caught.value.where

    def reshaped(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.view(-1)
        except RuntimeError:
            return x.reshape(-1)

    x = torch.rand(2, 3).t()
    assert torch.equal(Nimble(reshaped, QUICK).prepare(x)(x), x.reshape(-1))


def test_containers_of_the_callers_are_not_changed() -> None:
    def forward(x: torch.Tensor, given: list[Any]) -> torch.Tensor:
        y = x + given[0]
        given[0] = given[0] * 2
        return y

    first = torch.rand(3)
    given = [first, 2]
    with pytest.raises(CaptureError, match=r"the forward changes args\[1\]") as caught:
        Nimble(forward, QUICK).prepare(torch.rand(3), given)
    assert given[0] is first
    assert given[1:] == [2]
    assert "return" in caught.value.fix


def test_what_only_reads_through_numpy_stays_a_replay() -> None:
    pytest.importorskip("numpy")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.detach().numpy().sum()
        y += 1  # a call may write it
        y.detach().numpy().sum()
        return y * 2

    net = Nimble(forward, QUICK).prepare(torch.randn(3))
    assert net.engines[0].notes == ()
    assert net.engines[0].schedule.policy == "single"
    net.close()


def test_an_input_that_is_memory_of_the_model() -> None:
    inner = nn.Linear(4, 4)
    for model, held in ((inner, "parameter weight"), (lambda w: w @ inner.weight + 1, "constant")):
        with pytest.raises(NotStaticError, match=rf"it reads args\[0\] in one run, {held} in the other") as caught:
            Nimble(model, QUICK).prepare(inner.weight)
        assert "prepare with args[0].clone()" in str(caught.value)
        net = Nimble(model, QUICK).prepare(inner.weight.detach().clone())
        close(net(inner.weight.detach()), model(inner.weight))
        net.close()
