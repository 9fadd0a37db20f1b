"""Drop-in training over time: mixed precision, modes, checkpoints, other shapes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError, NimbleWarning
from tests.support.drop_in import QUICK, Place, assert_same_gradients, loss_of, prepared
from tests.support.training_problems import OPTIMIZERS, Island, made
from tests.support.training_steps import assert_same, assert_values, state_of


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_autocast_equals_eager(name: str) -> None:
    found = made(name)
    eager = copy.deepcopy(found.model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net = Nimble(found.model, QUICK).prepare(found.draw()[0], training=True)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for _ in range(4):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(found, model, inputs, targets)
            loss.backward()
            optimizer.step()
        assert_same_gradients(found.model, eager)
        assert_same(state_of(found.model, mine), state_of(eager, theirs))
    net.close()


def test_training_and_evaluation_in_turn(on: Place) -> None:
    found, net, eager = prepared("resnet", on.options, on.device)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    for _ in range(2):
        inputs, targets = found.draw()
        for model, optimizer in ((net, mine), (eager, theirs)):
            optimizer.zero_grad()
            loss_of(found, model.train(), inputs, targets).backward()
            optimizer.step()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", NimbleWarning)
            out = net.eval()(inputs)
        with torch.no_grad():
            assert_values(out, eager.eval()(inputs), rtol=on.exact)
    assert_same(state_of(found.model, mine), state_of(eager, theirs), rtol=on.exact)

    net.eval().prepare(inputs)
    assert len(net.engines) == 2
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_values(net(inputs), eager(inputs), rtol=on.exact)
    net.train()
    assert net(inputs).requires_grad
    net.close()


def test_without_gradients_the_forward_still_trains_statistics() -> None:
    found, net, eager = prepared("resnet")
    inputs, _ = found.draw()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out, expected = net(inputs), eager(inputs)
        assert not out.requires_grad
        assert torch.equal(out, expected)
    assert_same(state_of(found.model), state_of(eager))
    loss_of(found, net, *found.draw()).backward()
    net.close()


@pytest.mark.parametrize("answer", ["error", "eager", "prepare"])
def test_a_short_last_batch_follows_on_new_shape(answer: str) -> None:
    found, net, eager = prepared("resnet", Options(tune="off", policy="single", on_new_shape=answer))
    inputs, targets = found.draw()
    if answer == "error":
        with pytest.raises(InputError, match="no engine is prepared for these inputs"):
            net(inputs[:2])
        with pytest.raises(InputError, match="no engine is prepared for these inputs"):
            net(inputs.double())
        assert_same(state_of(found.model), state_of(eager))
    else:
        for model in (net, eager):
            loss_of(found, model, inputs[:2], targets[:2]).backward()
        assert_same_gradients(found.model, eager)
        assert_same(state_of(found.model), state_of(eager))
    net.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backward_is_no_part_of_the_autocast_around_prepare(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = Island().train()
    model, x = copy.deepcopy(eager), torch.randn(3, 10, 8)
    with torch.autocast("cpu", dtype):
        net = Nimble(model, Options(tune="off", fuse="none")).prepare(x, training=True)
    for one in (net, eager):
        with torch.autocast("cpu", dtype):
            out = one(x)
        out.float().sin().sum().backward()
    assert all(one.grad is not None for one in net.parameters())
    assert_same_gradients(net, eager)
    net.close()


def test_a_backward_called_under_autocast_casts_nothing_and_says_so_once() -> None:
    torch.manual_seed(0)
    eager = Island().train()
    model, x = copy.deepcopy(eager), torch.randn(3, 10, 8)
    with torch.autocast("cpu", torch.bfloat16):
        net = Nimble(model, Options(tune="off")).prepare(x, training=True)
        with pytest.warns(NimbleWarning, match=r"backward\(\) was called under torch.autocast to bfloat16"):
            net(x).sum().backward()
        net.zero_grad()
        net(x).sum().backward()  # no warning is an error here
        out = eager(x)
    out.sum().backward()
    assert_same_gradients(net, eager)
    net.close()


@pytest.mark.parametrize("norm", ["layer", "group", "batch"])
def test_compiled_forwards_keep_what_eagers_backwards_read_in_eagers_types(norm: str) -> None:
    """Norms of mixed types: compilers keep their statistics in another one."""
    torch.manual_seed(0)
    made = {"layer": nn.LayerNorm(8), "group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)}[norm]
    eager = nn.Sequential(nn.Linear(8, 8), made).train()
    model, x = copy.deepcopy(eager), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        net = Nimble(model, Options(tune="off", fuse="inductor")).prepare(x, training=True)
    assert net.engines[0].recorded.recording.program.fuse == "inductor", net.engines[0].notes
    for one in (net, eager):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        out.float().sin().sum().backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=3e-2, atol=3e-2)
    net.close()


def test_what_was_freed_is_prepared_for_training_again() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    net = Nimble(model, Options(tune="off", fuse="none", on_new_shape="prepare")).prepare(x, training=True)
    for free in (net.close, net.float):
        free()
        net(x).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = None
    net.eval()
    net.close()
    assert not net(x).requires_grad
    net.close()
