"""Captured optimizers against the user's own, step by step; what is refused; what stays untouched."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.optim.swa_utils import SWALR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.training.optimizer import CapturedOptimizer, _is_dense
from nimble_core.utils.errors import InputError, NimbleError

QUICK = Options(tune="off", policy="single")
SHAPES = ((4, 3), (5,), (2, 3, 2, 2), ())

CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
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
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
    CASES.append((optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1}))

each_case = pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=[f"{kind.__name__}-{'-'.join(options)}" for kind, options in CASES]
)


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, **kwargs: Any) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(**kwargs)) for shape in shapes]


def gradients_of(these: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """The same for the same step, whoever asks; as large as parameters are, now and then zero."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(one.shape, generator=generator) for one in these]
    return [(m * (torch.rand(m.shape, generator=generator) > 0.2)).to(p) for m, p in zip(made, these, strict=True)]


def in_two_groups(these: Sequence[torch.Tensor], second: float = 0.03) -> list[dict[str, Any]]:
    return [{"params": list(these[:2])}, {"params": list(these[2:]), "lr": second}]


def eager(optimizer: optim.Optimizer, gradients: Sequence[torch.Tensor | None]) -> None:
    """A step of the user's own; leaves no gradients."""
    these = [one for group in optimizer.param_groups for one in group["params"]]
    for parameter, gradient in zip(these, gradients, strict=True):
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
        made: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*tree_map(now, args), **tree_map(now, kwargs))
                tree_map(lambda old, new: made.update({id(old): new}) if old is not new else None, result, again)


class Recorded:
    """An update recorded once for gradients in buffers of its own, with nothing changed, then replayed at each step."""

    def __init__(self, captured: CapturedOptimizer, present: Sequence[bool] | None = None, **kwargs: Any) -> None:
        self.captured = captured
        here = present or [True] * len(captured.parameters)
        self.buffers = [
            torch.zeros_like(p) if there else None for p, there in zip(captured.parameters, here, strict=True)
        ]
        written = [*captured.parameters, *(tensor for _, _, tensor in captured.named_state())]
        before = [tensor.detach().clone() for tensor in written]
        self.tape = Tape()
        with self.tape:
            captured.update(self.buffers, **kwargs)
        with torch.no_grad():
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Eager where the optimizer is fresh, else a replay."""
        if self.captured.fresh:
            eager(self.captured.optimizer, gradients)
            return
        self.captured.sync()
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            if buffer is not None:
                assert gradient is not None
                buffer.copy_(gradient)
        self.tape.replay()


def side_by_side(
    recorded: Recorded,
    mine: optim.Optimizer,
    other: optim.Optimizer,
    steps: range,
    *,
    falling: bool = False,
    schedules: Sequence[Any] = (),
) -> None:
    """Steps of a recording and of eager on equal gradients; rates fall by hand, or as ``schedules`` of both have it."""
    for step in steps:
        for one in (mine, other) if falling else ():
            one.param_groups[0]["lr"] = 0.1 / (step + 1)
        recorded.step(gradients_of(members(mine), step))
        eager(other, gradients_of(members(other), step))
        for one in schedules:
            one.step()


def assert_same(mine: optim.Optimizer, other: optim.Optimizer, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Parameters and all state, through ``state_dict``: what a checkpoint would hold."""
    if isinstance(mine, optim.RAdam) and rtol:
        rtol, atol = 1e-3, 1e-4  # its capturable form computes 1 - beta2^step in float32
    for group, peers in zip(mine.param_groups, other.param_groups, strict=True):
        for one, peer in zip(group["params"], peers["params"], strict=True):
            torch.testing.assert_close(one, peer, rtol=rtol, atol=atol)
    kept, peers = mine.state_dict()["state"], other.state_dict()["state"]
    assert kept.keys() == peers.keys()
    for position, entry in kept.items():
        assert entry.keys() == peers[position].keys()
        for key, value in entry.items():
            expected = peers[position][key]
            torch.testing.assert_close(value, expected.to(value.device), rtol=rtol, atol=atol, check_dtype=False)


def twins(
    kind: type[optim.Optimizer], options: dict[str, Any], **kwargs: Any
) -> tuple[optim.Optimizer, optim.Optimizer]:
    return kind(in_two_groups(parameters(**kwargs)), **options), kind(in_two_groups(parameters(**kwargs)), **options)


def members(optimizer: optim.Optimizer) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


# -- equal to eager ----------------------------------------------------------------------------------------------------


