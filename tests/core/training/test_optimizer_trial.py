"""What steps of twins show: what is kept on the host, written beside the state, or another optimizer's."""

from __future__ import annotations

import copy
import logging
import queue
import random
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim.swa_utils import SWALR

from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError
from tests.core.training.test_optimizer import (
    CASES,
    Adapting,
    Recorded,
    assert_same,
    everything,
    gradients_of,
    members,
    parameters,
    side_by_side,
    twins,
)


@dataclass
class Clock:
    """Counts in an attribute."""

    now: int = 0
    seen: list[int] = field(default_factory=list)

    def tick(self) -> None:
        self.now += 1


@dataclass(slots=True)
class Slotted(Clock):
    """Counts in a slot."""


class Lagging:
    """Counts where the class has the first number; equal to nothing."""

    now = 0

    def tick(self) -> None:
        self.now += 1

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Lagging({vars(self)})"


class Keeping(optim.SGD):
    """SGD that keeps something of its own, and does with it what a test says."""

    shared: list[int] = [0]  # noqa: RUF012  # changed in place, as users do
    _count = 0

    def __init__(self, these: Any, kept: Any = None, change: Callable[[Any], Any] = lambda one: None) -> None:
        super().__init__(these, lr=0.1, momentum=0.9)
        self._kept, self._change, self._method = kept, change, self.advance

    def advance(self) -> None:
        self._count += 1

    def step(self, closure: Any = None) -> Any:
        self._change(self)
        return super().step(closure)


def increase(held: Any, key: Any = 0) -> None:
    held[key] += 1


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "private number": (lambda: 0, lambda one: setattr(one, "_kept", one._kept + 1)),
    "number of the class": (lambda: None, lambda one: setattr(one, "_count", one._count + 1)),
    "list": (lambda: [0], lambda one: increase(one._kept)),
    "list of the class": (lambda: None, lambda one: increase(one.shared)),
    "list in a dict in a tuple": (lambda: ({"k": [0]},), lambda one: increase(one._kept[0]["k"])),
    "growing list": (list, lambda one: one._kept.append(0.0)),
    "deque": (lambda: deque([1.0, 2.0], 2), lambda one: one._kept.append(3.0)),
    "set": (set, lambda one: one._kept.add(len(one._kept))),
    "defaultdict": (lambda: defaultdict(int), lambda one: increase(one._kept, "k")),
    "each parameter's number": (dict, lambda one: [one._kept.setdefault(each, 1) for each in members(one)]),
    "object": (Clock, lambda one: one._kept.tick()),
    "object in a list": (lambda: [Clock()], lambda one: one._kept[0].tick()),
    "list of an object": (Clock, lambda one: one._kept.seen.append(1)),
    "slot": (Slotted, lambda one: one._kept.tick()),
    "object without an equal": (Lagging, lambda one: one._kept.tick()),
    "bound method": (lambda: None, lambda one: one._method()),
    "object of a bound method": (lambda: Clock().tick, lambda one: one._kept()),
    "array": (lambda: np.zeros(1), lambda one: increase(one._kept)),
    "generator of numbers": (lambda: random.Random(1), lambda one: one._kept.random()),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda one: one._kept.random()),
    "new tensor": (lambda: None, lambda one: setattr(one, "_kept", torch.zeros(()))),
    "number in a group": (lambda: None, lambda one: increase(one.param_groups[0].setdefault("step", [0]))),
    "number in the state": (lambda: None, lambda one: one.state["all"].setdefault("k", 1)),
}


@pytest.mark.parametrize("which", COUNTERS)
def test_what_a_step_changes_on_the_host_is_refused_and_stays(which: str) -> None:
    make, change = COUNTERS[which]
    mine = Keeping(parameters(), make(), change)
    if which == "number in a group":
        mine.param_groups[0]["step"] = [0]

    def kept() -> Any:
        own = mine._kept.bit_generator.state if which.startswith("numpy") else mine._kept
        own = own.getstate() if isinstance(own, random.Random) else getattr(own, "__self__", own)
        return repr((own, mine._count, mine.shared, mine.param_groups[0].get("step"), dict(mine.state)))

    before, contents = everything(mine), kept()
    with pytest.raises(InputError, match=r"Keeping changes .* on the host in each step"):
        CapturedOptimizer(mine, "cpu")
    assert everything(mine) == before
    assert kept() == contents
    mine.step()  # it is one that counts
    assert kept() != contents


UNSET = object()
LOG = logging.getLogger("an optimizer")


