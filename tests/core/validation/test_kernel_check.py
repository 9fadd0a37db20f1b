"""Kernels, held one by one against the eager calls they stand for: right ones pass, planted faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Options, TrainStep
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.compiler.pipeline import fuse
from nimble_core.ir.program import Call, Program
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static
from nimble_core.validation import kernel_check
from nimble_core.validation.exercise import Copies, StandIns, fresh_like
from nimble_core.validation.kernel_check import check_kernels
from tests.support.fused_models import KINDS, MODELS, AlwaysTheSame, made


def rewritten(model: Any, x: torch.Tensor, kind: Any) -> Recorded:
    signature = check_inputs(model, (x,), {})
    device = device_for(signature.device)
    device.warm_up(model, *signature.arguments())
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    return fuse(device, recorded, kind, measure=False, step=Stopwatch())


def model_and_input(name: str, device: str) -> tuple[Any, torch.Tensor]:
    if name == "spectrum":
        return spectrum, torch.randn(3, 8).to(device)
    if name != "always the same":
        model, draw = made(name, device)
        return model, draw()
    torch.manual_seed(0)
    return AlwaysTheSame().eval().to(device), torch.randn(2, 3, 8, 8).to(device)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    """Compute with complex numbers in between."""
    return torch.fft.irfft(torch.fft.rfft(x * 2 + 1).exp(), n=x.shape[-1]).relu()


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def off_by_one_row(func: Callable[..., Any], result: int | None = None) -> Callable[..., Any]:
    """Return an operator, or a launch, whose results (or only one of them) are a row too far."""
    only = result

    def moved(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        made = [result] if isinstance(result, torch.Tensor) else [one for one in result or () if torch.is_tensor(one)]
        made = made or [one for arg in args if isinstance(arg, (list, tuple)) for one in arg if torch.is_tensor(one)]
        made = made or [kwargs["out"]] if "out" in kwargs else made
        for at, one in enumerate(made or [next(arg for arg in reversed(args) if torch.is_tensor(arg))]):
            if only in (None, at) and one.dtype != torch.bool and one.numel() > 1:
                one.copy_(one.roll(1, 0 if one.shape[0] > 1 else -1).clone())
        return result

    return moved


def with_a_fault_at(variant: Recorded, place: int, result: int | None = None) -> Recorded:
    steps = list(variant.recording.steps)
    steps[place] = replace(steps[place], func=off_by_one_row(steps[place].func, result))
    return replace(variant, recording=replace(variant.recording, steps=tuple(steps)))


@KINDS
@DEVICES
@pytest.mark.parametrize("name", [*MODELS, "always the same", "spectrum"])
def test_kernels_are_shown_right_and_each_planted_fault_is_found(name: str, device: str, kind: str) -> None:
    model, x = model_and_input(name, device)
    variant = rewritten(model, x, kind)
    found = check_kernels(variant, [x])
    assert (found.wrong, found.unshown) == ("", "")
    assert found.passed
    assert found.shown == found.calls == len(variant.recording.program.calls)
    for place, step in enumerate(variant.recording.steps):
        if step.call is not None:
            assert check_kernels(with_a_fault_at(variant, place), [x]).wrong, variant.recording.program.calls[step.call]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


def rewritten_step(model: nn.Module, x: torch.Tensor, optimizer: str, kind: Any) -> Recorded:
    options = Options(tune="off", policy="single", fuse="none")
    made = OPTIMIZERS[optimizer](model.train().requires_grad_(True).parameters())
    step = TrainStep(model, lambda out: out.square().mean(), made, options=options).prepare(x)
    assert step.engine is not None
    return fuse(device_for(x.device), step.engine.recorded, kind, measure=False, step=Stopwatch())


def results_that_matter(program: Program) -> Iterator[tuple[Call, int]]:
    """Yield calls with the number of each result that is read later, handed out, or outlives a step."""
    wanted = kernel_check._last_wanted(program)
    for call in program.calls:
        for at, ref in enumerate(call.writes):
            storage = program.storages[ref.storage]
            # Kernels may write running statistics that their backward reads: a step's state is compared besides.
            state = storage.role in ("parameter", "buffer") and not storage.name.endswith(("mean", "var"))
            # What a list operator leaves for a step may belong to a gradient that is zero in exact arithmetic (a bias
            # before batch norm): then any small step is as right as eager's.
            later = wanted.get(ref.storage, -1) > call.index and storage.role == "intermediate"
            later &= not call.label.startswith("_foreach_")
            if ref.dtype == "float32" and prod(ref.sizes) > 1 and (state or later):
                yield call, at


def spoil(monkeypatch: pytest.MonkeyPatch, variant: Recorded, call: int, result: int) -> None:
    """Let a call's result be of the other sign, and larger: of some only the sign is read; and no zero be zero."""
    issue, recording = kernel_check._Run.issue, variant.recording

    def spoilt(run: Any, index: int) -> None:
        issue(run, index)
        if index == call and run.issuer.recording.program is recording.program:
            list(run.written(index))[result][1].mul_(-1.5).add_(0.1)

    monkeypatch.setattr(kernel_check._Run, "issue", spoilt)


