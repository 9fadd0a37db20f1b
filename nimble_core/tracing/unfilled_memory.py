"""Memory that is read before any call has filled it: something outside of torch's dispatcher must have."""

from __future__ import annotations

from collections.abc import Set

import torch

from nimble_core.ir.program import Call
from nimble_core.tracing.run_log import RunLog

__all__ = ["EMPTY_STRIDED", "reads_nothing", "unfilled_read"]

EMPTY_STRIDED = torch.ops.aten.empty_strided.default
"""The host step that makes all memory without content."""


def unfilled_read(log: RunLog, outputs: Set[int]) -> str:
    """Say where memory is read that no call has filled, as a C++ extension may have; empty if nowhere.

    Not where the content may not matter: templates, what is added zero times, what a mask leaves out.

    Args:
        log: of a run on the host.
        outputs: storages of the outputs.
    """
    storage_of = log.table.storage_of
    blank = {storage_of[step.outputs[0]] for step in log.steps if step.func is EMPTY_STRIDED and 0 not in step.args[0]}
    for call in log.calls if blank else ():
        written = {ref.storage for ref in call.writes}
        if blank & {ref.storage for ref in call.reads} - written and not reads_nothing(call):
            return f"before {call}: it reads memory that no call has filled"
        blank -= written
    return "an output is memory that no call has filled" if blank & outputs else ""


def reads_nothing(call: Call) -> bool:
    """Return whether the content of a tensor that a call takes may not matter."""
    never_added = any(name == "beta" and text in ("0", "0.0") for name, text in call.arguments)
    return (
        not call.reads
        or never_added
        or call.label.startswith(("new_", "masked_", "where"))
        or call.label.endswith("_like")
    )