def log(one: Any) -> None:
    one._kept["log"].debug("a step")
    one._kept["log"].isEnabledFor(len(one._kept))


def sentinel(one: Any) -> None:
    assert one._kept is UNSET


def looks_up(one: Any) -> None:
    assert members(one)[0] not in one._kept
    assert not one._kept["no such entry"]


STEADY: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "nothing": (lambda: None, lambda one: None),
    "not a number": (lambda: [float("nan"), np.float64("nan")], lambda one: setattr(one, "_kept", [*one._kept])),
    "an equal list anew": (lambda: [1, (2.0, "x")], lambda one: setattr(one, "_kept", [1, (2.0, "x")])),
    "an equal object anew": (Lagging, lambda one: setattr(one, "_kept", Lagging())),
    "sentinel": (lambda: UNSET, sentinel),
    "read of a defaultdict": (lambda: defaultdict(list), looks_up),
    "warm cache": (lambda: {"betas": (0.9, 0.99)}, lambda one: one._kept.setdefault("betas", (0.9, 0.99))),
    "scratch": (list, lambda one: (one._kept.append(1), one._kept.clear())),
    "logger": (lambda: {"log": LOG, "adapter": logging.LoggerAdapter(LOG)}, log),
    "weak references": (lambda: [weakref.ref(LOG), weakref.WeakSet([LOG])], lambda one: one._kept[0]()),
    "lock": (threading.Lock, lambda one: one._kept.acquire() and one._kept.release()),
    "queue": (lambda: queue.Queue(1), lambda one: (one._kept.put(1), one._kept.get())),
    "module and operator": (lambda: [torch.nn.Linear(2, 2), torch.ops.aten.add.Tensor], lambda one: list(one._kept)),
    "tensor that is read": (lambda: {"scale": torch.ones(())}, lambda one: one._kept["scale"] * 2),
    "cycle": (Clock, lambda one: setattr(one._kept, "owner", one)),
}


@pytest.mark.parametrize("which", STEADY)
def test_what_a_step_leaves_as_it_was_is_no_change(which: str) -> None:
    make, change = STEADY[which]
    mine, other = (Keeping(parameters(), make(), change) for _ in range(2))
    if which == "cycle":
        mine._kept.owner = mine
    before = everything(mine)
    captured = CapturedOptimizer(mine, "cpu")
    assert everything(mine) == before
    recorded = Recorded(captured)
    side_by_side(recorded, mine, other, range(4))
    assert_same(mine, other)


class Base(optim.SGD):
    factors: Sequence[float] = [1.0]  # as users write it

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for one in members(self):
            one.sub_(self.factors[0] * self.main["lr"] * one.grad)

    def __init__(self, these: Any) -> None:
        super().__init__(these, lr=0.1)
        self.main = self.param_groups[0]


class Derived(Base):
    factors = (2.0,)


@pytest.mark.parametrize("kind", [Base, Derived])
def test_twins_see_the_class_attributes_and_groups_that_the_optimizer_sees(kind: Any) -> None:
    mine, other = (kind([{"params": [one]} for one in parameters()]) for _ in range(2))
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(3), falling=True)
    assert_same(mine, other)


class Guarded:
    """Keeps a value in its dictionary, behind properties that tell of what is set."""

    told: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        vars(self).update(fixed=1, told_of=1)

    fixed = property(lambda self: vars(self)["fixed"])
    told_of = property(lambda self: vars(self)["told_of"], lambda self, value: self.told.append(value))


def test_copies_of_objects_set_no_properties() -> None:
    CapturedOptimizer(Keeping(parameters(), Guarded(), lambda one: one._kept.fixed + one._kept.told_of), "cpu")
    assert not Guarded.told


def test_trial_steps_that_draw_leave_random_states_alone() -> None:
    own = torch.Generator().manual_seed(1)
    mine = Keeping(parameters(), [own], lambda one: (torch.rand(3), torch.rand(3, generator=own), random.random()))
    before = torch.get_rng_state(), own.get_state(), random.getstate()
    CapturedOptimizer(mine, "cpu")
    torch.testing.assert_close((torch.get_rng_state(), own.get_state()), before[:2], rtol=0, atol=0)
    assert random.getstate() == before[2]


@pytest.mark.parametrize("schedule", [lambda one: optim.lr_scheduler.StepLR(one, 2), lambda one: SWALR(one, 0.01)])
def test_a_rate_that_is_a_tensor_with_a_scheduler_attached_before(schedule: Any) -> None:
    mine, other = (optim.Adam(parameters(), lr=torch.tensor(0.1)) for _ in range(2))
    schedules = [schedule(mine), schedule(other)]
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(5), schedules=schedules)
    assert_same(mine, other)


