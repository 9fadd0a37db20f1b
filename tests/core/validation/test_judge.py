"""Steps that amplify rounding until no digit is left are judged in parts, and what is wrong is still found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.single import single
from nimble_core.tracing.recorded import Recorded, Stopwatch, record_static, state_kept
from nimble_core.tracing.signature import Signature
from nimble_core.validation.equality import DROWNED
from nimble_core.validation.judge import (
    Cases,
    Judge,
    _Eager,
    _of_same_sizes,
    doubted,
    eager_cases,
    full_precision,
    issued,
)
from nimble_viz import compare

DEVICE = HostDevice()


class Chaotic(nn.Module):
    """The tent map, again and again: each time differences grow by 1.9, and gradients in size."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.register_buffer("one", torch.eye(64))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x * self.scale)
        for _ in range(self.times):
            y = (1.9 * torch.minimum(y, 1 - y)) @ self.one
        return y


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class Wrong(Chaotic):
    """Its gradients are off by a factor."""

    def __init__(self, times: int, by: float) -> None:
        super().__init__(times)
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(super().forward(x), self.by)


class Remembering(Chaotic):
    """Keeps a mean of its inputs, in which each counts ``by`` times."""

    def __init__(self, times: int, by: float) -> None:
        super().__init__(times)
        self.register_buffer("mean", torch.zeros(64))
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1 * self.by)
        return super().forward(x)


def recorded(model: nn.Module) -> Recorded:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    step = TrainStep(model, torch.sum, optimizer, options=Options(tune="off", policy="single"))
    step.prepare(torch.randn(8, 64))
    assert step.engine is not None
    return step.engine.recorded


def as_kernels_of(eager: Recorded, other: Recorded) -> Recorded:
    """``other`` as if it had been made of ``eager`` by a rewrite: it reads and writes the same tensors."""

    def home(of: Recorded, slot: int) -> str:
        return of.recording.program.storages[of.recording.storage_of[slot]].name

    tensors = {home(eager, slot): tensor for slot, tensor in eager.recording.given.items()}
    given = {slot: tensors[home(other, slot)] for slot in other.recording.given}
    program = replace(other.recording.program, fuse="library")
    recording = replace(other.recording, program=program, given=given)
    return Recorded(eager.model, eager.signature, recording, build_graph(program), None, eager, True)


@dataclass
class Replay:
    """An executable that may answer for other inputs than it is given."""

    inner: Any
    stale: torch.Tensor

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        return self.inner.run([self.stale, *inputs[1:]], static=static)


def executable(found: Recorded) -> Any:
    return capture(DEVICE, found, single(found.graph, uniform_costs(found.graph.size)))


@contextmanager
def half_the_digits() -> Iterator[None]:
    """What TF32 does to products, on a machine that may not have it."""
    matmul: Any = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = "none"


DEEP, SHALLOW = 60, 10


BETWEEN = 11
"""Times after which rounding is far above the usual tolerance, and far below what inputs do."""


