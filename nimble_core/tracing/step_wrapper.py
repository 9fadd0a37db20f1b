"""A module that runs another one inside a larger function under the same names and in the same mode."""

from __future__ import annotations

from typing import Any, Self

import torch

from nimble_core.utils.errors import InputError

__all__ = ["Around", "require_gradients", "require_training_mode"]


def require_gradients() -> None:
    """Raise InputError under ``torch.inference_mode``, in which there are no gradients."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "torch.inference_mode is on: training needs gradients, which are not recorded under it",
            fix="leave inference_mode, or train under torch.inference_mode(False)",
        )


def require_training_mode(model: torch.nn.Module, *, preparing: bool = True) -> None:
    """Raise InputError for a module in evaluation mode; parts of it may be in that mode.

    One rule for ``TrainStep``, ``prepare(training=True)`` and ``compare(training=True)``: otherwise dropout would drop
    nothing and batch norm learn nothing, without a word. Modes of torch without a backward, or with one that cannot be
    recorded, are refused as well.
    """
    require_gradients()
    if preparing and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise InputError(
            "torch.autograd.detect_anomaly is on: it reads every gradient back from the device, which no replay can do",
            fix="prepare outside of it, or with check_nan=False; to look for a nan, train the model itself in eager",
        )
    if not hasattr(model, "training"):
        raise InputError(
            f"the {type(model).__name__} was frozen (torch.jit.freeze): its weights are constants",
            fix="train the model that it was made of",
        )
    if not model.training:
        raise InputError(
            f"{type(model).__name__} is in evaluation mode: dropout and batch norm would not train",
            fix="model.train() first; parts that are to stay as they are: part.eval() after that",
        )


class Around(torch.nn.Module):
    """Parameters, buffers, submodules and mode are those of ``model``, under the same names.

    Args:
        model: what is run.

    Attributes:
        input_names: what users call the positional inputs, in error messages and reports; those without a name are
            ``args[0]``, ….
    """

    model: torch.nn.Module
    input_names: tuple[str, ...] = ()

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # beside the module system, which would prefix every name

    @property
    def training(self) -> bool:
        """The model's mode."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore what ``torch.nn.Module`` itself sets: the mode is the model's."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return those of the model."""
        return self.model.named_modules(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.model._apply(*args, **kwargs)
        return self
