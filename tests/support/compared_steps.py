"""Training steps for tests: a small net, optimizers, scalers, and what has to stay as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nimble_core.scheduling.options import Options
from nimble_viz.collect.compare import compare
from nimble_viz.collect.progress import Progress
from nimble_viz.render.report import Report


class Spy(Progress):
    """Remembers the steps; raises when the one called ``at`` begins (``late``: ends), or at round ``round_``."""

    def __init__(
        self, at: str = "", error: BaseException | None = None, round_: int = 0, *, late: bool = False
    ) -> None:
        super().__init__()
        self.at, self.error, self.round, self.late = at, error, round_, late
        self.names: list[str] = []
        self.finished = False

    @contextmanager
    def step(self, name: str) -> Iterator[Any]:
        self.names.append(name)
        fails = name == self.at and not self.round
        with super().step(name) as step:
            if fails and not self.late:
                raise self.error or KeyboardInterrupt
            yield step
            if fails:
                raise self.error or KeyboardInterrupt

    def advance(self, done: int, total: int) -> None:
        if done == self.round:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.finished = True


FAST = Options(fuse="none", budget_s=0.05)
ONE = Options(fuse="none", policy="single", tune="off", budget_s=0.05)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.left(x) + self.right(x)) * scale
        return self.head(self.drop(x).mean((2, 3))) * self.frozen


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-3)


def begun(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer in the midst of training, with a scheduler, and gradients that are somebody's."""
    optimizer = torch.optim.Adam([{"params": net.head.parameters(), "lr": 0.01}, {"params": net.conv.parameters()}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        net(torch.randn(4, 3, 6, 6)).sum().backward()
        optimizer.step()
        scheduler.step()
    return optimizer


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))


def trained(
    net: nn.Module, *args: Any, options: Options = FAST, progress: Progress | None = None, **more: Any
) -> Report:
    given = {"loss_fn": nn.CrossEntropyLoss(), **more}
    return compare(net, *args, training=True, options=options, progress=progress or Progress(), **given)


def scaling(used: bool = True, **more: Any) -> torch.amp.GradScaler:
    """A scaler of the host, in the midst of training if ``used``."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 256.0, "growth_interval": 3, **more})
    if used:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "autocast": lambda: {"autocast": torch.bfloat16},
    "clipped": lambda: {"clip_grad_norm": 0.01},
    "scaled": lambda: {"scaler": scaling()},
    "scaled anew": lambda: {"scaler": scaling(used=False)},
    "all": lambda: {"autocast": torch.bfloat16, "clip_grad_norm": 0.01, "scaler": scaling()},
}
"""Ways to train, as keywords of ``compare``."""


def everything(
    net: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None = None
) -> tuple[list[int], list[torch.Tensor], Any]:
    """Return which tensors there are, all values, and the rest of the state."""
    tensors = [*net.parameters(), *net.buffers()]
    tensors += [one.grad for one in net.parameters() if one.grad is not None]
    rest: list[Any] = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [one.grad is None for one in net.parameters()],
    ]
    if optimizer is not None:
        for kept in optimizer.state.values():
            tensors += kept.values()
        rest += [len(optimizer.state), [{**group, "params": len(group["params"])} for group in optimizer.param_groups]]
        rest += [sorted(vars(optimizer))]
    rest += [sorted(vars(module)) for module in net.modules()]
    if scaler is not None:
        held = (scaler._scale, scaler._growth_tracker)
        rest += [scaler.state_dict(), [None if one is None else (id(one), one._version) for one in held]]
        rest += [sorted(vars(scaler))]
    return [id(one) for one in tensors], [one.detach().clone() for one in tensors], copy.deepcopy(rest)


def unchanged(before: Any, after: Any) -> None:
    assert before[0] == after[0]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]
