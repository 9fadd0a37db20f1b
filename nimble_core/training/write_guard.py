"""Refuses a backward whose parameters, inputs or outputs were written or moved since its forward."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from nimble_core.utils.errors import InputError

__all__ = ["AtForward", "WriteGuard"]

_version = attrgetter("_version")
_kind = attrgetter("dtype", "device", "shape")


class AtForward(NamedTuple):
    """Version counters as they were at a forward: of what its backward reads, and of outputs that it shows."""

    read: list[int]
    shown: list[int]


class WriteGuard:
    """Compares what a backward reads with what it was at the forward.

    Args:
        parameters: those that get gradients.
        names: of these.
        read: tensors that exist before the forward and that the backward reads, by name.
        shown: outputs that are shown as they lie in the forward's memory, and that the backward reads.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        read: Sequence[tuple[str, torch.Tensor]],
        shown: Sequence[torch.Tensor],
    ) -> None:
        self._parameters, self._names = parameters, names
        self._read_names = [name for name, _ in read]
        self._read = [tensor for _, tensor in read]
        self._shown = list(shown)
        self._memory = list(map(torch.Tensor.data_ptr, parameters))
        self._kinds = list(map(_kind, parameters))

    def at_forward(self) -> AtForward:
        """Take the version counters, which fused optimizers and writes through ``.data`` do not raise."""
        return AtForward(list(map(_version, self._read)), list(map(_version, self._shown)))

    def require_unchanged(self, before: AtForward) -> None:
        """Raise InputError for a write in place, a move or a conversion since ``before``."""
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
        # A forward runs on what was prepared, and recordings hold that memory: elsewhere means another tensor.
        if list(map(torch.Tensor.data_ptr, self._parameters)) == self._memory:
            return
        for name, parameter, was in zip(self._names, self._parameters, self._kinds, strict=True):
            if _kind(parameter) != was:
                raise InputError(
                    f"{name} was {_described(was)} in the forward, and is {_described(_kind(parameter))}: a gradient "
                    "of that forward does not fit it",
                    fix="call backward() before moving or converting the model, or the forward again after it",
                )


def _described(kind: tuple[Any, ...]) -> str:
    dtype, device, shape = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
