"""One step of a torch optimizer on tensors of ours, as calls on the device alone."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from nimble_core.torch_compat.members import CAPTURABLE_DEVICES
from nimble_core.utils.locks import free_after_fork

__all__ = ["run_step", "state_after_a_step"]

_patching = free_after_fork(threading.RLock())


def run_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
    found_inf: torch.Tensor | None = None,
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Run torch's step, without hooks, on other groups and state than the user's; return the state that it leaves.

    The user's optimizer stays as it is: a shadow optimizer steps, which shares its other attributes.

    Args:
        optimizer: the user's.
        groups: parameter groups of the shadow, whose parameters hold their gradients in ``.grad``.
        state: for parameters of these groups; its tensors are written in place.
        found_inf: one number on the device: 1 if this step is to be left out (fused forms only).
    """
    kind = type(optimizer)
    shadow: torch.optim.Optimizer = object.__new__(kind)
    own = {
        "param_groups": [group for group in groups if group["params"]],
        "state": defaultdict(dict, state),
        "grad_scale": None,
        "found_inf": found_inf,
        "_warned_capturable_if_run_uncaptured": True,
        "_need_device_dtype_check_for_fused": False,  # the form was chosen by devices and types
    }
    vars(shadow).update({**vars(optimizer), **own})
    step: Callable[..., Any] = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    device = next(one.device for group in groups for one in group["params"])
    with _capturable_on_the_host(kind) if device.type == "cpu" else nullcontext():
        step(shadow)
    return shadow.state


def state_after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the state that a first step with zero gradients makes for a parameter like this one."""
    stand_in = like.detach().clone()
    stand_in.grad = torch.zeros_like(stand_in)
    return dict(run_step(optimizer, [{**group, "params": [stand_in]}], {}).get(stand_in, {}))


@contextmanager
def _capturable_on_the_host(kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Let capturable forms run on the host: torch asserts that they run on accelerators, their formulas do not."""
    name = CAPTURABLE_DEVICES
    modules = dict.fromkeys(sys.modules[one.__module__] for one in kind.__mro__)
    with _patching:
        before = [(module, getattr(module, name)) for module in modules if hasattr(module, name)]
        try:
            for module, supported in before:
                setattr(module, name, lambda *args, _of=supported, **kwargs: [*_of(*args, **kwargs), "cpu"])
            yield
        finally:
            for module, supported in before:
                setattr(module, name, supported)
