"""A module that stands for another: its parameters, attributes, mode and state are the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

__all__ = ["WrappedModule"]


class WrappedModule(torch.nn.Module):
    """A module with the parameters, buffers, submodules and ``state_dict`` of ``model``.

    Args:
        model: a module, or any function.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        # Beside the module system: registering the model would prefix every name in state_dict.
        object.__setattr__(self, "_model", model)
        if isinstance(model, torch.nn.Module):
            for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                object.__setattr__(self, table, getattr(model, table))
            object.__setattr__(self, "training", getattr(model, "training", False))

    def train(self, mode: bool = True) -> Self:
        """Set the wrapped model's mode."""
        if isinstance(self._model, torch.nn.Module):
            self._model.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_model")
        mine = name in self.__dict__ or hasattr(type(self), name)
        if not mine and isinstance(model, torch.nn.Module) and hasattr(model, name):
            setattr(model, name, value)  # what is read from the model is written to it
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own, with what its hooks and ``get_extra_state`` add."""
        model = self._model
        if isinstance(model, torch.nn.Module):
            return model.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; see ``torch.nn.Module.load_state_dict``."""
        model = self._model
        if isinstance(model, torch.nn.Module):
            return model.load_state_dict(*args, **kwargs)
        return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # where this is a part of what is loaded
        model = self._model
        if isinstance(model, torch.nn.Module):
            model._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        model = self._model
        if isinstance(model, torch.nn.Module):
            model._apply(*args, **kwargs)
        return self