@each_case
def test_replays_of_one_recording_follow_eager_steps_and_a_scheduler(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    mine, other = twins(kind, options)
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    schedules = [optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (mine, other)]
    replays = 0
    for step in range(20):
        replays += not recorded.captured.fresh
        recorded.step(gradients_of(members(mine), step))
        eager(other, gradients_of(members(other), step))
        for schedule in schedules:
            schedule.step()
        assert_same(mine, other)
    assert replays >= 19


@each_case
def test_a_resumed_optimizer_needs_no_eager_step_and_keeps_its_own_tensors(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    mine, other = twins(kind, options)
    for step in range(3):
        for one in (mine, other):
            eager(one, gradients_of(members(one), step))
    before = {id(value) for entry in mine.state.values() for value in entry.values()}
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    assert not recorded.captured.fresh
    side_by_side(recorded, mine, other, range(3, 8))
    assert_same(mine, other)
    assert {id(value) for entry in mine.state.values() for value in entry.values()} == before


@each_case
def test_eager_steps_and_loaded_states_between_replays(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, other = twins(kind, options)
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    saved: list[Any] = []
    for step in range(12):
        gradients = gradients_of(members(mine), step)
        if step in (4, 5):
            eager(mine, gradients)
        else:
            recorded.step(gradients)
        eager(other, gradients)
        if step == 2:
            saved = [copy.deepcopy(one.state_dict()) for one in (mine, other)]
        if step == 8:
            for one, state in zip((mine, other), saved, strict=True):
                one.load_state_dict(copy.deepcopy(state))
        assert_same(mine, other)


@each_case
def test_a_checkpoint_goes_on_in_a_new_eager_optimizer(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, other = twins(kind, options)
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(4))
    resumed = kind(in_two_groups([torch.nn.Parameter(one.detach().clone()) for one in members(mine)]), **options)
    resumed.load_state_dict(copy.deepcopy(mine.state_dict()))
    for step in range(4, 8):
        for one in (resumed, other):
            eager(one, gradients_of(members(one), step))
    assert_same(resumed, other)


@each_case
def test_buckets_give_the_same_bits(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    one, two = twins(kind, options)
    whole = Recorded(CapturedOptimizer(one, "cpu"))
    parts = Recorded(CapturedOptimizer(two, "cpu"), buckets=[[3, 0], [], [2], [1]])
    assert len(parts.tape.calls) > len(whole.tape.calls)
    for step in range(5):
        whole.step(gradients_of(members(one), step))
        parts.step(gradients_of(members(two), step))
    assert_same(one, two, rtol=0, atol=0)


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    kind = draw(st.sampled_from([optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop]))
    options: dict[str, Any] = {
        "lr": draw(st.floats(1e-4, 0.1)),
        "weight_decay": draw(st.sampled_from([0, 0.01, 0.1])),
        "maximize": draw(st.booleans()),
    }
    if kind in (optim.SGD, optim.RMSprop):
        options["momentum"] = draw(st.sampled_from([0, 0.5, 0.9]))
    if kind is optim.SGD and options["momentum"]:
        options["nesterov"] = draw(st.booleans())
        options["dampening"] = 0 if options["nesterov"] else draw(st.sampled_from([0, 0.3]))
    if kind in (optim.Adam, optim.AdamW):
        options["amsgrad"] = draw(st.booleans())
    return kind, options


@given(
    optimizers(),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4).filter(
        lambda marks: any(used and trained for used, trained in marks)
    ),
    st.lists(st.sampled_from(["replay", "eager", "rate", "load", "reset", "refresh"]), min_size=1, max_size=10),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_any_mix_of_steps_frozen_and_unused_parameters_follows_eager(
    which: tuple[type[optim.Optimizer], dict[str, Any]],
    marks: list[tuple[bool, bool]],
    actions: list[str],
    random: Any,
) -> None:
    kind, options = which
    mine, other = twins(kind, options)
    for one in (mine, other):
        for parameter, (_, trained) in zip(members(one), marks, strict=True):
            parameter.requires_grad_(trained)
    captured = CapturedOptimizer(mine, "cpu")
    assert [id(p) for p in captured.parameters] == [id(p) for p in members(mine) if p.requires_grad]
    recorded = Recorded(captured, [used for used, trained in marks if trained])
    for step, action in enumerate(actions):
        full = [g if all(m) else None for g, m in zip(gradients_of(members(mine), step), marks, strict=True)]
        if action == "rate":
            rate = random.uniform(1e-4, 0.1)
            for one in (mine, other):
                one.param_groups[1]["lr"] = rate
        if action == "load":
            for one in (mine, other):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
        if action == "reset":
            for one in (mine, other):
                one.state.clear()
        if action == "refresh":
            before = everything(mine)
            captured.refresh()
            assert everything(mine) == before
        if action == "eager" or captured.fresh:
            eager(mine, full)
        else:
            recorded.step([g for g, (_, trained) in zip(full, marks, strict=True) if trained])
        eager(other, full)
        assert_same(mine, other)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_types_of_parameters(kind: type[optim.Optimizer], dtype: torch.dtype) -> None:
    if kind is optim.SGD and dtype is not torch.float64:
        with pytest.raises(InputError, match=f"SGD has no form that stays on the device: on cpu for {dtype}"):
            CapturedOptimizer(kind(parameters(dtype=dtype), lr=0.1), "cpu")
        return
    mine, other = twins(kind, {"lr": 0.1}, dtype=dtype)
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(6))
    loose = {"rtol": 5e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}
    assert_same(mine, other, **loose)


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 3, 1, 1), (1, 4, 2, 2)])
@pytest.mark.parametrize("kind", [optim.Adam, optim.Adamax])
def test_gradients_laid_out_otherwise_than_their_parameters(
    kind: type[optim.Optimizer], shape: tuple[int, ...]
) -> None:
    pairs = [torch.nn.Parameter(torch.ones(shape).to(memory_format=torch.channels_last)) for _ in range(2)]
    mine, other = (kind([one]) for one in pairs)
    captured = CapturedOptimizer(mine, "cpu")
    for step in range(3):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        if captured.fresh:
            eager(mine, [gradient])
        else:
            captured.sync()
            captured.update([gradient])
        eager(other, [gradient])
    assert_same(mine, other)
    assert pairs[0].is_contiguous(memory_format=torch.channels_last)