class Copied(list[int]):
    copies = 0

    def __copy__(self) -> Copied:
        Copied.copies += 1
        return Copied(self)


def test_attributes_are_copied_as_often_for_many_parameters_as_for_few() -> None:
    counts = []
    for many in (2, 20):
        Copied.copies = 0
        CapturedOptimizer(Keeping(parameters([(2,)] * many), Copied()), "cpu")
        counts.append(Copied.copies)
    assert counts[0] == counts[1]


def test_a_scheduler_inside_the_optimizer_is_refused_where_it_steps() -> None:
    mine = Keeping(parameters())
    mine.schedule = optim.lr_scheduler.StepLR(mine, 1)
    CapturedOptimizer(mine, "cpu")
    mine._change = lambda one: one.schedule.step()
    before = everything(mine), dict(vars(mine.schedule))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the order of steps
        with pytest.raises(InputError, match=r"Keeping changes .* on the host"):
            CapturedOptimizer(mine, "cpu")
    assert (everything(mine), vars(mine.schedule)) == before


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda these: [one.detach().clone() for one in these], lambda one: one._kept[0].add_(1)),
        (lambda these: torch.zeros(()), lambda one: one._kept.add_(1)),
        (list, lambda one: [each.data.add_(1) for each in one._kept]),
        (lambda these: torch.nn.BatchNorm1d(2), lambda one: one._kept.running_mean.add_(1)),
    ],
    ids=["copies of parameters", "number on the device", "the parameters", "a buffer"],
)
def test_tensors_that_are_written_beside_the_state_are_refused_and_stay(make: Any, change: Any) -> None:
    these = parameters()
    mine = Keeping(these, make(these), change)
    before, values = everything(mine), copy.deepcopy(mine._kept)
    with pytest.raises(InputError, match=r"a tensor that it keeps beside its state.*\n.*test_optimizer_trial.py"):
        CapturedOptimizer(mine, "cpu")
    assert everything(mine) == before
    if isinstance(values, torch.nn.Module):
        mine._kept, values = mine._kept.running_mean, values.running_mean
    torch.testing.assert_close(mine._kept, values, rtol=0, atol=0)


def test_an_optimizer_that_steps_another_one_is_refused_before_that_steps() -> None:
    these = parameters()
    mine = Keeping(these, [optim.SGD(these, lr=0.1)], lambda one: one._kept[0].step())
    for one, gradient in zip(these, gradients_of(these, 0), strict=True):
        one.grad = gradient
    before = everything(mine), [one.detach().clone() for one in these]
    with pytest.raises(InputError, match="keeps another one, a SGD"):
        CapturedOptimizer(mine, "cpu")
    assert everything(mine) == before[0]
    torch.testing.assert_close(list(these), before[1], rtol=0, atol=0)


FORMS: list[dict[str, bool]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}]
SCHEDULES: list[Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]] = [
    lambda one: optim.lr_scheduler.StepLR(one, 2),
    lambda one: optim.lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    lambda one: optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9, cycle_momentum=False),
    lambda one: optim.lr_scheduler.SequentialLR(
        one,
        [optim.lr_scheduler.LinearLR(one, total_iters=2), optim.lr_scheduler.CosineAnnealingLR(one, 5)],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(f"{key}={value}" for key, value in form.items()))
@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in CASES), ids=lambda kind: kind.__name__)
def test_no_form_of_torchs_optimizers_is_taken_for_one_that_changes(
    kind: type[optim.Optimizer], form: dict[str, bool]
) -> None:
    if not form.keys() <= kind([torch.zeros(1)]).defaults.keys():
        pytest.skip(f"{kind.__name__} has no such form")
    for schedule in SCHEDULES:
        mine, other = twins(kind, {"lr": 0.01, **form})
        schedules = [schedule(one) for one in (mine, other)]
        recorded = Recorded(CapturedOptimizer(mine, "cpu"))
        if form.get("capturable"):
            continue  # torch lets it step on accelerators alone
        side_by_side(recorded, mine, other, range(4), schedules=schedules)
        assert_same(mine, other)
        CapturedOptimizer(mine, "cpu")  # in the midst of training


def test_an_optimizer_of_the_users_own_that_is_pure() -> None:
    mine, other = Adapting(parameters()), Adapting(parameters())
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(6), falling=True)
    assert_same(mine, other)
