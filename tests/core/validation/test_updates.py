"""What a step writes: right by other kernels and by rounding, wrong where it is stale, scaled or left out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.rounding_noise import perturbed
from nimble_core.validation.updates import Update, wrong_updates
from tests.support.noisy_steps import NETS, Convolutions, Step

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda one: torch.optim.SGD(one, lr=0.05, momentum=0.9, weight_decay=1e-4, foreach=True),
    "adam": lambda one: torch.optim.Adam(one, lr=1e-3, foreach=True),
    "adamw": lambda one: torch.optim.AdamW(one, lr=1e-3, foreach=True),
}


def state_of(step: Step) -> dict[str, torch.Tensor]:
    assert step.optimizer is not None
    found = dict(step.model.state_dict())
    names = {id(one): name for name, one in step.model.named_parameters()}
    for parameter, kept in step.optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                found[f"{key} of {names[id(parameter)]}"] = value
    return {name: one.detach().clone() for name, one in found.items() if one.is_floating_point()}


class Training:
    """Eager, perturbed and other steps from one state."""

    def __init__(self, net: Any, optimizer: str, dtype: torch.dtype, warm: int = 1) -> None:
        torch.manual_seed(0)
        self.net, self.optimizer, self.dtype = net, optimizer, dtype
        model = net.make().to(dtype)
        self.step = Step(model, OPTIMIZERS[optimizer](model.parameters()))
        for _ in range(warm):
            self.step(*self.inputs())
        self.given = self.inputs()
        self.before = state_of(self.step)
        self.eager = self.after(copy.deepcopy(self.step))
        if not warm:
            self.before = {name: self.before.get(name, torch.zeros_like(one)) for name, one in self.eager.items()}
        again = copy.deepcopy(self.step)
        with perturbed():
            self.moved = self.after(again)

    def inputs(self) -> list[torch.Tensor]:
        return [one.to(self.dtype) if one.is_floating_point() else one for one in self.net.case()]

    def after(self, step: Step) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            step(*self.given)
        return state_of(step)

    def other(self) -> dict[str, torch.Tensor]:
        """By other kernels: another layout or attention, and optimizer updates one by one."""
        step = copy.deepcopy(self.step)
        for group in step.optimizer.param_groups:  # type: ignore[union-attr]
            group["foreach"] = False
        if self.net is Convolutions:
            self.given = [one.to(memory_format=torch.channels_last) if one.dim() == 4 else one for one in self.given]
        with sdpa_kernel([SDPBackend.MATH]):
            return self.after(step)

    def wrong(self, after: dict[str, torch.Tensor]) -> EqualityCheck | None:
        parameters = dict(self.step.model.named_parameters())
        jumps = self.optimizer != "sgd"
        updates = [
            Update(name, before, after[name], self.eager[name], self.moved[name], jumps and name in parameters)
            for name, before in self.before.items()
        ]
        return wrong_updates("replay", updates)


@pytest.fixture(
    scope="module",
    params=[(n, o, d) for n in NETS for o in OPTIMIZERS for d in (torch.float32, torch.bfloat16)],
    ids=lambda p: f"{p[0].__name__}-{p[1]}-{p[2]}",
)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(*request.param)


def test_a_step_by_other_kernels_updates_alike(training: Training) -> None:
    assert training.wrong(training.other()) is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_the_first_step_too(net: Any, optimizer: str) -> None:
    """Adam's first updates have the learning rate's size, however small the gradient."""
    first = Training(net, optimizer, torch.float32, warm=0)
    assert first.wrong(first.other()) is None


def test_what_was_not_updated_is_named(training: Training) -> None:
    other, seen = training.other(), 0
    for name, before in training.before.items():
        changed = int((before != training.eager[name]).sum())
        if name.endswith(training.net.zero) or changed < min(4, before.numel()):
            continue  # rounding only, or smaller than the last place of its type
        seen += 1
        found = training.wrong(other | {name: before})
        assert found is not None, name
        assert found.differs
        assert name in found.reason
    assert seen > len(training.before) / 2


def test_wrong_updates_are_found(training: Training) -> None:
    exact = training.dtype is torch.float32
    ends = ("running_mean", "running_var", training.net.small, "out.weight")
    chosen = [name for name in training.before if name.endswith(ends) and "step" not in name]
    assert len(chosen) > 1
    other = training.other()
    for name in chosen:
        before, eager = training.before[name].double(), training.eager[name].double()
        if not exact and float((eager - before).norm() / eager.norm()) < 0.05:
            continue  # within what rounding of the stored numbers may change
        for share in (-1.0, 0.0, 2.0):
            after = (before + share * (eager - before)).to(training.dtype)
            assert training.wrong(other | {name: after}), (name, share)


def updates_of(count: int, seed: int, *, jumps: bool, size: float = 1e-3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(count, generator=generator)
    step = torch.randn(count, generator=generator)
    return before, size * (torch.sign(step) if jumps else step)


def wrong(*tensors: torch.Tensor, jumps: bool = False) -> EqualityCheck | None:
    return wrong_updates("n", [Update("w", *tensors, jumps)])


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 99), st.booleans(), st.floats(0.0, 2.0))
def test_an_update_passes_by_its_error(count: int, seed: int, jumps: bool, error: float) -> None:
    before, step = updates_of(count, seed, jumps=jumps)
    eager = before + step
    found = wrong(before, eager + error * step, eager, eager, jumps=jumps)
    flips = min(4, count // 16) if jumps else 0
    stored = torch.finfo(torch.float32).eps * float(eager.double().norm())
    size = float((eager.double() - before.double()).norm())
    bound = 1e-4 * size + stored + 2 * float((eager - before).abs().max()) * math.sqrt(flips)
    if abs(error * size - bound) > 3 * stored:
        assert bool(found) == (error * size > bound)
    if found:
        assert found.tolerance == pytest.approx(bound / size, rel=1e-3)
        assert found.reason.startswith("the update of w differs from eager's by ")


@settings(deadline=None)
@given(st.integers(16, 2000), st.integers(0, 99), st.integers(0, 40))
def test_a_few_signs_may_flip_where_updates_jump(count: int, seed: int, flipped: int) -> None:
    before, step = updates_of(count, seed, jumps=True)
    flipped = min(flipped, count)
    mine = step.clone()
    mine[:flipped] *= -1
    tensors = (before, before + mine, before + step, before + step)
    assert bool(wrong(*tensors, jumps=True)) == (flipped > min(4, count // 16))
    assert bool(wrong(*tensors)) == (flipped > 0)


@settings(deadline=None)
@given(st.integers(4, 400), st.integers(0, 99))
def test_signs_of_rounding_may_all_flip_but_not_grow(count: int, seed: int) -> None:
    before, step = updates_of(count, seed, jumps=True)
    eager, moved = before + step, before + step.flip(0) * torch.sign(torch.linspace(-1, 1.01, count))
    allowed = {
        factor: not wrong(before, before + factor * step, eager, moved, jumps=True)
        for factor in (-1.0, 0.0, 4.0, math.nan)
    }
    if float((moved - eager).norm()) >= float(step.norm()):
        assert allowed[-1.0]
        assert allowed[0.0]
    assert not allowed[4.0]
    assert not allowed[math.nan]


@settings(deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(16, 400), st.integers(0, 99))
def test_no_update_is_seen_even_where_it_is_smaller_than_the_last_place(
    dtype: torch.dtype, count: int, seed: int
) -> None:
    before, step = updates_of(count, seed, jumps=True, size=0.3 * torch.finfo(dtype).eps)
    before = before.to(dtype)
    eager = (before.double() + step.double()).to(dtype)
    found = wrong(before, before, eager, eager)
    assert (found is None) == torch.equal(before, eager)
    assert found is None or found.reason == "w was not updated"


def test_odd_updates() -> None:
    one = torch.ones(20)
    assert wrong_updates("n", []) is None
    assert wrong(one, one, one, one) is None
    assert wrong(one, one, one * math.nan, one) is None, "nothing can be said of what eager makes NaN"
    assert wrong(one, one * math.inf, one * 2, one * 2)
    # Nothing passes because a perturbed run failed.
    found = wrong(one, one * 1.5, one * 2, one * math.inf)
    assert found
    assert all(map(math.isfinite, (found.relative_error, found.tolerance, found.input_effect)))
