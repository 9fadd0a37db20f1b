"""What autocast makes of products and convolutions around a preparation, and around a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Autocast", "autocast_name", "autocast_type"]


def autocast_type(device: str) -> torch.dtype | None:
    """What autocast casts products to here, None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_name(casts: torch.dtype | None) -> str:
    """That in words."""
    return "off" if casts is None else str(casts).removeprefix("torch.")


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
