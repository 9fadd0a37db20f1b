"""What the host reads, waits for and does itself: every run finds the same, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.tracing.fake_run import _DeviceWork
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import CaptureError, InputError, NotStaticError
from tests.support.models import Deep
from tests.support.recordings import assert_clean, recorded


class Padded(nn.Module):
    """Pads by numbers that it keeps in tensors, and picks by a mask."""

    number: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("number", torch.tensor(1))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.kept = torch.tensor([2, 0])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.kept.tolist()
        padded = nn.functional.pad(x, (left, int(self.number * 2 + right)))
        ends = torch.arange(2, 5, device=x.device)
        return self.layer(x)[:, self.mask], padded * torch.arange(ends[0], ends[-1], device=x.device).sum()


CHANGES = pytest.mark.parametrize(
    ("name", "change"),
    [
        ("number", lambda model: model.number.add_(1)),
        ("mask", lambda model: model.mask.logical_not_()),
        ("a tensor without a name", lambda model: model.kept.add_(1)),
    ],
    ids=["number", "mask", "attribute"],
)


def holds_what_it_read(device: str, fuse: Any, training: bool, name: str, change: Callable[[Padded], object]) -> None:
    torch.manual_seed(0)
    model = Padded().to(device)
    x = torch.randn(3, 4, device=device)
    net = Nimble(model, Options(fuse=fuse, tune="off", strict=True)).prepare(x, training=training)
    y = torch.randn(3, 4, device=device)
    with torch.set_grad_enabled(training):
        for found, expected in zip(net(y), model(y), strict=True):
            torch.testing.assert_close(found, expected)
        change(model)
        for _ in range(2):
            with pytest.raises(InputError, match=f"the model reads {name} on the host") as caught:
                net(y)
    assert "prepare" in caught.value.fix


@CHANGES
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fuse", ["none", "library"])
def test_what_is_read_of_the_models_own_tensors_is_held(fuse: str, training: bool, name: str, change: Any) -> None:
    holds_what_it_read("cpu", fuse, training, name, change)


@CHANGES
@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_what_is_read_on_a_gpu_is_computed_outside_of_the_capture(fuse: str, name: str, change: Any) -> None:
    holds_what_it_read("cuda", fuse, False, name, change)


def test_another_value_that_gives_the_same_number_is_no_change() -> None:
    scale = nn.Linear(2, 1)
    with torch.no_grad():
        scale.weight.fill_(3.0)
    net = Nimble(lambda x: x * int(scale.weight.sum()), Options(fuse="none", tune="off"))
    x = torch.randn(3)
    net.prepare(x)
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([[2.0, 4.0]]))
    assert torch.equal(net(x), x * 6)
    with torch.no_grad():
        scale.weight.fill_(1.0)
    with pytest.raises(InputError, match="reads a tensor without a name on the host"):
        net(x)


class Counting(nn.Module):
    """Counts its runs in a buffer, and reads it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.count.item()
        self.count += 1
        return x * number


def test_a_number_that_the_model_reads_and_writes_is_refused() -> None:
    with pytest.raises(CaptureError, match="buffer count is written by the model, and read on the host"):
        Nimble(Counting(), Options(fuse="none", tune="off")).prepare(torch.randn(3))


@pytest.mark.parametrize("number", [lambda count: int(count) + 1, lambda count: count + 1], ids=["read", "computed"])
def test_a_number_that_the_model_reads_and_replaces_is_refused(number: Any) -> None:
    class Replacing(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = torch.as_tensor(number(self.count))
            return x * self.count.item()

    with pytest.raises(NotStaticError, match="reads count on the host, and replaces count"):
        Nimble(Replacing(), Options(fuse="none", tune="off")).prepare(torch.randn(3))


def test_a_trained_parameter_that_is_read_is_refused() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.scale.detach().item()

    with pytest.raises(CaptureError, match="parameter scale is trained, and read on the host"):
        Nimble(Scaling(), Options(fuse="none", tune="off")).prepare(torch.randn(3), training=True)


def _compare(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return x * 2


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "bool": (_compare, "_local_scalar_dense|is_nonzero"),
    "index": (lambda x: x[: x.argmax()], "_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "repeat": (lambda x: torch.repeat_interleave(x, (x > 0).long()), "repeat_interleave"),
    "equal": (lambda x: x if torch.equal(x, x + 1) else x * 2, "equal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_need_the_host_are_refused(name: str) -> None:
    forward, operator = REFUSED[name]

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(x)

    model = nn.Sequential(nn.Identity(), Inner())
    with pytest.raises(CaptureError, match=operator) as caught:
        recorded(model, torch.randn(5))
    assert "in 1 at" in caught.value.where
    assert f"test_host_reads.py:{forward.__code__.co_firstlineno}"[:-1] in caught.value.where
    assert caught.value.fix
    assert_clean()
    assert recorded(Deep(), torch.randn(1, 8)).program.calls


def test_batch_norm_that_averages_over_all_batches_is_told_what_helps() -> None:
    model = nn.BatchNorm1d(4, momentum=None).train()
    with pytest.raises(CaptureError, match="written by the model, and read on the host") as caught:
        Nimble(model).prepare(torch.randn(3, 4), training=True)
    assert caught.value.fix == "give momentum a number: with None torch reads how many batches there were"


def host_numbers(model: Any) -> list[list[float]]:
    """What each call of the device reads from the host: numbers are real there, and the device is none."""
    x = torch.randn(3, device="meta")
    with _DeviceWork() as work:
        recording = record(model, Signature((x,), {}), args=(x,), kwargs={}, counter=work)
    given = {slot: one for slot, one in recording.given.items() if one.device.type == "cpu"}
    reads = [[given[slot] for slot in step.reads if slot in given] for step in recording.steps]
    return [one[0].flatten().tolist() for one in reads if one]


def test_what_was_read_of_the_host_before_it_changes_is_another_constant() -> None:
    """Steps are issued again after the run: one tensor would hold its last value for all of them."""

    def number(x: torch.Tensor) -> list[torch.Tensor]:
        scale, made = torch.tensor(1.0), []
        for _ in range(3):
            made += [x * scale, x + scale]
            scale.add_(1)
        return made

    assert host_numbers(number) == [[1.0], [1.0], [2.0], [2.0], [3.0], [3.0]]


def test_numbers_of_the_host_that_were_there_before_are_not_to_change_once_they_are_read() -> None:
    class Counts(nn.Module):
        def __init__(self, read: bool) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(1.0))
            self.read = read

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = x * self.calls if self.read else x * 2
            self.calls.add_(1)
            return made

    with pytest.raises(CaptureError, match="on the host that a call on the device has read"):
        host_numbers(Counts(True))
    assert host_numbers(Counts(False)) == []


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    lstm = nn.LSTM(4, 8, batch_first=True)

    def packed(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data

    with pytest.raises(CaptureError) as caught:
        Nimble(packed, Options(tune="off")).prepare(torch.randn(3, 5, 4), torch.tensor([5, 3, 2]))
    assert "pass the padded batch" in caught.value.fix
