"""Warnings of preparations and calls: said once, and of the user's line."""

from __future__ import annotations

import functools
import linecache
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import NimbleWarning
from tests.support.models import Deep
from tests.support.values import close

QUICK = Options(tune="off")


@pytest.mark.parametrize("training", [False, True])
def test_one_warning_says_that_what_hooks_keep_goes_stale(training: bool) -> None:
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        kept["out"] = out

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train(training), torch.randn(2, 4)
    handles = [
        model[0].register_forward_hook(functools.partial(keep)),
        model.register_forward_pre_hook(lambda *_: None),
    ]
    with pytest.warns(NimbleWarning) as given:
        Nimble(model, QUICK).prepare(x, training=training).close()
    (warning,) = given
    assert "forward" in str(warning.message)
    assert "and 1 more: what hooks compute is replayed" in str(warning.message)
    assert warning.filename == __file__
    handles[1].remove()
    with pytest.warns(NimbleWarning, match="the forward hook keep of 0: "):
        Nimble(model, QUICK).prepare(x, training=training).close()
    handles[0].remove()
    Nimble(model, QUICK).prepare(x, training=training).close()


def test_hooks_of_libraries_are_not_warned_of() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    assert model[0]._forward_pre_hooks
    with pytest.warns(NimbleWarning) as given:  # of the pruned weight, an attribute
        net = Nimble(model.eval(), QUICK).prepare(x)
    assert not any("hook" in str(one.message) for one in given)
    close(net(x), model(x))
    net.close()


class Skipping(nn.Module):
    """Leaves out its layer as LayerDrop does, on a draw that ``draw`` makes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = self.draw() < 1e-9
        return x if skipped else x + self.layer(x)


@pytest.mark.parametrize("way", ["inference", "in place of the model", "whole step"])
@pytest.mark.parametrize("library", ["random", "numpy.random"])
def test_one_warning_says_that_what_python_draws_is_frozen(library: str, way: str) -> None:
    draw = random.random if library == "random" else pytest.importorskip("numpy").random.uniform
    model, x = Skipping(draw), torch.randn(2, 4)
    net: Any = Nimble(model, QUICK)
    if way == "whole step":
        net = TrainStep(model, torch.Tensor.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with pytest.warns(NimbleWarning) as given:
        net.prepare(x, training=True) if way == "in place of the model" else net.prepare(x)
    (warning,) = given
    assert f"{library}: what was drawn in preparation is frozen in every replay" in str(warning.message)
    assert warning.filename == __file__
    net.close()


def test_parameters_in_training_mode_whose_gradients_no_output_carries_are_mentioned_once_an_engine() -> None:
    model, head, x = Deep().train(), nn.Linear(8, 2), torch.randn(2, 8)
    net = Nimble(model, QUICK).prepare(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    with pytest.warns(NimbleWarning, match=r"training mode, .*weight requires a gradient.*training=True") as caught:
        [head(net(x)).sum().backward() for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    net.requires_grad_(False).prepare(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    net.close()


def test_gradients_that_no_output_carries_are_mentioned_once_an_engine() -> None:
    model, x = Deep().eval(), torch.randn(2, 8)
    net = Nimble(model, QUICK).prepare(x)
    wants = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # parameters require gradients as well: in evaluation mode nothing is said
        net(x)
        with torch.no_grad():
            net(wants)
        with torch.inference_mode():
            net(wants)
    with pytest.warns(
        NimbleWarning, match=r"args\[0\] requires a gradient.*prepare\(\.\.\., training=True\)"
    ) as caught:
        outputs = [net(wants * 1), net(wants)]
    assert not any(one.requires_grad for one in outputs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    net.prepare(x)
    with pytest.warns(NimbleWarning, match="carry none"):
        net(wants)
    net.close()


def hooked(net: nn.Module) -> nn.Module:
    net.register_forward_pre_hook(lambda module, args: None)
    return net


def decorated(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @functools.wraps(net.forward)
    def call(x: torch.Tensor) -> torch.Tensor:
        return net(x)  # inside

    return call


HELD: dict[str, tuple[Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], str]] = {
    "called": (lambda net: net, "outside"),
    "with a hook": (hooked, "outside"),
    "in torch's containers": (lambda net: nn.Sequential(nn.Identity(), nn.Sequential(net)), "outside"),
    "in functools.wraps": (decorated, "inside"),
}


def lines_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """The lines that warnings name, of this file."""
    assert {one.filename for one in caught} <= {__file__}
    return [linecache.getline(one.filename, one.lineno).strip() for one in caught]


@pytest.mark.parametrize("how", HELD)
def test_a_warning_of_a_call_names_the_users_line(how: str) -> None:
    hold, where = HELD[how]
    x = torch.randn(2, 4)
    net = Nimble(nn.Linear(4, 2).train(), QUICK).prepare(x, training=True)
    held = hold(net)
    net.eval()
    with pytest.warns(NimbleWarning, match="not prepared in evaluation mode") as caught:
        held(x)  # outside
    assert [line.rpartition("# ")[2] for line in lines_of(list(caught))] == [where]
    net.close()
