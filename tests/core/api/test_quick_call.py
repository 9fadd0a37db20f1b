"""The short way of a call is gone only where all is as usual, and says then what the long way says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import InputError, Nimble, Options
from nimble_core.api.engine import Engine
from nimble_core.runtime.device import Quick, Ready
from nimble_core.tracing.recording_contexts import thread_recording
from nimble_core.utils.errors import NimbleWarning
from tests.support.models import CASES

X = torch.rand(2, 4)


class Runs:
    """What a GPU's executable does beside its graph, around one of the host."""

    def __init__(self, engine: Engine) -> None:
        self.run, self.schedule, self.close = engine.executable.run, engine.schedule, engine.executable.close
        self.paused = engine.executable.paused
        self.quick_runs = 0

    def quick(self, ready: Ready, *, static: bool) -> Quick:
        taken: list[Any] = []

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
            taken.clear()
            if not ready(lambda inputs: taken.append(inputs) or True, args, kwargs):
                return None
            self.quick_runs += 1
            return self.run(taken[0], static=static)

        return run


def quickened(model: Callable[..., Any], *args: Any, fuse: Any = "none", **kwargs: Any) -> tuple[Nimble, Runs]:
    """Prepare a model whose calls have a short way, checked after it as on a GPU."""
    net = Nimble(model, Options(fuse=fuse)).prepare(*args, **kwargs)
    (engine,) = net.engines
    runs = Runs(engine)
    object.__setattr__(engine, "executable", runs)
    object.__setattr__(engine, "check_first", False)
    net._adopt(net.engines)
    return net, runs


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"z": self.layer(x) + y}


@torch.no_grad()
def test_the_usual_call_goes_the_short_way() -> None:
    model = Named().eval()
    net, runs = quickened(model, X, y=torch.rand(2, 3))
    for times in range(1, 4):
        x, y = torch.rand(2, 4), torch.rand(2, 3)
        assert torch.equal(net(x, y=y)["z"], model(x, y=y)["z"])
        assert runs.quick_runs == times


@pytest.mark.parametrize(
    "around",
    [lambda: torch.autocast("cpu", torch.bfloat16), thread_recording],
    ids=["autocast", "recording"],
)
@torch.no_grad()
def test_what_is_not_usual_goes_the_long_way(around: Callable[[], Any]) -> None:
    model = nn.Linear(4, 3).eval()
    net, runs = quickened(model, X)
    object.__setattr__(net, "_options", Options(fuse="none", on_new_shape="eager"))
    with around():
        assert torch.allclose(net(X), model(X))
    assert runs.quick_runs == 0
    net(X)
    assert runs.quick_runs == 1


@pytest.mark.parametrize("training", [False, True])
def test_with_gradients_enabled(training: bool) -> None:
    """Where no warning is due: of an input that requires a gradient, or in training mode of parameters that do."""
    model = nn.Linear(4, 3).train(training)
    with torch.no_grad():
        net, runs = quickened(model, X)
    if training:
        with pytest.warns(NimbleWarning, match="carry none"):
            net(X)
        assert runs.quick_runs == 0
        return
    out = net(X)
    assert not out.requires_grad
    assert runs.quick_runs == 1
    with pytest.warns(NimbleWarning, match="carry none"):
        net(X.clone().requires_grad_())
    assert runs.quick_runs == 1
    with torch.no_grad():
        net(X.clone().requires_grad_())
    assert runs.quick_runs == 2


@torch.no_grad()
def test_an_autocast_that_was_prepared_for_is_usual() -> None:
    model = nn.Linear(4, 3).eval()
    with torch.autocast("cpu", torch.bfloat16):
        net, runs = quickened(model, X)
        assert torch.equal(net(X), model(X))
    assert runs.quick_runs == 1
    with pytest.raises(InputError, match="autocast"):
        net(X)
    with torch.autocast("cpu", torch.float16), pytest.raises(InputError, match="autocast"):
        net(X)
    assert runs.quick_runs == 1


@torch.no_grad()
def test_transforms_other_modes_and_other_inputs() -> None:
    net, runs = quickened(nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval(), X)
    with pytest.raises(InputError, match="vmap"):
        torch.func.vmap(net)(X[None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode"):
        net(torch.autograd.forward_ad.make_dual(X, X))
    with pytest.raises(InputError, match="expected"):
        net(X[:1])
    with pytest.raises(InputError, match="expected"):
        net(X, X)
    net.train()
    with pytest.raises(InputError, match="mode"):
        net(X)
    assert runs.quick_runs == 0


@torch.no_grad()
def test_a_mode_may_be_a_property() -> None:
    modes = [False]

    class Keeps:
        training = property(lambda self: modes[0])

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    net, runs = quickened(Keeps(), X)
    assert torch.equal(net(X), X + 1)
    modes[0] = True
    with pytest.raises(InputError, match="mode"):
        net(X)
    assert runs.quick_runs == 1
    function, runs = quickened(lambda x: x + 1, X)
    assert torch.equal(function(X), X + 1)
    assert runs.quick_runs == 1


@torch.no_grad()
def test_a_changed_model_is_noticed_and_folded_weights_are_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    x = torch.rand(1, 3, 5, 5)
    net, runs = quickened(model, x)
    (engine,) = net.engines
    assert torch.allclose(net(x), model(x), atol=1e-6)
    model[0].weight.mul_(2)
    assert torch.allclose(net(x), model(x), atol=1e-6)
    assert runs.quick_runs == 2
    model[0].weight = nn.Parameter(torch.zeros(4, 3, 1, 1))
    with pytest.raises(InputError, match=r"0\.weight"):
        net(x)
    net.close()
    assert engine not in net.engines
    assert not net._quick


@torch.no_grad()
def test_an_engine_that_is_closed_meanwhile_gives_way_to_the_new_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    x = torch.rand(1, 3, 5, 5)
    net, runs = quickened(model, x, fuse="library")
    model[0].weight.mul_(2)
    run = runs.run

    def prepared_again(inputs: Any, *, static: bool) -> list[torch.Tensor]:
        outputs = run(inputs, static=static)
        net.prepare(x)
        return outputs

    runs.run = prepared_again
    assert torch.allclose(net(x), model(x), atol=1e-6)
    assert runs.quick_runs == 1


def test_engines_without_a_short_way() -> None:
    counter, given, _ = CASES["buffer_counter"]()
    assert not quickened(counter.eval(), *given)[0]._quick  # writes
    assert not Nimble(nn.Linear(4, 3).train()).prepare(X, training=True)._quick
    assert not Nimble(nn.Linear(4, 3).eval(), Options(fuse="none")).prepare(X)._quick  # of the host