def test_expanded_gradients() -> None:
    (parameter,), (peer,) = parameters([(4, 3)]), parameters([(4, 3)])
    mine, other = optim.SGD([parameter], lr=0.5), optim.SGD([peer], lr=0.5)
    CapturedOptimizer(mine, "cpu").update([torch.ones(()).expand(4, 3)])
    eager(other, [torch.ones(4, 3)])
    assert_same(mine, other)


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_one_cycle_without_momentum_follows_and_with_momentum_is_refused() -> None:
    def schedule(one: optim.Optimizer, **kwargs: Any) -> optim.lr_scheduler.LRScheduler:
        return optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=10, **kwargs)

    mine, other = twins(optim.SGD, {"lr": 0.01, "momentum": 0.9})
    schedules = [schedule(one, cycle_momentum=False) for one in (mine, other)]
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(8), schedules=schedules)
    assert_same(mine, other)

    mine, _ = twins(optim.Adam, {"lr": 0.01})
    cycling = schedule(mine)
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    captured.sync()
    cycling.step()
    with pytest.raises(InputError, match=r"betas was \(0.95.*\n.*\n.*cycle_momentum=False"):
        captured.sync()


def test_rates_that_are_tensors() -> None:
    rate = torch.tensor(0.1)
    these = parameters()
    mine = optim.Adam(these, lr=rate, capturable=False)
    captured = CapturedOptimizer(mine, "cpu")
    assert captured.rates[0].item() == pytest.approx(0.1)
    rate.fill_(0.25)
    captured.sync()
    assert captured.rates[0].item() == 0.25
    assert captured.rates[0] is not rate
    assert mine.param_groups[0]["lr"] is rate
    mine.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(InputError, match="lr has 2 elements"):
        captured.sync()


def test_rates_are_written_only_when_they_change() -> None:
    mine, _ = twins(optim.SGD, {"lr": 0.1})
    captured = CapturedOptimizer(mine, "cpu")
    captured.sync()
    versions = [rate._version for rate in captured.rates]
    captured.sync()
    assert [rate._version for rate in captured.rates] == versions
    mine.param_groups[1]["lr"] = 0.7
    captured.sync()
    assert [rate._version - old for rate, old in zip(captured.rates, versions, strict=True)] == [0, 1]
    assert captured.rates[1].item() == pytest.approx(0.7)


def test_a_scheduler_takes_replays_for_steps() -> None:
    mine, _ = twins(optim.Adam, {})
    eager(mine, gradients_of(members(mine), 0))
    schedule = optim.lr_scheduler.StepLR(mine, 1)
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded.step(gradients_of(members(mine), 1))
        schedule.step()


# -- gradient scaling --------------------------------------------------------------------------------------------------

FUSED = [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adam, {}), (optim.AdamW, {"amsgrad": True})]


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_found_inf_leaves_a_step_out_and_grad_scale_divides(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    mine, other = twins(kind, options)
    captured = CapturedOptimizer(mine, "cpu")
    captured.require_scaling()
    found_inf, scale = torch.zeros(()), torch.tensor(8.0)
    recorded = Recorded(captured, found_inf=found_inf, grad_scale=scale)
    eager(mine, gradients_of(members(mine), 0))
    eager(other, gradients_of(members(other), 0))
    for step in range(1, 6):
        found_inf.fill_(float(step in (2, 3)))
        recorded.step([one * 8 for one in gradients_of(members(mine), step)])
        if step not in (2, 3):
            eager(other, gradients_of(members(other), step))
        assert_same(mine, other)


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_update_as_the_step_that_a_grad_scaler_calls(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, other = twins(kind, {**options, "fused": True})
    captured = CapturedOptimizer(mine, "cpu")
    for one in (mine, other):
        eager(one, gradients_of(members(one), 0))
    captured.sync()
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in range(2)]
    own_step = mine.step
    for step in range(1, 6):
        for one, scaler in zip((mine, other), scalers, strict=True):
            scaler.scale(torch.ones(()))
            for parameter, gradient in zip(members(one), gradients_of(members(one), step), strict=True):
                parameter.grad = gradient * scaler.get_scale()
            if step == 3:
                members(one)[0].grad[0] = torch.inf
        mine.step = lambda: captured.update([one.grad for one in captured.parameters])  # type: ignore[method-assign]
        scalers[0].step(mine)
        mine.step = own_step  # type: ignore[method-assign]
        scalers[1].step(other)
        for scaler in scalers:
            scaler.update()
        assert_same(mine, other)
        assert scalers[0].get_scale() == scalers[1].get_scale()


def test_an_optimizer_without_a_fused_form_takes_no_scale() -> None:
    captured = CapturedOptimizer(optim.RMSprop(parameters()), "cpu")
    assert not captured.scales
    with pytest.raises(InputError, match="RMSprop cannot leave out a step"):
        captured.require_scaling()
    with pytest.raises(InputError, match="RMSprop cannot leave out a step"):
        captured.update([None] * 4, found_inf=torch.zeros(()))


# -- memory with gaps --------------------------------------------------------------------------------------------------

GAPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda big: big[:, :3],
    "every second row": lambda big: big[::2],
    "columns, transposed": lambda big: big[:, 1:4].T,
}


