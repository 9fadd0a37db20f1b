"""Is the model still the one that was prepared? Asked after each run, while the device is busy with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Watch"]


class Watch:
    """Remembers a model's parameters, buffers, submodules and their modes.

    Values may change: replays read them live. What a replay cannot follow is another tensor, other memory behind the
    same tensor, another submodule, or a submodule in another mode.

    Args:
        model: module, or a function, of which there is nothing to remember.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
        self._tensors = [
            (table, key, tensor, tensor.data_ptr(), f"{path}.{key}".lstrip("."))
            for path, module in modules.items()
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]
        self._modules = [
            (module._modules, key, child, child.training, f"{path}.{key}".lstrip("."))
            for path, module in modules.items()
            for key, child in module._modules.items()
            if child is not None
        ]

    def change(self) -> str:
        """The first change, in words; empty if there is none. About 0.15 µs for each tensor and submodule."""
        for table, key, tensor, pointer, name in self._tensors:
            if table.get(key) is not tensor:
                return f"{name} is another tensor than it was"
            if tensor.data_ptr() != pointer:
                return f"{name} has other memory than it had"
        for children, key, child, training, name in self._modules:
            if children.get(key) is not child:
                return f"{name} is another module than it was"
            if child.training is not training:
                return f"{name} is in {'training' if child.training else 'evaluation'} mode now"
        return ""
