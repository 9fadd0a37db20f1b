"""Steps that amplify rounding until no digit is left are judged in parts, and what is wrong is still found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nimble_core.autotune.capture_pipeline import capture
from nimble_core.compiler.pipeline import fuse
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.policies.single import single
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.validation.eager_cases import Cases, eager_cases
from nimble_core.validation.equality import DROWNED
from nimble_core.validation.judge import Judge, check_sizes, full_precision
from tests.support.tent_maps import Chaotic, Remembering, Wrong, recorded_step

DEVICE = HostDevice()


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
    """Allow TF32 products, on a machine that may not have them."""
    matmul: Any = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = "none"


DEEP, BETWEEN, SHALLOW = 60, 11, 10


def test_nothing_can_be_shown_at_once() -> None:
    found = recorded_step(Chaotic(DEEP))
    assert eager_cases(found).judged("single", found, executable(found).run).reason.startswith(DROWNED)
    other = recorded_step(Chaotic(SHALLOW))
    with half_the_digits():
        assert eager_cases(other).judged("single", other, executable(other).run).reason.startswith(DROWNED)
    assert eager_cases(other).judged("single", other, executable(other).run).passed


def test_eagers_kernels_are_compared_with_themselves() -> None:
    found = recorded_step(Chaotic(DEEP))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        assert judge.judged("single", found, executable(found)).passed
        assert not judge.judged("stale", found, Replay(executable(found), torch.randn(8, 64))).passed  # type: ignore[arg-type]
    assert not judge.notes


@pytest.mark.parametrize(
    ("eager", "other", "said"),
    [
        (Chaotic(DEEP), Wrong(DEEP, 1.0), ""),
        (Chaotic(DEEP), Wrong(DEEP, 3.0), "not of the size"),
        (Chaotic(DEEP), Wrong(DEEP, 0.0), "not of the size"),
        (Remembering(DEEP, 1.0), Remembering(DEEP, 1.0), ""),
        (Remembering(DEEP, 1.0), Remembering(DEEP, 1.5), "mean"),
    ],
)
def test_other_kernels_are_compared_by_sizes_where_no_precision_helps(eager: Any, other: Any, said: str) -> None:
    found = recorded_step(eager)
    variant = as_kernels_of(found, recorded_step(other))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.passed == (not said), check
    assert check.differs == bool(said)
    assert said in check.reason
    assert "sizes of gradients" in judge.notes[0]
    assert ["one by one" in note for note in judge.notes[1:]] == [True] * bool(said), "whose fault it is"


@pytest.mark.parametrize(("by", "right"), [(1.0, True), (3.0, False)])
def test_a_step_with_digits_left_is_judged_at_once(by: float, right: bool) -> None:
    found = recorded_step(Chaotic(BETWEEN))
    variant = as_kernels_of(found, recorded_step(Wrong(BETWEEN, by)))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.differs is not right, check
    assert any("one by one" in note for note in judge.notes) is not right, "whose fault it is"


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


def test_nothing_is_shown_where_zeros_would_pass() -> None:
    check = check_sizes(
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
    return check_sizes("library", cases, lambda inputs: [loss, next(runs)])


def test_a_run_that_fails_outside_of_its_capture_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("seeds are on the device\nand more")

    found = recorded_step(Chaotic(DEEP))
    variant = as_kernels_of(found, recorded_step(Chaotic(DEEP)))
    monkeypatch.setattr("nimble_core.validation.judge.Issuer", fail)
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.reason.startswith(DROWNED)
    assert judge.notes == ["library, single could not be judged in parts: seeds are on the device"]


def test_a_replay_that_is_not_what_its_kernels_do_is_found() -> None:
    found = recorded_step(Chaotic(DEEP))
    variant = as_kernels_of(found, recorded_step(Chaotic(DEEP)))
    stale = Replay(executable(variant), torch.randn(8, 64))
    with state_kept(found):
        assert Judge(DEVICE, found).judged("library, single", variant, stale).differs  # type: ignore[arg-type]


@pytest.mark.parametrize(("by", "right"), [(1.0, True), (1.3, False)])
def test_kernels_are_compared_in_full_precision(by: float, right: bool) -> None:
    found = recorded_step(Chaotic(SHALLOW))
    variant = as_kernels_of(found, recorded_step(Wrong(SHALLOW, by)))
    matmul: Any = torch.backends.mkldnn.matmul
    with half_the_digits(), state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
        again = judge.judged("library, nimble", variant, executable(variant))
        assert matmul.fp32_precision == "tf32"
    assert check.passed is again.passed is right, check
    assert check.differs is not right
    assert (check.name, again.name) == ("library, single", "library, nimble")
    assert len(judge.notes) == 1 + (not right), "of what is wrong, whose fault it is"
    assert judge.notes[0].endswith("kernels were compared in full precision")


class Normed(Chaotic):
    """Begins with a batch norm, whose running mean no gradient shows."""

    def __init__(self, times: int) -> None:
        super().__init__(times)
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def forgetful(func: Any) -> Any:
    """Return a batch norm that spoils its running mean, and returns what it should."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        args[3].mul_(1.5)
        return made

    return run