@KINDS
@DEVICES
@pytest.mark.parametrize("name", ["tower", "perceptron"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_result_of_a_training_step_is_asked_about(name: str, optimizer: str, device: str, kind: str) -> None:
    model, draw = made(name, device)
    variant = rewritten_step(model, x := draw(), optimizer, kind)
    inputs = [x]
    assert check_kernels(variant, inputs).passed
    for call, result in results_that_matter(variant.recording.program):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, variant, call.index, result)
            found = check_kernels(variant, inputs)
        assert found.wrong, (call, result)


class Centred(nn.Module):
    """Its bias has a gradient that is zero in exact arithmetic: what is left is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x - x.mean(0)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_gradients_are_held_against_float64_where_the_optimizer_has_none(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: nothing goes on from fresh numbers, sums are of another order, fused optimizers take float32."""
    issue = kernel_check._Run.issue

    def issued(run: Any, index: int) -> None:
        if not isinstance(run._around, nullcontext) and "_fused_" in run.issuer.recording.program.calls[index].operator:
            raise RuntimeError("not implemented for 'Double'")
        issue(run, index)

    monkeypatch.setattr(kernel_check._Run, "issue", issued)
    monkeypatch.setattr(kernel_check._Walk, "_read_alike", lambda *_: False)
    torch.manual_seed(0)
    variant = rewritten_step(Centred(), x := torch.randn(4096, 8), optimizer, "library")
    place = next(at for at, step in enumerate(variant.recording.steps) if step.func is torch.ops.aten.sum.dim_IntList)
    steps = list(variant.recording.steps)
    steps[place] = replace(steps[place], func=lambda x, *args: torch.ops.aten.sum.dim_IntList(x.flip(0), *args))
    turned = replace(variant, recording=replace(variant.recording, steps=tuple(steps)))
    assert check_kernels(turned, [x]).passed
    steps[place] = replace(steps[place], func=lambda x, *args: torch.ops.aten.sum.dim_IntList(x.abs(), *args))
    spoilt = replace(variant, recording=replace(variant.recording, steps=tuple(steps)))
    assert check_kernels(spoilt, [x]).wrong


NORM = torch.ops.aten.native_layer_norm.default
POOL = torch.ops.aten.max_pool2d_with_indices.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    "call",
    [
        lambda x: NORM(x, [8], None, None, 1e-5),
        lambda x: POOL(x, [2, 2]),
        lambda x: ATTENTION(x, x * 2, x + 1),
    ],
)
def test_results_that_nobody_reads_need_not_be_right(call: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """What reads the other result makes the same of all numbers, and so shows nothing of the call before."""
    x = torch.randn(2, 3, 8, 8)
    variant = rewritten(lambda x: call(x)[0].clamp(min=100), x, "library")
    labels = [one.label for one in variant.recording.program.calls]
    number = labels.index("clamp") - 1
    place = next(place for place, step in enumerate(variant.recording.steps) if step.call == number)
    shown = check_kernels(variant, [x]).shown
    assert check_kernels(with_a_fault_at(variant, place, result=1), [x]).shown == shown
    assert check_kernels(with_a_fault_at(variant, place, result=0), [x]).shown < shown


@KINDS
def test_constants_folded_from_other_weights_are_found(kind: str) -> None:
    model, x = model_and_input("always the same", "cpu")
    variant = rewritten(model, x, kind)
    assert variant.folded is not None
    stale = [one.clone() for one in variant.folded.constants]
    found = check_kernels(replace(variant, folded=replace(variant.folded, compute=lambda stand_in: stale)), [x])
    assert "convolution" in found.wrong
    assert ".py:" in found.wrong, "with the line of the model"


def test_without_memory_for_float64_eager_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_input("tower", "cpu")
    variant = rewritten(model, x, "library")
    monkeypatch.setattr(kernel_check, "memory_limit", lambda device: 100)
    monkeypatch.setattr(kernel_check, "in_float64", None)
    assert check_kernels(variant, [x]).passed
    assert check_kernels(with_a_fault_at(variant, len(variant.recording.steps) - 1), [x]).wrong


def test_the_model_its_input_and_random_numbers_stay_as_they_are() -> None:
    model, x = model_and_input("tower", "cpu")
    variant = rewritten(model, x, "library")
    before = [one.clone() for one in (*model.state_dict().values(), x, torch.get_rng_state())]
    check_kernels(variant, [x])
    for one, was in zip((*model.state_dict().values(), x, torch.get_rng_state()), before, strict=True):
        assert torch.equal(one, was)


def test_of_random_numbers_nothing_is_shown() -> None:
    variant = rewritten(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), torch.randn(3, 4), "library")
    found = check_kernels(variant, [torch.randn(3, 4)])
    assert not found.passed
    assert "random" in found.unshown