class Part(torch.nn.Module):
    """Trains a part of a matrix that it shares with others."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.big = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
        self.part = torch.nn.Parameter(part(self.big))
        self.bias = torch.nn.Parameter(torch.zeros(self.part.shape[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : len(self.part)] @ self.part + self.bias


@pytest.mark.parametrize("part", GAPPED)
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop, optim.NAdam])
def test_a_parameter_with_gaps_is_updated_as_in_eager_and_its_neighbours_are_left_alone(kind: Any, part: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mine, other = Part(GAPPED[part]), Part(GAPPED[part])
    optimizer, peer = kind(mine.parameters(), lr=0.1), kind(other.parameters(), lr=0.1)
    step = TrainStep(mine, lambda out: out.square().mean(), optimizer, options=QUICK).prepare(x)
    for _ in range(4):
        step(x)
        peer.zero_grad()
        other(x).square().mean().backward()
        peer.step()
    step.close()
    torch.testing.assert_close(mine.big, other.big)  # what is trained, and what lies beside
    torch.testing.assert_close(mine.bias, other.bias)
    assert_same(optimizer, peer)


@pytest.mark.parametrize("part", GAPPED)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda these: optim.SGD(these, lr=0.1),
            "SGD has no form that stays on the device: on cpu for a parameter with",
        ),
        (lambda these: optim.Adam(these, fused=True), "fused=True writes what lies between"),
    ],
)
def test_a_parameter_with_gaps_without_a_form_that_is_right_is_refused(make: Any, message: str, part: str) -> None:
    module = Part(GAPPED[part])
    before = module.big.clone()
    with pytest.raises(InputError, match=message) as refused:
        CapturedOptimizer(make([module.bias, module.part]), "cpu")
    assert refused.value.where == "param_groups[0]['params'][1]"
    assert "contiguous()" in refused.value.fix
    assert torch.equal(module.big, before)


@given(st.permutations(range(3)), st.data())
def test_dense_is_what_torch_calls_so(order: Sequence[int], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    factors = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 0]), min_size=3, max_size=3))
    strides, reached = [0] * 3, 1
    for dim, factor in zip(order, factors, strict=True):
        strides[dim] = reached * factor
        reached *= sizes[dim] * max(factor, 1)
    tensor = torch.empty(4096).as_strided(sizes, strides)
    expected = not tensor.numel() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    assert _is_dense(tensor) == expected


# -- nothing else is touched -------------------------------------------------------------------------------------------


def everything(optimizer: optim.Optimizer) -> Any:
    """What a user could tell apart: objects by identity, tensors by version and value too."""

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


@each_case
def test_construction_and_update_change_values_alone(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, _ = twins(kind, options)
    members(mine)[1].grad = torch.ones(5)
    before = everything(mine)
    captured = CapturedOptimizer(mine, "cpu")
    captured.refresh()
    captured.sync()
    assert everything(mine) == before
    flags = [dict(group) for group in mine.param_groups]
    grads, states = [one.grad for one in members(mine)], dict(mine.state)
    captured.update(gradients_of(members(mine), 0))
    assert [dict(group) for group in mine.param_groups] == flags
    assert all(one.grad is grad for one, grad in zip(members(mine), grads, strict=True))
    assert all(mine.state[key] is entry for key, entry in states.items())
    assert mine.state.keys() == states.keys()


class Failing(TorchDispatchMode):
    """Lets the first calls pass, then fails."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device is gone")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failing_update_puts_gradients_back(after: int) -> None:
    mine, _ = twins(optim.NAdam, {})
    captured = CapturedOptimizer(mine, "cpu")
    members(mine)[1].grad = kept = torch.ones(5)
    with pytest.raises(RuntimeError, match="the device is gone"), Failing(after):
        captured.update(gradients_of(members(mine), 0))
    assert members(mine)[0].grad is None
    assert members(mine)[1].grad is kept
    assert not mine.state
    assert "cpu" not in sys.modules["torch.optim.nadam"]._get_capturable_supported_devices()