@pytest.mark.parametrize("planted", [False, True])
def test_who_spoils_the_state_of_a_step_is_found(planted: bool) -> None:
    found = recorded_step(Normed(DEEP))
    variant = fuse(DEVICE, found, "library", measure=False, step=Stopwatch())
    if planted:
        steps = [
            replace(one, func=forgetful(one.func)) if "native_batch_norm.default" in str(one.func) else one
            for one in variant.recording.steps
        ]
        variant = replace(variant, recording=replace(variant.recording, steps=tuple(steps)))
    with state_kept(found):
        judge = Judge(DEVICE, found)
        check = judge.judged("library, single", variant, executable(variant))
    assert check.passed is not planted, check
    assert ("running_mean" in check.reason) is planted
    found_out = judge.faults("library")
    assert (found_out is not None) is planted
    assert not planted or any("native_batch_norm" in place for place in found_out.places)


class Off:
    """An executable whose results are off by a share of their size."""

    def __init__(self, inner: Any, by: float) -> None:
        self.inner, self.by = inner, by

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        return [one * (1 + self.by) for one in self.inner.run(inputs, static=static)]


@pytest.mark.parametrize(
    ("dtype", "by", "room", "right_kernels", "passes"),
    [
        (torch.bfloat16, 0.06, False, True, True),
        (torch.bfloat16, 0.12, False, True, False),  # six tolerances
        (torch.bfloat16, 0.06, False, False, False),
        (torch.bfloat16, 0.06, True, True, False),  # float64 tells how far eager itself is off
        (torch.bfloat16, 0.014, True, True, True),
        (torch.bfloat16, 0.014, True, False, False),
        (torch.float32, 3e-4, False, True, False),
    ],
)
def test_rounding_may_add_up_where_all_kernels_are_right(
    dtype: torch.dtype, by: float, room: bool, right_kernels: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr("nimble_core.validation.float64_reference.memory_limit", lambda device: 0)
        monkeypatch.setattr("nimble_core.validation.kernel_check.memory_limit", lambda device: 0)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)]
    model = torch.nn.Sequential(*layers).eval().to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    eager = record_static(DEVICE, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())
    variant = fuse(DEVICE, eager, "library", measure=False, step=Stopwatch())
    if not right_kernels:
        steps = [
            replace(one, func=torch.ops.aten.abs.default) if "relu" in str(one.func) else one
            for one in variant.recording.steps
        ]
        variant = replace(variant, recording=replace(variant.recording, steps=tuple(steps)))
    judge = Judge(DEVICE, eager)
    check = judge.judged("library, single", variant, Off(executable(variant), by))  # type: ignore[arg-type]
    assert check.passed is passes, check
    assert check.error <= check.tolerance or not passes
    assert any("rounding adds up" in note for note in judge.notes) is passes


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
