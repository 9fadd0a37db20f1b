"""Kernels that are wrong, or cannot be shown right, give way to the eager calls they stand for; the others stay."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nimble_core.autotune.budget import Budget
from nimble_core.autotune.trials import Trials
from nimble_core.compiler.pipeline import fuse
from nimble_core.ir.program import EAGER_CALL, Fuse, KernelChoice
from nimble_core.scheduling.options import Options
from nimble_core.validation.judge import Judge

__all__ = ["mend"]

_ROUNDS = 2
_NAMED = 8


def mend(
    kind: Fuse,
    trials: Trials,
    judge: Judge,
    options: Options,
    budget: Budget,
    try_again: Callable[[], None],
    *,
    step: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Make kernels of a kind again, without those that were found to blame; twice at most.

    Other choices are repeated, not measured again. They travel in ``Program.choices``, so that a plan makes the same.

    Args:
        kind: of the kernels.
        trials: all of one kind are forgotten before they are made again.
        judge: what found them wrong.
        options: fuse, tune.
        budget: where ``fuse="auto"``, nothing is made again if it is spent.
        try_again: captures and checks what was made.
        step: times the steps.

    Raises:
        CaptureError, DeviceError: as ``fuse``.
    """
    replaced: list[str] = []
    for _ in range(_ROUNDS):
        found, took_s = judge.faults(kind), trials.fuse_s.get(kind, 0.0)
        if found is None or trials.right((kind,)) or (options.fuse == "auto" and budget.left_s < took_s):
            break
        kept = [KernelChoice(call, EAGER_CALL) for call in found.faults]
        choices = (*trials.variants[kind].recording.program.choices, *kept)
        trials.forget(kind)
        start, thorough = time.perf_counter(), options.tune == "full"
        made = fuse(judge.device, judge.recorded, kind, thorough=thorough, choices=choices, step=step)
        trials.variants[kind], trials.fuse_s[kind] = made, took_s + time.perf_counter() - start
        judge.forget(kind)
        replaced += found.places
        try_again()
    if replaced and trials.right((kind,)):
        trials.notes.append(
            f"{kind}: eager's calls run in place of kernels that were not shown right: {_listed(replaced)}"
        )


def _listed(places: Sequence[str]) -> str:
    """Name the first of these, each once, and say how many there are of each and in all."""
    counts = Counter(places)
    named = [f"{count} × {place}" if count > 1 else place for place, count in counts.items()]
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return ", ".join([*named[:_NAMED], *more])