def add_group(optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": parameters([(2,)])})


def replace_parameter(optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = parameters([(4, 3)])[0]


def drop_state(optimizer: optim.Optimizer) -> None:
    del optimizer.state[members(optimizer)[2]]["exp_avg"]


def reshape_state(optimizer: optim.Optimizer) -> None:
    optimizer.state[members(optimizer)[2]]["exp_avg"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_group, "has 3 parameter groups; it had 2"),
        (replace_parameter, "other parameters than it had"),
        (lambda o: o.param_groups[1]["params"].pop(), "other parameters than it had"),
        (lambda o: members(o)[2].requires_grad_(False), "frozen or unfrozen"),
        (lambda o: o.param_groups[1].update(weight_decay=0.5), r"weight_decay was 0 and is 0.5 now.*\n.*groups\[1\]"),
        (lambda o: o.param_groups[0].update(betas=(torch.tensor(0.9), torch.tensor(0.9))), "betas was"),
        (lambda o: o.param_groups[0].pop("eps"), "eps was"),
        (lambda o: o.param_groups[1].update(lr="0.5"), r"lr is '0.5', which is no number\n.*groups\[1\]"),
        (lambda o: o.param_groups[1].update(lr=None), "lr is None"),
        (lambda o: o.register_step_post_hook(lambda *_: None), "step hooks"),
        (lambda o: setattr(o, "step", lambda: None), "replaced by another function"),
        (drop_state, r"has no exp_avg\n.*param_groups\[1\]\['params'\]\[0\]"),
        (reshape_state, r"exp_avg in the optimizer's state has shape \[7\]"),
    ],
)
def test_sync_refuses_what_a_replay_would_miss_and_changes_nothing(
    change: Callable[[optim.Optimizer], Any], message: str
) -> None:
    mine, _ = twins(optim.Adam, {})
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    captured.sync()
    mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    mine.param_groups[0]["lr"] = 0.5
    change(mine)
    before = everything(mine)
    ours = [(tensor._version, tensor.tolist()) for _, _, tensor in captured.named_state()]
    for follow in (captured.sync, captured.refresh):
        with pytest.raises(InputError, match=message):
            follow()
    assert everything(mine) == before
    assert [(tensor._version, tensor.tolist()) for _, _, tensor in captured.named_state()] == ours
    assert captured.rates[0].item() == pytest.approx(1e-3)


def test_flags_that_choose_an_implementation_may_change() -> None:
    mine, _ = twins(optim.Adam, {})
    captured = CapturedOptimizer(mine, "cpu")
    mine.param_groups[0].update(foreach=True, initial_lr=3.0)
    captured.sync()


class Scaled(optim.SGD):
    """Its step reads what is no default: an entry of groups, an attribute, one of the class."""

    trust = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rho = 1.0
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad = one.grad * (group["lr_scale"] * self.trust * _damped(self) * group.get("late", 1.0))
        return super().step(closure)

    def schedule(self) -> None:
        self.updates = self.updates + 1  # which no step reads
        for group in self.param_groups:
            group["lr"] = 0.1 / self.updates


def _damped(optimizer: Scaled) -> float:
    return optimizer._rho


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.param_groups[1].update(lr_scale=0.0), r"lr_scale was 1.0 and is 0.0 now.*\n.*groups\[1\]"),
        (lambda o: o.param_groups[1].pop("lr_scale"), "lr_scale was 1.0 and is None"),
        (lambda o: o.param_groups[1].update(late=0.5), r"late is 0.5 now, and was not there.*\n.*groups\[1\]"),
        (lambda o: setattr(o, "trust", 0.0), r"trust was 1.0 and is 0.0 now.*\n.*Scaled\.trust"),
        (lambda o: setattr(o, "_rho", 2), "_rho was 1.0 and is 2 now"),
        (lambda o: setattr(o, "_rho", torch.ones(())), "_rho was 1.0 and is tensor"),
    ],
)
def test_plain_values_that_a_step_may_read_are_those_of_the_preparation(change: Any, message: str) -> None:
    groups = [{**group, "lr_scale": 1.0, "name": "free"} for group in in_two_groups(parameters())]
    mine = Scaled(groups, lr=0.1, momentum=0.9)
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    captured.sync()
    change(mine)
    for follow in (captured.sync, captured.refresh):
        with pytest.raises(InputError, match=message):
            follow()


def test_plain_values_that_no_step_reads_may_change() -> None:
    groups = [{**group, "lr_scale": 1.0, "name": "free"} for group in in_two_groups(parameters())]
    mine = Scaled(groups, lr=0.1, momentum=0.9)
    captured = CapturedOptimizer(mine, "cpu")
    eager(mine, gradients_of(members(mine), 0))
    for epoch in range(2):
        captured.sync()
        mine.schedule()
        mine.epoch = epoch  # type: ignore[attr-defined]
        mine.param_groups[1].update(name="frozen", epoch=epoch)
    captured.sync()
    assert captured.rates[0].item() == pytest.approx(0.05)


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
        lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: SWALR(o, 0.05, anneal_epochs=3),
        lambda o: optim.lr_scheduler.StepLR(o, 1),
    ],
)
def test_what_schedulers_keep_in_groups_is_theirs(schedule: Any, attached: str) -> None:
    mine, _ = twins(optim.SGD, {"lr": 0.1, "momentum": 0.9})
    kept = schedule(mine) if attached == "before" else None
    captured = CapturedOptimizer(mine, "cpu")
    kept = kept or schedule(mine)
    for step in range(3):
        eager(mine, gradients_of(members(mine), step))
        kept.step()
        captured.sync()
        assert captured.rates[0].item() == pytest.approx(mine.param_groups[0]["lr"])
    schedule(mine)  # another one, of other bounds
    captured.sync()


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
def test_another_form_than_that_of_eager_is_told(
    kind: type[optim.Optimizer], options: dict[str, Any], ours: str, theirs: str
) -> None:
    mine, _ = twins(kind, options)
    told = CapturedOptimizer(mine, "cpu").other_form
    form = "fused" if ours == "fused" else "foreach"
    assert (f"torch's {ours} {kind.__name__}," in told and f"runs the {theirs} form" in told) == (ours != theirs)
    assert bool(told) == (ours != theirs)
    # What it says of eager is what eager does, and its advice helps.
    assert ran(mine) == theirs
    other, _ = twins(kind, {form: True})
    assert CapturedOptimizer(other, "cpu").other_form == ""


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ran(optimizer: optim.Optimizer) -> str:
    """The form of the optimizer's own step, by the operators that it runs."""
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


