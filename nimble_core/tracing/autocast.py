"""What autocast makes of products and convolutions around a preparation, and around a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "autocast_name", "autocast_type", "no_autocast"]


def autocast_type(device: str) -> torch.dtype | None:
    """What autocast casts products to here, None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_name(casts: torch.dtype | None) -> str:
    """That in words."""
    return "off" if casts is None else str(casts).removeprefix("torch.")


@contextmanager
def no_autocast(device: str) -> Iterator[None]:
    """Inside, nothing is cast, as in a backward, or where casts are calls already: what was to be cast has been.

    Source:
        PyTorch documentation, "Automatic Mixed Precision package": backward passes under autocast are not recommended,
        their operators run in the types that autocast chose for the forward's.
    """
    with torch.autocast(device, enabled=False), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, slots=True)
class Autocast:
    """What was recorded holds under: its casts are calls like all else.

    Args:
        device: whose autocast, e.g. ``"cuda"``.
        casts: type that it cast to; None if it was off.
    """

    device: str
    casts: torch.dtype | None

    @classmethod
    def here(cls, device: str) -> Autocast:
        """The one in force."""
        return cls(device, autocast_type(device))

    def holds(self) -> bool:
        """Whether it is in force."""
        return autocast_type(self.device) is self.casts

    def change(self) -> str:
        """How the one in force differs from it, in words."""
        return f"autocast was {autocast_name(self.casts)} then, and is {autocast_name(autocast_type(self.device))} now"
