"""Autocast at preparation and at a call: which type products and convolutions are cast to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "autocast_name", "autocast_type", "no_autocast"]


def autocast_type(device: str) -> torch.dtype | None:
    """Return the type that autocast casts products to here; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_name(casts: torch.dtype | None) -> str:
    """Name such a type: ``"bfloat16"``, or ``"off"``."""
    return "off" if casts is None else str(casts).removeprefix("torch.")


@contextmanager
def no_autocast(device: str) -> Iterator[None]:
    """Turn autocast off inside: in a backward, and where casts were recorded as calls.

    Source:
        PyTorch documentation, "Automatic Mixed Precision package": backward passes under autocast are not recommended,
        their operators run in the types that autocast chose for the forward's.
    """
    with torch.autocast(device, enabled=False), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast under which something was recorded: its casts are calls of the recording.

    Args:
        device: type of the device, e.g. ``"cuda"``.
        casts: type that autocast cast to; None if it was off.
    """

    device: str
    casts: torch.dtype | None

    @classmethod
    def here(cls, device: str) -> Autocast:
        """Return the autocast in force."""
        return cls(device, autocast_type(device))

    def holds(self) -> bool:
        """Return whether this autocast is in force."""
        return autocast_type(self.device) is self.casts

    def change(self) -> str:
        """Say how the autocast in force differs from this one."""
        return f"autocast was {autocast_name(self.casts)} then, and is {autocast_name(autocast_type(self.device))} now"