def test_an_honest_replay_is_not_convicted_by_one_run_in_which_rounding_did_little() -> None:
    found = recorded(Chaotic(BETWEEN))
    eager = _Eager(found)
    cases = eager_cases(found)
    quiet = replace(cases, moved=[outputs for _, outputs in cases.eager], written=())

    def honest(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return eager.run(inputs, 99)[0]

    before = [one.detach().clone() for one in found.model.state_dict().values()]
    assert quiet.judged("moved", found, honest).differs
    assert doubted(found, quiet).judged("moved", found, honest).passed
    assert all(map(torch.equal, before, found.model.state_dict().values()))


def test_more_runs_never_make_a_judge_stricter_and_still_find_what_is_wrong() -> None:
    found, wrong = recorded(Chaotic(BETWEEN)), recorded(Wrong(BETWEEN, 3.0))
    cases = eager_cases(found)
    more = doubted(found, cases)
    for (_, eager), once, often in zip(cases.eager, cases.moved or (), more.moved or (), strict=True):
        assert all((c - a).norm() >= (b - a).norm() for a, b, c in zip(eager, once, often, strict=True))
    assert all(
        (b.perturbed - b.eager).norm() >= (a.perturbed - a.eager).norm()
        for a, b in zip(cases.written, more.written, strict=True)
    )
    other = as_kernels_of(found, wrong)
    assert more.judged("wrong", other, executable(other).run).differs


def test_nothing_can_be_shown_at_once() -> None:
    found = recorded(Chaotic(DEEP))
    assert eager_cases(found).judged("single", found, executable(found).run).reason.startswith(DROWNED)
    other = recorded(Chaotic(SHALLOW))
    with half_the_digits():
        assert eager_cases(other).judged("single", other, executable(other).run).reason.startswith(DROWNED)
    assert eager_cases(other).judged("single", other, executable(other).run).passed


def test_eagers_kernels_are_compared_with_themselves() -> None:
    found = recorded(Chaotic(DEEP))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        assert judge.judged("single", found, executable(found)).passed
        assert not judge.judged("stale", found, Replay(executable(found), torch.randn(8, 64))).passed  # type: ignore[arg-type]
    assert not judge.notes


@pytest.mark.parametrize(("by", "right"), [(1.0, True), (3.0, False), (0.0, False)])
def test_other_kernels_are_compared_by_sizes_where_no_precision_helps(by: float, right: bool) -> None:
    found = recorded(Chaotic(DEEP))
    variant = as_kernels_of(found, recorded(Wrong(DEEP, by)))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.passed is right, check
    assert check.differs is not right
    assert any("sizes of gradients" in note for note in judge.notes)


@pytest.mark.parametrize(("by", "right"), [(1.0, True), (1.5, False)])
def test_what_other_kernels_write_is_compared_where_gradients_have_no_digit(by: float, right: bool) -> None:
    found = recorded(Remembering(DEEP, 1.0))
    variant = as_kernels_of(found, recorded(Remembering(DEEP, by)))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.passed is right, check
    assert right or "mean" in check.reason
    assert any("sizes of gradients" in note for note in judge.notes)


@pytest.mark.parametrize("count", [64, 4096])
def test_sizes_of_gradients_that_are_rounding_only(count: int) -> None:
    torch.manual_seed(count)
    right = [same_sizes(*(torch.randn(2, count) for _ in range(3))) for _ in range(50)]
    assert all(check.passed for check in right)
    for factor in (0.0, 4.0, math.nan):
        wrong = [same_sizes(*(scale * torch.randn(2, count) for scale in (1, 1, factor))) for _ in range(10)]
        assert all(check.differs for check in wrong)


def test_gradients_that_are_zero_have_to_be_zero() -> None:
    zero, other = torch.zeros(2, 64), torch.ones(2, 64)
    assert same_sizes(zero, zero, zero).passed
    assert same_sizes(zero, zero, other).differs
    assert same_sizes(zero, other, other).passed  # in exact arithmetic only


def test_what_rounding_makes_infinite_allows_nothing() -> None:
    ones = torch.ones(2, 64)
    assert same_sizes(ones, ones * math.inf, ones).passed
    assert same_sizes(ones, ones * math.inf, 2 * ones).differs


def test_nothing_is_shown_where_zeros_would_pass() -> None:
    check = _of_same_sizes(
        "library", Cases([((), [torch.ones(4)])] * 2, None, "float32", moved=[[9 * torch.ones(4)]] * 2), lambda _: ZEROS
    )
    assert check.reason.startswith("void")
    assert not check.passed


ZEROS = [torch.zeros(4)]


def same_sizes(eager: torch.Tensor, moved: torch.Tensor, mine: torch.Tensor) -> EqualityCheck:
    """Of a loss that is right, and of one gradient on two inputs each."""
    runs = iter(mine)
    loss = torch.ones(())
    cases = Cases([((), [loss, one]) for one in eager], None, "float32", moved=[[loss, one] for one in moved])
    return _of_same_sizes("library", cases, lambda inputs: [loss, next(runs)])


def test_a_run_that_fails_outside_of_its_capture_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("seeds are on the device\nand more")

    found = recorded(Chaotic(DEEP))
    variant = as_kernels_of(found, recorded(Chaotic(DEEP)))
    monkeypatch.setattr("nimble_core.validation.judge.Issuer", fail)
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.reason.startswith(DROWNED)
    assert judge.notes == ["library, single could not be judged in parts: seeds are on the device"]


def test_a_replay_that_is_not_what_its_kernels_do_is_found() -> None:
    found = recorded(Chaotic(DEEP))
    variant = as_kernels_of(found, recorded(Chaotic(DEEP)))
    stale = Replay(executable(variant), torch.randn(8, 64))
    with state_kept(found):
        assert Judge(DEVICE, found).judged("library, single", variant, stale).differs  # type: ignore[arg-type]


@pytest.mark.parametrize(("by", "right"), [(1.0, True), (1.3, False)])
def test_kernels_are_compared_in_full_precision(by: float, right: bool) -> None:
    found = recorded(Chaotic(SHALLOW))
    variant = as_kernels_of(found, recorded(Wrong(SHALLOW, by)))
    matmul: Any = torch.backends.mkldnn.matmul
    with half_the_digits(), state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
        again = judge.judged("library, nimble", variant, executable(variant))
        assert matmul.fp32_precision == "tf32"
    assert check.passed is again.passed is right, check
    assert check.differs is not right
    assert (check.name, again.name) == ("library, single", "library, nimble")
    assert len(judge.notes) == 1
    assert judge.notes[0].endswith("kernels were compared in full precision")


def test_precision_is_put_back_after_an_error() -> None:
    matmul: Any = torch.backends.mkldnn.matmul

    def fail() -> None:
        with full_precision("cpu"):
            assert matmul.fp32_precision == "ieee"
            raise ZeroDivisionError

    with half_the_digits():
        with pytest.raises(ZeroDivisionError):
            fail()
        assert matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operators_go_on_following_what_is_set_for_all(device: str) -> None:
    backends: Any = torch.backends
    settings = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.cuda.matmul)
    touched = (*settings, backends.cudnn.conv, backends.cudnn.rnn)
    before = [one.fp32_precision for one in touched]
    for one in settings:
        one.fp32_precision = "none"
    try:
        backends.fp32_precision = "tf32"
        with full_precision(device):
            pass
        backends.fp32_precision = "ieee"
        assert [one.fp32_precision for one in settings] == ["ieee"] * 3
    finally:
        backends.fp32_precision = "none"
        for one, precision in zip(touched, before, strict=True):
            one.fp32_precision = precision


