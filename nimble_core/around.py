"""A module that runs another one in a larger function, and passes for it: same names, same mode."""

from __future__ import annotations

from typing import Any, Self

import torch

__all__ = ["Around"]


class Around(torch.nn.Module):
    """Parameters, buffers, submodules and mode are those of ``model``, under the same names.

    Args:
        model: what is run.
    """

    model: torch.nn.Module

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # beside the module system, which would prefix every name

    @property
    def training(self) -> bool:
        """The model's mode."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set by ``torch.nn.Module`` itself; the model's mode is the model's."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Those of the model."""
        return self.model.named_modules(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.model._apply(*args, **kwargs)
        return self
