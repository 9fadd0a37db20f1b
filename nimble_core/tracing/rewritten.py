"""A rewritten model, to be run under the recorder in the model's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.program import Fuse, Origin, Role

__all__ = ["Provenance", "Rewritten"]

Provenance = Callable[[Any, FrameType], tuple[tuple[Origin, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A function that computes the same as the model by other calls.

    Args:
        fuse: whose kernels it runs.
        run: from input tensors to output tensors, in the order of the eager Program's.
        provenance: ``(origins, eager calls)`` of the call that is being issued, from the operator and the frame that
            issues it.
        owned: ``(role, name, tensor)`` of constants, and of what the model is known to own.
    """

    fuse: Fuse
    run: Callable[..., Sequence[torch.Tensor]]
    provenance: Provenance
    owned: Sequence[tuple[Role, str, torch.Tensor]] = ()