# -- what is refused ---------------------------------------------------------------------------------------------------


class Counting(optim.SGD):
    """Decides on the host, by a counter of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Warming(optim.SGD):
    """Keeps a counter in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["warm"] = group.get("warm", 0) + 1
        return super().step(closure)


class Rebinding(optim.Optimizer):
    """Makes new state in each step."""

    def __init__(self, these: Any) -> None:
        super().__init__(these, {"lr": 0.1, "capturable": True, "differentiable": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["mean"] = self.state[one].get("mean", 0) * 0.9 + one.grad
                    one.sub_(group["lr"] * self.state[one]["mean"])


class Reading(Rebinding):
    """Asks the device for the learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=float(group["lr"]))


class Adapting(Rebinding):
    """Pure: scales by a running norm kept in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    kept = self.state[one]
                    if not kept:
                        kept["norm"] = torch.ones_like(one)
                    kept["norm"].mul_(0.9).add_(one.grad.abs())
                    one.sub_(group["lr"] * one.grad / kept["norm"])


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


def with_none(these: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_none, "the optimizer is a NoneType"),
        (optim.LBFGS, "LBFGS .* closure"),
        (optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (optim.Adafactor, "Adafactor has no form that stays on the device: neither fused nor capturable"),
        (lambda these: optim.Adam(these, differentiable=True), "differentiable=True"),
        (lambda these: optim.Adam(these, betas=(torch.tensor(0.9), torch.tensor(0.9))), "betas is a tensor"),
        (hooked, "step hooks"),
        (patched, "step was replaced"),
        (frozen, "no parameters that require gradients"),
        (lambda these: Standing(optim.SGD(these, lr=0.1)), "Standing stands for another optimizer"),
        (Counting, "Counting changes steps on the host"),
        (Warming, "Warming changes warm on the host"),
        (Rebinding, "Rebinding changes mean on the host"),
        (Reading, "Reading reads the learning rate or its state back"),
        (lambda these: optim.SGD([torch.nn.Parameter(torch.zeros(2, device="meta"))], lr=0.1), "is on meta, the model"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_left_as_it_is(make: Callable[[Any], Any], message: str) -> None:
    optimizer = make(parameters())
    before = everything(optimizer) if isinstance(optimizer, optim.Optimizer) else None
    with pytest.raises(InputError, match=message):
        CapturedOptimizer(optimizer, "cpu")
    if before is not None:
        assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("gradients", "kwargs", "message"),
    [
        ([None] * 3, {}, "3 gradients for 4 parameters"),
        ([torch.zeros(3, 4), None, None, None], {}, r"a gradient has shape \[3, 4\], its parameter \[4, 3\]"),
        ([None, torch.zeros(5).double(), None, None], {}, r"type torch.float64, its parameter torch.float32"),
        ([None, torch.zeros(5).to_sparse(), None, None], {}, "a gradient is sparse"),
        ([None, torch.zeros(5), None, None], {"buckets": [[0], [2]]}, "position 1 is in no bucket"),
        ([None, torch.zeros(5), None, None], {"buckets": [[1], [1, 2]]}, "in two buckets"),
        ([None, torch.zeros(5), None, None], {"buckets": [[1], [9]]}, "there is no position 9"),
        ([None, torch.zeros(5), None, None], {"found_inf": torch.zeros(2)}, "found_inf has 2 elements"),
    ],
)
def test_update_refuses_what_does_not_fit(gradients: list[Any], kwargs: dict[str, Any], message: str) -> None:
    mine, _ = twins(optim.SGD, {"lr": 0.1})
    captured = CapturedOptimizer(mine, "cpu")
    before = everything(mine)
    with pytest.raises(InputError, match=message):
        captured.update(gradients, **kwargs)
    assert everything(mine) == before


def test_update_refuses_a_parameter_that_was_converted() -> None:
    mine, _ = twins(optim.SGD, {"lr": 0.1})
    captured = CapturedOptimizer(mine, "cpu")
    members(mine)[0].data = members(mine)[0].data.t().contiguous().t()
    with pytest.raises(InputError, match="moved or converted"):
        captured.update([None] * 4)


def test_fresh_asks_for_the_state_of_what_is_updated() -> None:
    mine, _ = twins(optim.Adam, {})
    captured = CapturedOptimizer(mine, "cpu")
    assert captured.fresh
    gradients = [*gradients_of(members(mine), 0)[:3], None]
    eager(mine, gradients)
    assert captured.fresh  # the last parameter's state
    captured.update(gradients)
    assert not captured.fresh
    captured.sync()
    assert not captured.fresh
    mine.state[members(mine)[0]] = {}
    assert captured.fresh
    assert not CapturedOptimizer(optim.SGD(parameters(), lr=0.1), "cpu").fresh


def test_state_of_old_checkpoints_with_counters_that_are_numbers() -> None:
    mine, other = twins(optim.Adam, {})
    for one in (mine, other):
        eager(one, gradients_of(members(one), 0))
    for entry in mine.state.values():
        entry["step"] = entry["step"].item()
    recorded = Recorded(CapturedOptimizer(mine, "cpu"))
    side_by_side(recorded, mine, other, range(1, 4))
    assert_same(mine, other)


# -- a preparation leaves the optimizer as it is -----------------------------------------------------------------------

QUICK = Options(tune="off", policy="single")


def kept_by(optimizer: optim.Optimizer) -> Any:
    """Each tensor of the state, and where and what it is; parameters and hyperparameters."""
    entries = [(id(entry), key, value) for entry in optimizer.state.values() for key, value in entry.items()]
    settings = [{**group, "params": [one.tolist() for one in group["params"]]} for group in optimizer.param_groups]
    return [(at, key, id(one), one.dtype, one.device, one.tolist()) for at, key, one in entries], settings


def problem(
    device: str = "cpu", kind: type[optim.Optimizer] = optim.AdamW, steps: int = 2, **options: Any
) -> tuple[torch.nn.Module, optim.Optimizer]:
    """A model and an optimizer that has made ``steps`` eager steps; the same each time."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    with torch.no_grad():
        for seed, one in enumerate(model.parameters()):
            one.copy_(parameters([tuple(one.shape)], seed)[0])
    model.to(device)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        eagerly(model, optimizer, *batch(step, device))
    return model, optimizer


def batch(step: int, device: str = "cpu", size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)
    return x.to(device), y.to(device)


def eagerly(model: torch.nn.Module, optimizer: optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_counters_elsewhere(optimizer: optim.Optimizer) -> None:
    """As default Adam has them on CUDA: in a form that a replay cannot write."""
    for entry in optimizer.state.values():
        entry["step"] = entry["step"].double()


def fails(output: torch.Tensor, target: torch.Tensor) -> float:
    return output.sum().item()


def fails_late(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Recorded, but not the same on other inputs: the update was recorded too."""
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss * 2 if output[0, 0] > 0 else loss


cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("loss_fn", [cross_entropy, fails, fails_late])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_prepare_leaves_the_state_as_it_is_after_an_error_too(loss_fn: Any, elsewhere: bool) -> None:
    model, mine = problem()
    schedule = optim.lr_scheduler.StepLR(mine, 1)
    if elsewhere:
        with_counters_elsewhere(mine)
    before = (everything(mine), kept_by(mine))
    step = TrainStep(model, loss_fn, mine, options=QUICK)
    for _ in range(2):
        with nullcontext() if loss_fn is cross_entropy else pytest.raises(NimbleError):
            step.prepare(*batch(0))
        assert (everything(mine), kept_by(mine)) == before
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()  # no step was taken yet


ACTIONS = ["prepare", "other shape", "step", "eager", "load", "save", "rate"]


@given(st.booleans(), st.sampled_from([0, 2]), st.lists(st.sampled_from(ACTIONS), max_size=7))
@settings(max_examples=25)
def test_whatever_happens_between_preparations_and_steps_training_is_eagers(
    elsewhere: bool, steps: int, actions: list[str]
) -> None:
    model, mine = problem(steps=steps)
    peer, other = problem(steps=steps)
    if elsewhere:
        with_counters_elsewhere(mine)
    first = copy.deepcopy(mine.state_dict())
    step = TrainStep(model, cross_entropy, mine, options=QUICK)
    saved: list[tuple[Any, Any]] = []
    for number, action in enumerate(["prepare", *actions, "step", "step"]):
        before = (everything(mine), kept_by(mine))
        if action in ("prepare", "other shape"):
            step.prepare(*batch(number, size=6 if action == "prepare" else 5))
            assert (everything(mine), kept_by(mine)) == before
        if action == "step":
            step(*batch(number))
            eagerly(peer, other, *batch(number))
        if action == "eager":
            for one in ((model, mine), (peer, other)):
                eagerly(*one, *batch(number))
        if action == "load":
            for one in (mine, other):
                one.load_state_dict(copy.deepcopy(first))
        if action == "rate":
            for one in (mine, other):
                one.param_groups[0]["lr"] *= 0.5
        if action == "save":
            saved.append((copy.deepcopy(mine.state_dict()), copy.deepcopy(other.state_dict())))
    step.close()
    assert_same(mine, other)
    for one, peers in saved:
        for position, entry in one["state"].items():
            for key, value in entry.items():
                expected = peers["state"][position][key]
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_the_first_step_puts_counters_where_replays_write_them() -> None:
    model, mine = problem()
    with_counters_elsewhere(mine)
    theirs = [entry["step"] for entry in mine.state.values()]
    step = TrainStep(model, cross_entropy, mine, options=QUICK).prepare(*batch(2))
    kept = mine.state_dict()
    step(*batch(2))
    assert [entry["step"].dtype for entry in mine.state.values()] == [torch.float32] * 4
    assert [entry["step"].item() for entry in mine.state.values()] == [3.0] * 4
    assert [one.item() for one in theirs] == [2.0] * 4
    assert [entry["step"].item() for entry in kept["state"].values()] == [3.0] * 4  # not copied: as in eager


def test_state_made_in_eager_before_prepare_is_taken_over_not_copied() -> None:
    model, mine = problem(steps=0)
    step = TrainStep(model, cross_entropy, mine, options=QUICK)
    eagerly(model, mine, *batch(0))
    before = everything(mine)
    step.prepare(*batch(0))
    assert everything(mine) == before
    held = {id(value) for entry in mine.state.values() for value in entry.values()}
    step(*batch(0))
    assert {id(value) for entry in mine.state.values() for value in entry.values()} == held


# -- captured in CUDA graphs -------------------------------------------------------------------------------------------


@contextmanager
def no_wait() -> Iterator[None]:
    """Inside, waiting for the device raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Graphed:
    """An update captured once, replayed at each step."""

    def __init__(self, captured: CapturedOptimizer, **kwargs: Any) -> None:
        self.captured = captured
        self.buffers = [torch.zeros_like(one) for one in captured.parameters]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            captured.update(self.buffers, **kwargs)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        if self.captured.fresh:
            eager(self.captured.optimizer, gradients)
            return
        with no_wait():
            self.captured.sync()
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer.copy_(gradient)
        self.graph.replay()


@pytest.mark.gpu
@each_case
def test_replays_of_a_cuda_graph_follow_eager(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, other = twins(kind, options, device="cuda")
    captured = CapturedOptimizer(mine, "cuda")
    eager(mine, gradients_of(members(mine), 0))
    eager(other, gradients_of(members(other), 0))
    captured.sync()  # counters from the host, which waits
    graphed = Graphed(captured, buckets=[[0, 3], [1, 2]])
    schedules = [optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (mine, other)]
    captured.sync()
    for step in range(1, 12):
        gradients = gradients_of(members(mine), step)
        if step == 5:
            eager(mine, gradients)
        else:
            graphed.step(gradients)
        eager(other, gradients)
        for schedule in schedules:
            schedule.step()
    assert_same(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_a_cuda_graph_leaves_steps_out(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    mine, other = twins(kind, options, device="cuda")
    captured = CapturedOptimizer(mine, "cuda")
    eager(mine, gradients_of(members(mine), 0))
    eager(other, gradients_of(members(other), 0))
    captured.sync()
    found_inf = torch.zeros((), device="cuda")
    graphed = Graphed(captured, found_inf=found_inf)
    captured.sync()
    for step in range(1, 6):
        found_inf.fill_(float(step in (2, 3)))
        graphed.step(gradients_of(members(mine), step))
        if step not in (2, 3):
            eager(other, gradients_of(members(other), step))
    assert_same(mine, other)


@pytest.mark.gpu
def test_rates_on_the_device_are_followed_without_waiting() -> None:
    rate = torch.tensor(0.1, device="cuda")
    captured = CapturedOptimizer(optim.Adam(parameters(device="cuda"), lr=rate, fused=True), "cuda")
    rate.data.fill_(0.5)
    with no_wait():
        captured.sync()
    assert captured.rates[0].item() == 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam, optim.SGD])
def test_prepare_leaves_counters_on_the_host_until_the_first_step(kind: type[optim.Optimizer]) -> None:
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    model, mine = problem("cuda", kind, **options)
    peer, other = problem("cuda", kind, **options)
    counters = [entry["step"] for entry in mine.state.values() if "step" in entry]
    assert len(counters) == (0 if kind is optim.SGD else 4)
    assert all(one.device.type == "cpu" for one in counters)  # neither fused nor capturable
    torch.cuda.synchronize()
    before = kept_by(mine)
    for bad in (fails, fails_late):
        with pytest.raises(NimbleError):
            TrainStep(model, bad, mine, options=QUICK).prepare(*batch(2, "cuda"))
        gc.collect()  # of the error, which holds the graph that failed, and that nodes of the stream it was captured on
        assert kept_by(mine) == before
    step = TrainStep(model, cross_entropy, mine, options=QUICK).prepare(*batch(2, "cuda"))
    assert kept_by(mine) == before
    step.prepare(*batch(2, "cuda", size=5))
    assert kept_by(mine) == before
    resumed = copy.deepcopy(mine.state_dict())
    for number in range(2, 6):
        if number == 4:
            mine.load_state_dict(resumed)
            other.load_state_dict(copy.deepcopy(resumed))
        step(*batch(number, "cuda", size=6 - number % 2))
        eagerly(peer, other, *batch(number, "cuda", size=6 - number % 2))
    assert all(value.is_cuda for entry in mine.state.values() for value in entry.values())
    assert_same(mine, other)
    step.close()
    for number in range(6, 8):  # eager goes on with what replays have left
        eagerly(model, mine, *batch(number, "cuda"))
        eagerly(peer, other, *batch(number, "cuda"))
    assert_same(mine, other)


def test_hooks_of_all_optimizers_are_refused_but_for_those_that_watch() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def clamped(*given: object) -> None:
        raise AssertionError("no step is made")

    made = CapturedOptimizer(optimizer(), "cpu")
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(clamped)
        try:
            with pytest.raises(InputError, match="clamped is registered as a hook of all"):
                made.sync()
            with pytest.raises(InputError, match="clamped is registered as a hook of all"):
                CapturedOptimizer(optimizer(), "cpu")
        finally:
            handle.remove()
    made.sync()
