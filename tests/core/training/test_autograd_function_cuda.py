"""Drop-in training on a real GPU, captured, against eager."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nimble_core import Nimble
from nimble_core.compiler.passes import pad_matmul
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError, NimbleWarning
from tests.support.drop_in import CLOSE, STREAMS, assert_same_gradients, loss_of, on_gpu, pair
from tests.support.rewrite_models import results_are_padded
from tests.support.training_problems import OPTIMIZERS, Residual, images, made, perceptron
from tests.support.training_steps import assert_same, assert_values, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


# -- drop-in: equal to eager -----------------------------------------------------------------------------------------


def test_drop_in_with_float16_and_a_scaler() -> None:
    found = made("mlp", "cuda")
    eager = copy.deepcopy(found.model)
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        net = Nimble(found.model, STREAMS).prepare(found.draw()[0], training=True)
    training = [
        (one, OPTIMIZERS["adam"](one.parameters()), torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2))
        for one in (net, eager)
    ]
    for at in range(5):
        inputs, targets = found.draw()
        if at == 2:
            inputs[0, 0] = float("inf")
        for model, optimizer, scaler in training:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(found, model, inputs, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert training[0][2].state_dict() == training[1][2].state_dict()
    assert_same(state_of(found.model), state_of(eager), rtol=3e-2)
    assert training[0][2].get_scale() == 128.0
    net.close()


# -- drop-in: one forward's memory -----------------------------------------------------------------------------------


def test_a_second_forward_before_the_backward_of_the_first_runs_in_eager_and_says_so() -> None:
    net, eager = pair(Residual().to("cuda"), on_gpu(images()[0]), options=STREAMS)
    x, y = on_gpu(images()[0], images()[0])
    first = net(x)
    with pytest.warns(NimbleWarning, match="runs in eager"):
        second = net(y)
    second.sin().sum().backward()
    first.cos().sum().backward()
    first, second = eager(x), eager(y)
    second.sin().sum().backward()
    first.cos().sum().backward()
    assert_same_gradients(net, eager, rtol=CLOSE)
    assert_same(state_of(net), state_of(eager), rtol=CLOSE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x).sum().backward()
    net.close()


def test_a_forward_that_nobody_waits_for_does_not_stand_in_the_way() -> None:
    net, _ = pair(perceptron().to("cuda"), on_gpu(torch.randn(6, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            net(on_gpu(torch.randn(6, 8)))  # its output is dropped
        with torch.no_grad():
            net(on_gpu(torch.randn(6, 8)))
        net(on_gpu(torch.randn(6, 8))).sum().backward()
    net.close()


# -- drop-in: what autograd is asked ---------------------------------------------------------------------------------


def test_outputs_may_be_written_and_inputs_changed_before_the_backward() -> None:
    """Both are copies of the engine's own."""
    net, eager = pair(nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()).to("cuda"), on_gpu(torch.randn(6, 8)))
    data = torch.randn(6, 8)
    out = net(on_gpu(data))
    out.data.mul_(2)
    out.sum().backward()
    eager(on_gpu(data)).sum().backward()
    assert_same_gradients(net, eager, rtol=CLOSE)
    net.close()


@pytest.mark.parametrize("stream", ["default", "side"])
def test_on_any_stream(stream: str) -> None:
    net, eager = pair(Residual().to("cuda"), on_gpu(images()[0]), options=STREAMS)
    mine, theirs = OPTIMIZERS["momentum"](net.parameters()), OPTIMIZERS["momentum"](eager.parameters())
    side = torch.cuda.Stream() if stream == "side" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            x = on_gpu(images()[0])
            for model, optimizer in ((net, mine), (eager, theirs)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    torch.cuda.synchronize()
    assert_same(state_of(net, mine), state_of(eager, theirs), rtol=CLOSE)
    net.close()


@pytest.mark.parametrize("search", [False, True])
def test_a_backward_asked_for_on_another_stream_than_its_forward(search: bool) -> None:
    """As in eager, who asked for it may read the gradients at once."""
    net, eager = pair(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to("cuda"), on_gpu(torch.randn(6, 64))
    )
    side = torch.cuda.Stream()
    for _ in range(5):
        data = on_gpu(torch.randn(6, 64))
        found = []
        for model in (net, eager):
            model.zero_grad()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)  # some 50 ms
                loss = model(data).square().sum()
            if search:
                gradients = torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()
                gradients = tuple(one.grad for one in model.parameters())
            found.append([one.clone() for one in gradients])
        torch.testing.assert_close(*found)
    net.close()


