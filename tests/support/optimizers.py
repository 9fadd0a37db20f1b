"""Captured optimizers beside eager ones: equal parameters and gradients, a tape to replay, and what has to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nimble_core.training.optimizer import CapturedOptimizer

Kind = type[optim.Optimizer]

SHAPES = ((4, 3), (5,), (2, 3, 2, 2), ())

CASES: list[tuple[Kind, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (optim.Adam, {"foreach": False, "eps": 1e-4}),
    (optim.AdamW, {"maximize": True, "fused": True}),
    (optim.AdamW, {"amsgrad": True, "fused": False}),
    (optim.Adadelta, {}),
    (optim.Adadelta, {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.ASGD, {"lambd": 0.1, "t0": 3, "weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.NAdam, {"momentum_decay": 0.1}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Rprop, {"etas": (0.4, 1.3)}),
]
if torch.__version__ >= "2.13":
    CASES.append((optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1}))

FUSED: list[tuple[Kind, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {}),
    (optim.AdamW, {"amsgrad": True}),
]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, **kwargs: Any) -> list[torch.nn.Parameter]:
    """Draw parameters: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(**kwargs)) for shape in shapes]


def gradients_of(these: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Draw gradients: the same for the same step, as large as parameters are, now and then zero."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(one.shape, generator=generator) for one in these]
    return [(m * (torch.rand(m.shape, generator=generator) > 0.2)).to(p) for m, p in zip(made, these, strict=True)]


def in_two_groups(these: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Parameter groups, the second with a learning rate of its own."""
    return [{"params": list(these[:2])}, {"params": list(these[2:]), "lr": 0.03}]


def twins(kind: Kind, options: dict[str, Any], **kwargs: Any) -> tuple[optim.Optimizer, optim.Optimizer]:
    """Two equal optimizers, of equal parameters."""
    return kind(in_two_groups(parameters(**kwargs)), **options), kind(in_two_groups(parameters(**kwargs)), **options)


def members(optimizer: optim.Optimizer) -> list[torch.nn.Parameter]:
    """Parameters of all groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def eager(optimizer: optim.Optimizer, gradients: Sequence[torch.Tensor | None]) -> None:
    """Make a step of the user's own; leaves no gradients."""
    for parameter, gradient in zip(members(optimizer), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    optimizer.zero_grad()


class Tape(TorchDispatchMode):
    """Records the ATen calls made inside; ``replay`` issues them again, on the same memory."""

    READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.READS, f"{func} reads the device"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Issue the calls again: each reads what the one before it has made now."""
        made: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*tree_map(now, args), **tree_map(now, kwargs))
                tree_map(lambda old, new: made.update({id(old): new}) if old is not new else None, result, again)


class Replayed:
    """An update recorded once, with nothing changed, and replayed at each step as ``TrainStep`` does.

    Args:
        captured: whose update.
        update: more arguments of ``update``.
    """

    def __init__(self, captured: CapturedOptimizer, **update: Any) -> None:
        self.captured = captured
        self.replays = 0
        self.positions = set(range(len(captured.parameters)))
        self.buffers = [torch.zeros_like(parameter) for parameter in captured.parameters]
        written = [*captured.parameters, *(tensor for _, _, tensor in captured.named_state())]
        before = [tensor.detach().clone() for tensor in written]
        self.tape = Tape()
        with self.tape:
            captured.update(self.buffers, **update)
        with torch.no_grad():
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replay; where there is no state yet, let eager make it."""
        self.captured.sync()
        if self.captured.fresh_for(self.positions):
            eager(self.captured.optimizer, gradients)
            return
        self.replays += 1
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer.copy_(gradient)
        self.tape.replay()


def assert_same(mine: optim.Optimizer, other: optim.Optimizer, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Parameters and all state are equal, through ``state_dict``: what a checkpoint would hold."""
    if isinstance(mine, optim.RAdam) and rtol:
        rtol, atol = 1e-3, 1e-4  # its capturable form computes 1 - beta2^step in float32
    for one, peer in zip(members(mine), members(other), strict=True):
        torch.testing.assert_close(one, peer, rtol=rtol, atol=atol)
    kept, peers = mine.state_dict()["state"], other.state_dict()["state"]
    assert kept.keys() == peers.keys()
    for position, entry in kept.items():
        assert entry.keys() == peers[position].keys()
        for key, value in entry.items():
            expected = peers[position][key]
            torch.testing.assert_close(value, expected.to(value.device), rtol=rtol, atol=atol, check_dtype=False)


def everything(optimizer: optim.Optimizer) -> Any:
    """Describe all that a user could tell apart: objects by identity, tensors by version and value, random state."""

    def seen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            numbers = None if value.is_meta else value.detach().clone().tolist()
            return id(value), value._version, numbers, seen(value.grad), value.requires_grad
        if isinstance(value, dict):
            return id(value), [(id(key), seen(one)) for key, one in value.items()]
        if isinstance(value, (list, tuple)):
            return id(value), [seen(one) for one in value]
        return id(value)

    return seen(vars(optimizer)), torch.get_rng_state().tolist()
