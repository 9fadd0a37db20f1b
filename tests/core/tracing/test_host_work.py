"""Host tensors while a device is recorded: calls read what they held at that moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.tracing.fake_run import _DeviceWork
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import CaptureError


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

    def views(x: torch.Tensor) -> list[torch.Tensor]:
        table = torch.zeros(2)
        made = [x * table[0], x * table[1]]
        table.add_(1)
        table[1] = 7.0
        return [*made, x * table[0], x + table[1]]

    def filled(x: torch.Tensor) -> list[torch.Tensor]:
        value, made = torch.tensor(1.0), []
        for _ in range(2):
            made.append(x.clone().index_put_((x > 0,), value))
            value += 1
        return made

    assert host_numbers(number) == [[1.0], [1.0], [2.0], [2.0], [3.0], [3.0]]
    assert host_numbers(views) == [[0.0], [0.0], [1.0], [7.0]]
    assert host_numbers(filled) == [[1.0], [2.0]]


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
