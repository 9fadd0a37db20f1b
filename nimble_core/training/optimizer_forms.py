"""Which of torch's optimizers a whole step captures, and in which of torch's forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import foreach_kernels, fused_kernels
from nimble_core.torch_compat.members import ALL_POST_HOOKS, ALL_PRE_HOOKS
from nimble_core.utils.errors import InputError

__all__ = ["ParameterGroup", "group_place", "groups_of", "other_form", "require_no_hooks", "require_stock"]

_STOCK: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
if torch.__version__ >= "2.13":  # before, its fused form takes learning rates as Python numbers only
    _STOCK = (*_STOCK, torch.optim.Adagrad)

_FORMS = ("foreach", "fused", "capturable")
"""Flags that choose among implementations of the same step."""
_FORM_NAMES = {"fused": "fused", "foreach": "for-each", "": "parameter-by-parameter"}
_FUSED_TYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_WATCHERS = ("nimble_core", "nimble_viz", "torch")
"""Packages whose hooks of all optimizers only watch: torch's profiler, ours, and our guard of weights."""
_DROP_IN = "train in place of the model: prepare(x, training=True), then loss.backward() and the optimizer's own step()"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group as it was when the optimizer was captured.

    Args:
        members: all its parameters.
        trained: which of them require gradients.
        positions: of these, among the trained parameters of all groups.
        options: what the captured step sees, except for ``params`` and ``lr``.
        settings: hyperparameters that may not change afterwards.
        fused: whether the fused form is used; the capturable one otherwise.
    """

    members: tuple[torch.Tensor, ...]
    trained: tuple[bool, ...]
    positions: tuple[int, ...]
    options: dict[str, Any]
    settings: dict[str, Any]
    fused: bool


def group_place(group: int) -> str:
    """Name a parameter group in errors."""
    return f"param_groups[{group}]"


def require_stock(optimizer: object) -> None:
    """Raise InputError for what is none of torch's optimizers on the list; a subclass may step otherwise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"the optimizer is a {type(optimizer).__name__}", fix="pass a torch.optim.Optimizer")
    if type(optimizer) not in _STOCK:
        names = ", ".join(one.__name__ for one in _STOCK)
        raise InputError(
            f"a whole step cannot capture {type(optimizer).__name__}", fix=f"use one of {names}; or {_DROP_IN}"
        )


def require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for hooks of steps, and for a step that was replaced: a captured step would skip them."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            "the optimizer has step hooks: they expect gradients in .grad, and a captured step would skip them",
            fix="remove them, and do after the step what they do",
        )
    for hook in chain(ALL_PRE_HOOKS.values(), ALL_POST_HOOKS.values()):
        if getattr(hook, "__module__", "").partition(".")[0] not in _WATCHERS:
            called = getattr(hook, "__qualname__", type(hook).__name__)
            raise InputError(
                f"{called} is registered as a hook of all optimizers' steps, which a captured step would skip",
                fix="remove it, and do after the step what it does",
            )
    replaced = vars(optimizer).get("step")
    if replaced is not None:
        inside = getattr(replaced, "__wrapped__", None) if hasattr(replaced, "_wrapped_by_lr_sched") else None
        if inside is not type(optimizer).step:
            raise InputError(
                "the optimizer's step was replaced by another function, which a captured step would skip",
                fix="del optimizer.step",
            )


def groups_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[ParameterGroup]:
    """Describe each parameter group, and choose its form.

    Raises:
        InputError: no form of the step runs on the device alone, for these hyperparameters and parameters.
    """
    start = 0
    for at, group in enumerate(optimizer.param_groups):
        _require_numbers(optimizer, group, group_place(at))
        trained = []
        for member, one in enumerate(group["params"]):
            if one.requires_grad:
                _require_plain(one, device, f"{group_place(at)}['params'][{member}]")
                trained.append(one)
        types = {one.dtype for one in trained}
        fused = "fused" in group and types <= _fused_types(optimizer, device)
        if trained and not fused and "capturable" not in group:
            raise InputError(
                f"{type(optimizer).__name__} has no form that stays on the device: on {device.type} for "
                f"{', '.join(sorted(map(str, types)))}",
                where=group_place(at),
                fix=f"use Adam or AdamW; or {_DROP_IN}",
            )
        forms = {"fused": fused, "foreach": not fused, "capturable": True}
        options = {key: forms.get(key, value) for key, value in group.items() if key not in ("params", "lr")}
        fixed = (key for key in options if key in optimizer.defaults and key not in _FORMS)
        yield ParameterGroup(
            members=tuple(group["params"]),
            trained=tuple(one.requires_grad for one in group["params"]),
            positions=tuple(range(start, start + len(trained))),
            options=options,
            settings={key: copy(group[key]) for key in fixed},
            fused=fused,
        )
        start += len(trained)
    if not start:
        raise InputError(f"{type(optimizer).__name__} has no parameters that require gradients", fix="unfreeze some")


def _require_numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    if group.get("differentiable"):
        raise InputError("differentiable=True records the step for autograd", where=where, fix="leave it out")
    for key, value in group.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if key != "lr" and key in optimizer.defaults and any(isinstance(one, torch.Tensor) for one in parts):
            raise InputError(f"{key} is a tensor, which the step reads back", where=where, fix="give numbers")


def _require_plain(parameter: torch.Tensor, device: torch.device, where: str) -> None:
    if parameter.device != device:
        raise InputError(f"a parameter is on {parameter.device}, the model on {device}", where=where)
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(f"a parameter is a {type(parameter).__name__}", where=where, fix="use plain parameters")
    # Fused kernels walk through memory from the first element on, and would update what lies in gaps instead.
    if parameter.numel() and not torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        raise InputError(
            "a parameter has gaps in its memory, which fused kernels would write",
            where=where,
            fix="make it of a copy without gaps, nn.Parameter(view.contiguous())",
        )


def _fused_types(optimizer: torch.optim.Optimizer, device: torch.device) -> Set[torch.dtype]:
    if device.type not in fused_kernels():
        return frozenset()
    if device.type == "cpu" and isinstance(optimizer, torch.optim.SGD):
        return _FUSED_TYPES - {torch.float16, torch.bfloat16}  # left unchanged: pytorch issue 191763, torch <= 2.13
    return _FUSED_TYPES


def other_form(optimizer: torch.optim.Optimizer, groups: tuple[ParameterGroup, ...], device: torch.device) -> str:
    """Say how the captured form differs from the one that the optimizer's own ``step`` runs; empty if it does not.

    Both make the same step, by other kernels: a difference in time that comes from no capture or schedule.
    """
    name = type(optimizer).__name__
    for group, given in zip(groups, optimizer.param_groups, strict=True):
        if not group.positions or "foreach" not in given:
            continue
        ours, eager = "fused" if group.fused else "foreach", _eager_form(given, device)
        if ours != eager:
            return (
                f"updates are made by torch's {_FORM_NAMES[ours]} {name}, while its step() runs the "
                f"{_FORM_NAMES[eager]} form: part of the difference in time is that ({name}(..., {ours}=True) to "
                "compare without)"
            )
    return ""


def _eager_form(group: Mapping[str, Any], device: torch.device) -> str:
    """Return the flag of the form that ``step`` takes for a group; empty: a loop over its parameters."""
    if group.get("fused"):
        return "fused"
    foreach = group["foreach"]
    if foreach is None and group.get("fused") is None:
        rate_read = isinstance(group["lr"], torch.Tensor) and group.get("capturable") is False
        foreach = device.type in foreach_kernels() and not rate_read
    return "foreach" if foreach else ""
