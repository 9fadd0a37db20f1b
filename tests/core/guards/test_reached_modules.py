"""Modules that a function names, and their hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import InputError, Nimble, Options
from nimble_core.guards.module_guard import Watch
from nimble_core.guards.reached_modules import hooks_of_users, modules_behind

QUICK = Options(tune="off")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()


def assign_state(net: nn.Module) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def test_a_function_without_modules_has_nothing_to_watch() -> None:
    assert Watch(lambda x: x).change() == ""
    assert Watch(torch.relu).change() == ""


NAMED = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()


class Pipeline:
    """A plain object that holds a module."""

    def __init__(self, net: nn.Module) -> None:
        self.unet = net

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.unet(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.unet(x)


def with_default(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, through: nn.Module = net) -> torch.Tensor:
        return through(x)

    return run


def wrapped(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def run(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    return run


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda net: lambda x: net(x), "net"),
        (lambda net: net.forward, ""),
        (lambda net: Pipeline(net).decode, "unet"),
        (Pipeline, "unet"),
        (lambda net: partial(torch.func.functional_call, net, {}), "args[0]"),
        (lambda net: partial(lambda x, through: through(x), through=net), "through"),
        (with_default, "through"),
        (wrapped, "net"),
    ],
)
@pytest.mark.parametrize(
    ("change", "word"),
    [(assign_state, ".0.weight is another tensor than it was"), (nn.Module.train, " is in training mode now")],
)
def test_modules_that_a_function_names_are_watched(
    make: Callable[[nn.Module], Callable[..., Any]],
    name: str,
    change: Callable[[nn.Module], object],
    word: str,
) -> None:
    net, x = model(), torch.randn(2, 4)
    function = make(net)
    watch = Watch(function)
    replayed = Nimble(function, QUICK).prepare(x)
    assert watch.change() == ""
    torch.testing.assert_close(replayed(x), net(x))
    change(net)
    expected = name + word if name else word.removeprefix(".")
    assert watch.change() == (expected if name or "mode" not in word else f"the model{word}")
    with pytest.raises(InputError, match="not the one that was prepared"):
        replayed(x)


def test_globals_that_a_function_names_are_watched() -> None:
    watch = Watch(lambda x: NAMED(x))
    NAMED[1].train()
    try:
        assert watch.change() == "NAMED.1 is in training mode now"
    finally:
        NAMED[1].eval()


class Trainer:
    """An object with a module that only some of its methods use."""

    def __init__(self) -> None:
        self.teacher, self.student = model(), model()

    def teach(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.teacher.eval()
        return self.teacher(x)


class Coder(nn.Module):
    """A module of which one method uses one part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = model(), model()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def test_modules_that_a_function_names_and_does_not_use_may_change() -> None:
    x, trainer, coder = torch.randn(2, 4), Trainer(), Coder().eval()
    teach = Nimble(trainer.teach, QUICK).prepare(x)
    trainer.student.train()
    trainer.student[0] = nn.Linear(4, 4)
    torch.testing.assert_close(teach(x), trainer.teacher(x))
    predict = Nimble(trainer.predict, QUICK).prepare(x)
    trainer.teacher.train()
    torch.testing.assert_close(predict(x), trainer.predict(x))
    encode = Nimble(coder.encode, QUICK).prepare(x)
    coder.decoder = nn.Identity()
    torch.testing.assert_close(encode(x), coder.encode(x))
    coder.encoder[0] = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"encoder\.0 is another module"):
        encode(x)


def test_a_function_with_a_variable_that_has_no_value_yet() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return later(x)

    assert Watch(run).change() == ""
    later = model()
    assert Watch(run).change() == ""
    assert next(iter(modules_behind(run))) == "later"


def keep(*args: object) -> None:
    return None


def test_hooks_of_users_are_named() -> None:
    net = model()
    net[0].register_forward_hook(partial(keep))
    net.register_forward_pre_hook(keep)
    net[1].register_full_backward_hook(keep)
    assert hooks_of_users(net) == ["the forward pre-hook keep of the model", "the forward hook keep of 0"]
    assert hooks_of_users(net.train(), backward=True)[-1] == "the backward hook keep of 1"
    assert hooks_of_users(lambda x: net(x))[0] == "the forward pre-hook keep of net"
