"""Gradients of a replayed backward, added to ``.grad`` of parameters: for all of them together, not one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from nimble_core.runtime.device import Executable
from nimble_core.torch_compat.dispatch import foreach_add_
from nimble_core.utils.locks import free_after_fork

__all__ = ["ACCUMULATING", "accumulate", "set_aside"]

ACCUMULATING = free_after_fork(threading.RLock())
"""Held while gradients go into ``.grad``, as autograd's accumulation holds a lock: backwards may run on any threads."""

_gradient = attrgetter("grad")


def set_aside(
    parameters: Sequence[torch.Tensor], executable: Executable, outputs: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Copy the gradients that lie in ``outputs``, which a replay of ``executable`` is about to overwrite.

    Returns copies by the position of their parameter. ``outputs`` holds the gradients of ``parameters`` first.
    """
    gradients = enumerate(map(_gradient, parameters))
    used = [at for at, one in gradients if one is not None and _same_memory(one, outputs[at])]
    if not used:
        return {}
    with executable.paused():  # the last run, and what was added to its results, may be under way on another stream
        return {at: outputs[at].clone() for at in used}


def accumulate(
    parameters: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    taken: Iterable[int],
    aside: Mapping[int, torch.Tensor],
) -> None:
    """Add new gradients to ``.grad``; where there is none yet, the gradient itself becomes it.

    Args:
        parameters: whose gradients.
        found: gradients of these, by position.
        taken: positions of those that are to be added.
        aside: what ``.grad`` held where a replay has overwritten it, by position: see ``set_aside``.
    """
    taken = frozenset(taken)
    sums, new = [], []
    for at in taken:
        gradient = parameters[at].grad
        if at in aside:
            sums.append(found[at])
            new.append(aside[at])
        elif gradient is None:
            parameters[at].grad = found[at]
        elif gradient.layout is not torch.strided:  # takes no dense one in place
            parameters[at].grad = found[at] + gradient
        else:
            sums.append(gradient)
            new.append(found[at])
    if sums:
        foreach_add_(sums, new)
    for at in aside.keys() - taken:
        parameters[at].grad = aside[at]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``one`` is ``other``, or another view of it."""
    if one is other:
        return True
    return type(one) is torch.Tensor and one.layout is torch.strided and one.data_ptr() == other.data_ptr()