def test_views_of_one_weight_have_views_of_one_stand_in() -> None:
    weight, stand_ins = torch.zeros(6, 4), StandIns(0)
    whole, part = stand_ins.of(weight), stand_ins.of(weight[2:].t())
    assert torch.equal(whole[2:].t(), part)
    assert bool((whole != 0).all())
    assert not weight.any()
    mask = torch.full((3,), float("-inf"))
    assert torch.equal(stand_ins.of(mask), mask)
    copy = Copies(torch.float64)
    one, other = copy(weight), copy(weight[2:])
    one.add_(1)
    assert other.dtype == torch.float64
    assert bool((other == 1).all())


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([0.2, 0.9], lambda one: bool(((one > 0) & (one < 1)).all())),
        ([0.0, 7.5], lambda one: bool((one >= 0).all())),
        ([-7.5, 0.0], lambda one: bool((one <= 0).all())),
        ([-1.5, 1.5], lambda one: bool((one < 0).any() and (one > 0).any())),
    ],
)
def test_fresh_numbers_are_of_the_same_kind(values: Sequence[float], fits: Callable[[torch.Tensor], bool]) -> None:
    fresh = fresh_like(torch.tensor(values).repeat(50), torch.Generator().manual_seed(0))
    assert fresh is not None
    assert fits(fresh)
    assert fresh.std() > 0.1
    assert fresh_like(torch.tensor([1.5, float("inf")]), torch.Generator()) is None
    assert fresh_like(torch.tensor([3.0, 0.0, 1.0]), torch.Generator()) is None, "places of experts, say"


@KINDS
def test_gradients_that_are_zero_but_for_rounding_are_right(kind: Any) -> None:
    """A bias before batch norm has such a gradient, which is each library's own."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = Options(tune="off", policy="single", fuse="none")
    step = TrainStep(model, nn.functional.cross_entropy, optimizer, options=options)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    step.prepare(x, y)
    step(x, y)  # the first makes the optimizer's state
    assert step.engine is not None
    eager = step.engine.recorded
    variant = fuse(device_for(x.device), eager, kind, measure=False, step=Stopwatch())
    found = check_kernels(variant, eager.signature.tensors)
    assert (found.wrong, found.unshown) == ("", "")
