"""What a training step asks of its loss: a function that can be called, and a scalar to differentiate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from nimble_core.utils.errors import InputError

__all__ = ["require_no_class", "require_no_target", "require_scalar"]


def require_no_class(loss_fn: Callable[..., Any]) -> None:
    """Raise InputError for the class of a loss: called, it makes one."""
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise InputError(f"loss_fn is the class {name}", fix=f"pass an instance: loss_fn={name}()")


def require_no_target(loss_fn: Callable[..., Any], give: str) -> None:
    """Raise InputError for a loss that cannot be called with the output alone, as far as its signature tells.

    Args:
        loss_fn: the loss.
        give: how the caller would give it a target.
    """
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        taken = inspect.signature(called)
    except (TypeError, ValueError):  # written in C
        return
    try:
        taken.bind(None)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise InputError(
            f"the loss {name} cannot be called with the model's output alone: {error}",
            fix=f"give {give}, or a loss_fn of the output alone",
        ) from error


def require_scalar(loss: object) -> None:
    """Raise InputError for a loss that is not one real number with a gradient."""
    what, fix = "", ""
    if isinstance(loss, (bool, int, float)):
        what = f"a Python {type(loss).__name__}, which carries no gradient"
        fix = "drop .item() or float(...): return the tensor"
    elif not isinstance(loss, torch.Tensor):
        what = type(loss).__name__
    elif loss.numel() != 1:
        what = f"shape {list(loss.shape)}"
    elif not loss.requires_grad:
        what = "no gradient"
    elif loss.is_complex():
        what, fix = f"it is complex ({loss.dtype})", "return a real one: loss.abs(), or loss.real"
    if what:
        raise InputError(
            f"the loss is not a scalar to differentiate: {what}",
            fix=fix
            or "return loss.mean(), or unfreeze parameters; where the model itself differentiates, "
            "torch.autograd.grad(..., create_graph=True)",
        )