class Counting(nn.Module):
    """Outputs that say nothing of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.mul_(0.9).add_(y.mean(0))
        return y


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_inference_writes_is_compared(loses: bool, dtype: torch.dtype) -> None:
    model = Counting().eval().to(dtype)
    x = torch.randn(16, 8, dtype=dtype)
    signature = Signature((x,), {})
    one = record_static(DEVICE, model, signature, strict=True, step=Stopwatch())

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        before = model.seen.clone()
        with torch.no_grad():
            made = model(*inputs)
            if loses:
                model.seen.copy_(before)
        return [made]

    kept = model.seen.clone()
    check = eager_cases(one, truth=True).judged("found", one, run)
    assert torch.equal(model.seen, kept)
    assert check.differs == loses, check.reason
    assert check.passed != loses
    assert ("seen was not updated" in check.reason) == loses


def test_issued_calls_do_what_the_model_does() -> None:
    found = recorded(Chaotic(3))
    for inputs, outputs in eager_cases(found).eager:
        with state_kept(found):
            made = issued(DEVICE, found)(inputs)
        torch.testing.assert_close(list(made), list(outputs))
        assert all(one.data_ptr() != tensor.data_ptr() for one in made for tensor in found.recording.given.values())


COMPILED = [pytest.mark.compiler, pytest.mark.slow]


class Branches(nn.Module):
    """Writes where the recorded calls do not: for other strides, and in any run but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), None
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            self.seen.add_(1)
        if self.last is not None:
            self.seen.add_(10)
        self.last = x
        return self.layer(x).relu()


@pytest.mark.filterwarnings("ignore:the forward changes attributes")
@pytest.mark.parametrize("way", ["prepare", "compare"])
@pytest.mark.parametrize("fuse", ["none", "library", pytest.param("inductor", marks=COMPILED)])
def test_runs_that_take_another_branch_leave_no_trace(way: str, fuse: Any) -> None:
    model, x = Branches(), torch.randn(3, 8)[:, ::2]
    before = {name: one.clone() for name, one in model.state_dict().items()}
    options = Options(fuse=fuse, tune="off", budget_s=0.1)
    Nimble(model, options).prepare(x) if way == "prepare" else compare(model, x, options=options)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.last is None
