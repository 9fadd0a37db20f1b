from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.api.train_step import TrainStep
from nimble_core.runtime.host import out_variants as trials
from nimble_core.runtime.host.out_variants import Trial
from nimble_core.scheduling.options import Options
from nimble_core.tracing.recording import Slot, Step

READ, MADE = 0, 10
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.int8, torch.complex128, torch.bfloat16)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of another test, or of who runs them, counts."""
    monkeypatch.setattr(trials, "alone", lambda: True)


def test_beside_other_threads_random_calls_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "alone", lambda: False)
    trial = Trial(Step(torch.ops.aten.randn.default, ([3],), (), (MADE,), (), 0), {}, [])
    before = torch.get_rng_state()
    into = Step(torch.ops.aten.randn.out, ([3],), (("out", Slot(MADE)),), (), (MADE,), 0)
    assert not trial.passed(into, {MADE: torch.zeros(3)})
    assert torch.equal(torch.get_rng_state(), before)


def tried(read: torch.Tensor, made: list[torch.Tensor], filling: Callable[..., Any], *, written: bool = False) -> bool:
    """Whether ``filling(read, *tensors)`` passes as what leaves ``made``."""
    step = Step(filling, (Slot(READ),), (), tuple(range(MADE, MADE + len(made))), (READ,), 0)
    trial = Trial(step, {READ: read}, [READ] if written else [])
    into = Step(filling, (Slot(READ), *map(Slot, step.outputs)), (), (), (READ, *step.outputs), 0)
    return trial.passed(into, dict(zip(step.outputs, made, strict=True)))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage, and so those beyond the tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@st.composite
def results(draw: st.DrawFn) -> list[torch.Tensor]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        tensor = torch.randint(-2, 3, shape).to(draw(st.sampled_from(DTYPES)))
        made.append(tensor.mT.contiguous().mT if len(shape) > 1 and draw(st.booleans()) else tensor)
    return made


@given(results())
def test_a_call_that_leaves_its_results_and_nothing_else_passes(made: list[torch.Tensor]) -> None:
    def filling(read: torch.Tensor, *into: torch.Tensor) -> None:
        for own, one in zip(into, made, strict=True):
            own.copy_(one)

    assert tried(torch.randn(3), made, filling)


@given(results(), st.data())
def test_any_byte_that_is_another_is_seen(made: list[torch.Tensor], data: st.DataObject) -> None:
    nbytes = sum(one.nbytes for one in made)
    byte = data.draw(st.integers(-64, nbytes + 63))

    def filling(read: torch.Tensor, *into: torch.Tensor) -> None:
        for own, one in zip(into, made, strict=True):
            own.copy_(one)
        # Its own bytes are counted first, then those behind the last and before the first result.
        for own in into:
            if 0 <= byte < own.nbytes:
                break
        memory, start = raw(own), own.storage_offset() * own.itemsize
        memory[start + min(byte, own.nbytes)] ^= 1

    assert not tried(torch.randn(3), made, filling)


@given(results(), st.data())
def test_what_is_left_unwritten_is_seen(made: list[torch.Tensor], data: st.DataObject) -> None:
    left = data.draw(st.integers(0, len(made) - 1))

    def filling(read: torch.Tensor, *into: torch.Tensor) -> None:
        for index, (own, one) in enumerate(zip(into, made, strict=True)):
            if index != left:
                own.copy_(one)

    assert tried(torch.randn(3), made, filling) is (made[left].numel() == 0)


FAULTS: dict[str, Callable[..., Any]] = {
    "adds to what is there": lambda read, own: own.add_(read),
    "even times zero": lambda read, own: own.mul_(0).add_(read),
    "another shape": lambda read, own: own.resize_(2, 8).copy_(read.repeat(2)),
    "beyond the storage": lambda read, own: own.resize_(1 << 20)[:8].copy_(read),
    "other memory": lambda read, own: own.set_(read.clone()),
    "what it reads": lambda read, own: (own.copy_(read), read[:1].zero_()),
    "random numbers": lambda read, own: own.copy_(read).add_(torch.rand(8) * 0),
    "fails": lambda read, own: own.copy_(read[:3]),
    "rounds otherwise": lambda read, own: torch.mul(read, 1 + 2**-22, out=own),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_call_that_does_otherwise_is_refused_and_leaves_no_trace(name: str) -> None:
    read, state = torch.randn(8), torch.get_rng_state()
    before = read.clone()
    assert not tried(read, [read.clone()], FAULTS[name])
    assert torch.equal(read, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("own", [False, True], ids=["the generator of all", "one's own"])
def test_random_calls_are_tried_with_the_numbers_that_they_drew(own: bool) -> None:
    generator = torch.Generator() if own else torch.default_generator
    kwargs = (("generator", generator),) if own else ()
    step = Step(torch.randn, ((8,),), kwargs, (MADE,), (), 0)
    trial = Trial(step, {}, [])
    made = torch.randn(8, generator=generator)
    after = generator.get_state()
    into = Step(torch.randn, ((8,),), (*kwargs, ("out", Slot(MADE))), (), (MADE,), 0)
    assert trial.passed(into, {MADE: made})
    assert torch.equal(generator.get_state(), after)


@pytest.mark.parametrize("again", [1.0, 2.0])
def test_what_a_call_writes_besides_is_written_once(again: float) -> None:
    """As running statistics are."""
    statistics = torch.ones(4)

    def filling(read: torch.Tensor, own: torch.Tensor) -> None:
        own.copy_(read)
        read.mul_(again)

    step = Step(filling, (Slot(READ),), (), (MADE,), (READ,), 0)
    trial = Trial(step, {READ: statistics}, [READ])
    made = statistics.clone()
    statistics.mul_(2)
    passed = trial.passed(Step(filling, (Slot(READ), Slot(MADE)), (), (), (READ, MADE), 0), {MADE: made})
    assert passed is (again == 2)
    assert torch.equal(statistics, torch.full((4,), 2.0))


def test_large_tensors_that_are_read_are_looked_at_in_part() -> None:
    read = torch.zeros(3000, 1000)

    def filling(read: torch.Tensor, own: torch.Tensor) -> None:
        own.copy_(read.sum())
        read.mul_(2).add_(1)

    assert not tried(read, [read.sum()], filling)


@pytest.mark.parametrize("numel", [4, 100, 1000])
def test_results_that_a_call_resizes_and_back_do_not_pass(numel: int) -> None:
    """As ``mse_loss.out`` does with what it will reduce: an arena would be allocated anew."""
    read = torch.randn(numel)

    def filling(read: torch.Tensor, own: torch.Tensor) -> None:
        own.resize_(read.shape)
        own.resize_(()).copy_(read.sum())

    assert not tried(read, [read.sum()], filling)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.huber_loss, F.smooth_l1_loss])
def test_what_a_trial_finds_is_not_printed(loss_fn: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch says that a result is resized, and an operator's own entry hands no warning to Python."""
    net, x, y = torch.nn.Linear(3, 5), torch.randn(7, 3), torch.randn(7, 5)  # shapes that no other test has tried
    refused = len(trials._refused)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, lambda out, target: loss_fn(out, target) * 2, optimizer, options=Options(tune="off"))
    step.prepare(x, y).close()
    assert len(trials._refused) > refused, "nothing was tried"
    assert capfd.readouterr().err == ""


def test_an_operators_own_entry_prints_what_it_warns_of(capfd: pytest.CaptureFixture[str]) -> None:
    """Why trials are called through a binding that hands warnings to Python."""
    x, y = torch.randn(7, 3), torch.randn(7, 3)
    run = partial(torch.ops.aten.mse_loss.out, x, y, out=torch.ones(()))
    with warnings.catch_warnings(record=True) as told:
        run()
    assert "resized" in capfd.readouterr().err or told, "torch 2.15 hands it to Python by itself"
    with pytest.warns(UserWarning, match="resized"):
        trials._Told.apply(run)
    assert capfd.readouterr().err == ""
