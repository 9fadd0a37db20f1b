"""Models, optimizers and modes are changed at random moments around calls: each call is right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core import InputError, Nimble, Options, TrainStep
from nimble_core.torch_compat import unchanged

pytestmark = pytest.mark.filterwarnings("ignore:the forward hook")

PASSES = [unchanged.InPython, *([built] if (built := unchanged.compiled()) else [])]
X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
Y = torch.tensor([0, 2])
Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(16, 3)
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for at, one in enumerate(net.parameters()):
        one.grad = torch.full_like(one, 0.01 * (at + 1))
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def write(net: nn.Sequential, optimizer: object) -> None:
    net[5].weight.mul_(1.25)
    net[0].weight[0].add_(0.5)


def count_on(net: nn.Sequential, optimizer: object) -> None:
    """Running statistics, written past their own version counters."""
    was = net[1].training
    net[1].train()(X.mean(1, keepdim=True).expand(2, 4, 4, 4))
    net[1].train(was)


def load(net: nn.Sequential, optimizer: object) -> None:
    net.load_state_dict({name: one * 2 if one.is_floating_point() else one for name, one in net.state_dict().items()})


def load_optimizer(net: object, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


FOLLOWED: dict[str, Change] = {
    "nothing": lambda net, optimizer: None,
    "step": step,
    "write": write,
    "statistics": count_on,
    "load": load,
    "load optimizer": load_optimizer,
    "rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] * 0.5),
    "gradients": lambda net, optimizer: optimizer.zero_grad(set_to_none=True),
}


def move(net: nn.Sequential, optimizer: object) -> None:
    net[5].bias.data = net[5].bias.detach() + 1


def swap(net: nn.Sequential, optimizer: object) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() * 3)


def hook(net: nn.Sequential, optimizer: object) -> None:
    net[2].register_forward_hook(lambda module, args, output: output + 1)


REFUSED: dict[str, Change] = {
    "memory": move,
    "parameter": swap,
    "buffer": lambda net, optimizer: setattr(net[1], "running_mean", net[1].running_mean + 1),
    "mode": lambda net, optimizer: net[3].train(not net[3].training),
    "module": lambda net, optimizer: net.__setitem__(2, nn.Tanh()),
    "hook": hook,
    "forward": lambda net, optimizer: setattr(net, "forward", lambda x: x),
}
MOMENTS = st.lists(st.sampled_from([*FOLLOWED, *REFUSED]), min_size=1, max_size=6)
given_moments = given(moments=MOMENTS, way=st.sampled_from(PASSES))
often = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("fuse", ["none", "library"])
@pytest.mark.parametrize("first", [True, False], ids=["asked first", "asked meanwhile"])
@often
@given_moments
def test_inference(fuse: Any, first: bool, moments: list[str], way: Any) -> None:
    net = model().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(unchanged, "_found", [way])
        replayed = _prepared(net, fuse, first)
        for moment in moments:
            (FOLLOWED | REFUSED)[moment](net, optimizer)
            for _ in range(2):
                if moment in REFUSED:
                    with pytest.raises(InputError, match="not the one that was prepared"):
                        replayed(X)
                else:
                    torch.testing.assert_close(replayed(X), net(X))
            if moment in REFUSED:
                if moment == "forward":
                    del net.forward
                replayed = _prepared(net, fuse, first)
                torch.testing.assert_close(replayed(X), net(X))


def _prepared(net: nn.Module, fuse: Any, first: bool) -> Nimble:
    replayed = Nimble(net, Options(tune="off", fuse=fuse)).prepare(X)
    object.__setattr__(replayed, "_engines", (replace(replayed.engines[0], check_first=first),))
    return replayed


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@often
@given_moments
def test_whole_steps(kind: str, moments: list[str], way: Any) -> None:
    """Refused before anything is trained; else every parameter, buffer and state is eager's."""
    ours, theirs = model().train(), model().train()
    made = [_optimizer(kind, net) for net in (ours, theirs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged, "_found", [way])
        trained = TrainStep(ours, nn.functional.cross_entropy, made[0], options=Options(tune="off", fuse="none"))
        trained.prepare(X, Y)
        for moment in moments:
            for net, optimizer in zip((ours, theirs), made, strict=True):
                (FOLLOWED | REFUSED)[moment](net, optimizer)
            if moment in REFUSED:
                before = deepcopy((ours.state_dict(), made[0].state_dict()))
                for _ in range(2):
                    with pytest.raises(InputError):
                        trained(X, Y)
                _require_same(before, (ours.state_dict(), made[0].state_dict()))
                return
            loss = trained(X, Y)
            expected = nn.functional.cross_entropy(theirs(X), Y)
            made[1].zero_grad()
            expected.backward()
            made[1].step()
            made[1].zero_grad()
            torch.testing.assert_close(loss, expected)
            _require_same(
                *[(net.state_dict(), one.state_dict()) for net, one in zip((ours, theirs), made, strict=True)]
            )


def _optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def _require_same(one: Any, other: Any) -> None:
    flat, expected = (torch.utils._pytree.tree_leaves(value) for value in (one, other))
    tensors = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in (flat, expected)]
    torch.testing.assert_close(*tensors)
