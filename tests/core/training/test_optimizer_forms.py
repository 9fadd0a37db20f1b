"""Which optimizers a whole step takes, in which form, and how it refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError
from tests.support.optimizers import Kind, Replayed, assert_same, eager, everything, gradients_of, members, parameters


class Renamed(optim.AdamW):
    """Torch's own step, with other defaults and a method of its own."""

    def __init__(self, these: Any, lr: float = 0.05) -> None:
        super().__init__(these, lr=lr)
        self.updates = 0

    def schedule(self) -> None:
        self.updates += 1


class Counting(optim.SGD):
    """Decides on the host, by a counter of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Gathering(optim.Adam):
    """Chooses other parameters than torch's step does."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class Foreign(optim.Optimizer):
    """As a library outside of torch defines one."""

    def __init__(self, these: Any) -> None:
        super().__init__(these, {"lr": 0.1, "capturable": True, "fused": True})


class Standing(optim.Optimizer):
    """Wraps another, as distributed and mixed-precision libraries do."""

    def __init__(self, inside: optim.Optimizer) -> None:
        self.inside = inside


def hooked(these: Any) -> optim.Optimizer:
    made = optim.SGD(these, lr=0.1)
    made.register_step_pre_hook(lambda *_: None)
    return made


def patched(these: Any) -> optim.Optimizer:
    made = optim.SGD(these, lr=0.1)
    made.step = lambda: None  # type: ignore[method-assign]
    return made


def frozen(these: Any) -> optim.Optimizer:
    return optim.SGD([one.requires_grad_(False) for one in these], lr=0.1)


def test_a_subclass_that_replaces_nothing_is_torchs_own() -> None:
    mine, other = Renamed(parameters()), optim.AdamW(parameters(), lr=0.05)
    replayed = Replayed(CapturedOptimizer(mine, "cpu"))
    for step in range(4):
        mine.schedule()
        replayed.step(gradients_of(members(mine), step))
        eager(other, gradients_of(members(other), step))
    assert replayed.replays == 3
    assert_same(mine, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda these: None, "the optimizer is a NoneType"),
        (optim.LBFGS, "a whole step cannot capture LBFGS"),
        (optim.SparseAdam, "cannot capture SparseAdam"),
        (optim.Adafactor, "cannot capture Adafactor"),
        (Foreign, "cannot capture Foreign"),
        (lambda these: Standing(optim.SGD(these, lr=0.1)), "cannot capture Standing"),
        (Counting, "Counting replaces step of SGD"),
        (Gathering, "Gathering replaces _init_group of Adam"),
        (lambda these: optim.Adam(these, differentiable=True), "differentiable=True"),
        (lambda these: optim.Adam(these, betas=(torch.tensor(0.9), torch.tensor(0.9))), "betas is a tensor"),
        (hooked, "step hooks"),
        (patched, "step was replaced"),
        (frozen, "no parameters that require gradients"),
        (lambda these: optim.SGD([torch.nn.Parameter(torch.zeros(2, device="meta"))], lr=0.1), "is on meta, the model"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_left_as_it_is(make: Callable[[Any], Any], message: str) -> None:
    optimizer = make(parameters())
    before = everything(optimizer) if isinstance(optimizer, optim.Optimizer) else None
    with pytest.raises(InputError, match=message) as refused:
        CapturedOptimizer(optimizer, "cpu")
    if "capture" in message or "replaces" in message:
        assert "AdamW" in refused.value.fix
        assert "prepare(x, training=True)" in refused.value.fix
    if before is not None:
        assert everything(optimizer) == before


def test_hooks_of_all_optimizers_are_refused_but_for_those_that_watch() -> None:
    def clamped(*given: object) -> None:
        raise AssertionError("no step is made")

    made = CapturedOptimizer(optim.SGD(parameters(), lr=0.1), "cpu")
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(clamped)
        try:
            with pytest.raises(InputError, match="clamped is registered as a hook of all"):
                made.sync()
            with pytest.raises(InputError, match="clamped is registered as a hook of all"):
                CapturedOptimizer(optim.SGD(parameters(), lr=0.1), "cpu")
        finally:
            handle.remove()
    made.sync()


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RMSprop])
@pytest.mark.parametrize(
    "part",
    [lambda big: big[:, :3], lambda big: big[::2], lambda big: big[:, 1:4].T],
    ids=["columns", "every second row", "columns, transposed"],
)
def test_a_parameter_with_gaps_in_its_memory_is_refused(
    part: Callable[[torch.Tensor], torch.Tensor], kind: Any
) -> None:
    big = torch.randn(6, 6)
    before = big.clone()
    with pytest.raises(InputError, match="has gaps in its memory") as refused:
        CapturedOptimizer(kind([*parameters(), torch.nn.Parameter(part(big))], lr=0.1), "cpu")
    assert refused.value.where == "param_groups[0]['params'][4]"
    assert "contiguous()" in refused.value.fix
    assert torch.equal(big, before)


@pytest.mark.parametrize(
    ("kind", "options", "ours", "theirs"),
    [
        (optim.AdamW, {}, "fused", "parameter-by-parameter"),
        (optim.AdamW, {"foreach": True}, "fused", "for-each"),
        (optim.AdamW, {"fused": False}, "fused", "parameter-by-parameter"),
        (optim.AdamW, {"fused": True}, "fused", "fused"),
        (optim.SGD, {"foreach": False}, "fused", "parameter-by-parameter"),
        (optim.RMSprop, {}, "for-each", "parameter-by-parameter"),
        (optim.RMSprop, {"foreach": True}, "for-each", "for-each"),
    ],
)
def test_another_form_than_that_of_eager_is_told(kind: Kind, options: dict[str, Any], ours: str, theirs: str) -> None:
    mine = kind(parameters(), **options)
    told = CapturedOptimizer(mine, "cpu").other_form
    form = "fused" if ours == "fused" else "foreach"
    assert (f"torch's {ours} {kind.__name__}," in told and f"runs the {theirs} form" in told) == (ours != theirs)
    assert bool(told) == (ours != theirs)
    # What it says of eager is what eager does, and its advice helps.
    assert ran(mine) == theirs
    assert CapturedOptimizer(kind(parameters(), **{form: True}), "cpu").other_form == ""


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ran(optimizer: optim.Optimizer) -> str:
    """Tell the form of the optimizer's own step, by the operators that it runs."""
    for parameter in members(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state
    with Names() as names:
        optimizer.step()
    if any(name.startswith("_fused_") for name in names.seen):
        return "fused"
    # One parameter's counter may be increased in a for-each call in any form.
    arithmetic = {"_foreach_lerp_", "_foreach_mul_", "_foreach_addcmul_", "_foreach_addcdiv_"}
    return "for-each" if names.seen & arithmetic else "parameter-by-parameter"
