"""The cheapest entry into an operator calls that operator, and leaves no dispatch mode behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nimble_core.runtime.host.entry_points import cheapest_entry
from tests.support.interrupts import interrupted


def test_an_interrupt_at_any_moment_while_an_entry_is_sought_leaves_no_mode_in_force() -> None:
    x = torch.randn(3)
    result = x * 2

    def sought() -> Callable[..., Any]:
        return cheapest_entry(torch.ops.aten.mul.Tensor, [x, 2], {}, result)

    assert sought() is torch._C._VariableFunctions.mul  # the first mode of a process imports much
    for _ in interrupted(sought):
        assert not _get_current_dispatch_mode_stack()
    assert sought() is torch._C._VariableFunctions.mul
