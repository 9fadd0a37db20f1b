"""Refuses a backward that reads what was written in place since its forward."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from nimble_core.utils.errors import InputError

__all__ = ["AtForward", "WriteGuard"]

_version = attrgetter("_version")


class AtForward(NamedTuple):
    """Version counters as they were at a forward: of what its backward reads, and of outputs that it shows."""

    read: list[int]
    shown: list[int]


class WriteGuard:
    """Compares what a backward reads with what it was at the forward.

    Args:
        read: tensors that exist before the forward and that the backward reads, by name.
        shown: outputs that are shown as they lie in the forward's memory, and that the backward reads.
    """

    def __init__(self, read: Sequence[tuple[str, torch.Tensor]], shown: Sequence[torch.Tensor]) -> None:
        self._read_names = [name for name, _ in read]
        self._read = [tensor for _, tensor in read]
        self._shown = list(shown)

    def at_forward(self) -> AtForward:
        """Take the version counters, which fused optimizers and writes through ``.data`` do not raise."""
        return AtForward(list(map(_version, self._read)), list(map(_version, self._shown)))

    def require_unchanged(self, before: AtForward) -> None:
        """Raise InputError for a write in place since ``before``."""
        now = self.at_forward()
        if now.read != before.read:
            at = next(at for at, (was, one) in enumerate(zip(before.read, now.read, strict=True)) if was != one)
            raise InputError(
                f"{self._read_names[at]} was written between the forward and its backward, which reads it",
                fix="call backward() before optimizer.step(), and before other writes in place",
            )
        if now.shown != before.shown:
            raise InputError(
                "an output was written between the forward and its backward, which reads it",
                fix='write a copy of it, or prepare with Options(outputs="copy")',
            )