@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_gradients_are_copied_into_rows_with_padding(fuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LEAST_SIZE", 1), ("_LEAST_WORK", 1), ("_WORTH", 0.0)):
        monkeypatch.setattr(pad_matmul, name, value)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 203)).to("cuda")
    eager = copy.deepcopy(model)
    x, y = on_gpu(torch.randn(4, 5, 32), torch.randint(203, (4, 5)))
    net = Nimble(model, Options(fuse=fuse)).prepare(x, training=True)
    half = net.engines[0].backward
    assert half is not None
    program = half.recorded.recording.program
    assert program.fuse == fuse, net.engines[0].notes
    assert program.inputs[0].sizes == (4, 5, 204)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, eager))
    for keep in (False, True, False):
        for one, optimizer in ((net, mine), (eager, theirs)):
            optimizer.zero_grad()
            loss = F.cross_entropy(one(x).flatten(0, 1), y.flatten())
            if one is net:  # what other calls have left in the padding
                for rest in half.executable._rests:
                    rest.fill_(float("nan"))
            if keep:
                loss.backward(retain_graph=True)
            loss.backward()
        assert_same_gradients(net, eager, rtol=1e-4)
        mine.step()
        theirs.step()
    assert_values(list(model.parameters()), list(eager.parameters()), rtol=1e-4)
    net.close()


# -- memory of a drop-in ---------------------------------------------------------------------------------------------


def images_net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Activations of 8 MiB each, positions and masks among what is saved."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 32, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Hardswish()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).to("cuda")
    return model, *on_gpu(torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3))


@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_a_backward_uses_up_what_its_forward_saved(fuse: Any, policy: str) -> None:
    model, x, y = images_net()
    eager = copy.deepcopy(model)
    net = Nimble(model, Options(fuse=fuse, policy=policy, tune="off")).prepare(x, training=True)
    half = net.engines[0].backward
    assert half is not None
    memory = half.executable.memory
    assert memory is not None
    storages = half.recorded.recording.program.storages
    inside = [one for one, offset in zip(storages, memory.offsets, strict=True) if 0 <= offset < memory.start]
    assert {one.role for one in inside} == {"constant", "intermediate"}
    for draw in range(3):
        x = torch.randn_like(x)
        found: list[list[torch.Tensor]] = []
        for one in (net, eager):
            loss = F.cross_entropy(one(x), y)
            for keep in (True, True, False):  # what was saved is read three times, the last time for good
                one.zero_grad()
                loss.backward(retain_graph=keep)
                found.append([weight.grad.clone() for weight in one.parameters()])
            loss = F.cross_entropy(one(x + draw), y)
            found.append([weight.grad.clone() for weight in one.parameters()])
            loss.backward()
            found.append([weight.grad.clone() for weight in one.parameters()])
        kept, again, spoilt, after, summed, *expected = found
        for at in range(len(kept)):
            assert apart(again[at], kept[at]) < 1e-5
            assert apart(spoilt[at], kept[at]) < 1e-5
            assert torch.equal(after[at], spoilt[at]), "a forward leaves gradients alone"
            assert apart(spoilt[at], expected[2][at]) < 1e-2
            assert apart(summed[at], expected[4][at]) < 1e-2
    assert half._separate is not None
    assert half.executable.nbytes < half._separate.nbytes - (8 << 20)
    net.close()


def test_outputs_have_eagers_strides_where_a_compiler_pads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    results_are_padded(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 61)).to("cuda")
    eager = copy.deepcopy(model)
    x, y = on_gpu(torch.randn(8, 16), torch.randint(0, 61, (8,)))
    options = Options(fuse="inductor", policy="single", tune="off")
    net = Nimble(model, options).prepare(x, training=True)
    made = net.engines[0].recorded.recording.program
    assert made.fuse == "inductor", net.engines[0].notes
    assert made.outputs[0].strides == (64, 1)
    for _ in range(2):
        x = torch.randn_like(x)
        found, expected = net(x), eager(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
        for one, logits in ((net, found), (eager, expected)):
            one.zero_grad()
            F.cross_entropy(logits, y).backward()
        assert_same_gradients(net, eager, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(net(x), eager(x), check_stride=True)
    net.close()


def test_a_backward_that_failed_is_not_tried_again_on_what_it_used_up() -> None:
    model, x, _ = images_net()
    net = Nimble(model, STREAMS).prepare(x, training=True)
    out = net(x)

    def fails(*_: Any) -> None:
        raise ValueError("no")

    handle = out.grad_fn.register_hook(fails)
    with pytest.raises(ValueError, match="no"):
        out.backward(torch.ones_like(out))
    handle.remove()
    with pytest.raises(InputError, match="a first try of it"):
        out.backward(torch.ones_like(out))
    net.close()


def test_what_was_measured_in_lent_memory_is_right() -> None:
    model, x, y = images_net()
    eager = copy.deepcopy(model)
    net = Nimble(model, Options(budget_s=5.0)).prepare(x, training=True)
    for model in (net, eager):
        F.cross_entropy(model(x), y).backward()
    assert_same_gradients(net, eager, rtol=1e-3)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    net.close()
