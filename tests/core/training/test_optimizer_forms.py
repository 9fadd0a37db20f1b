"""Which optimizers a whole step takes, in which form, and how it refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError
from tests.support.optimizers import Kind, everything, parameters


class Counting(optim.SGD):
    """Decides on the host, by a counter of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda these: None, "the optimizer is a NoneType"),
        (optim.LBFGS, "a whole step cannot capture LBFGS"),
        (optim.SparseAdam, "cannot capture SparseAdam"),
        (optim.Adafactor, "cannot capture Adafactor"),
        (Foreign, "cannot capture Foreign"),
        (lambda these: Standing(optim.SGD(these, lr=0.1)), "cannot capture Standing"),
        (Counting, "cannot capture Counting"),
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
    if "capture" in message:
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
    assert CapturedOptimizer(kind(parameters(), **{form: True}), "cpu").other_form == ""
