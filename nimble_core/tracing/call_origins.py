"""Where recorded calls come from: module path and source line, for the backward those of the forward's operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.program import Call, Origin
from nimble_core.torch_compat.autograd import current_node, sequence_number
from nimble_core.tracing.phase import current_phase
from nimble_core.tracing.provenance import line_inside, module_paths, place_of

__all__ = ["CallOrigins"]


class CallOrigins:
    """Origins of the calls of one run.

    Args:
        model: whose modules they name.
        calls: recorded so far; grows.
    """

    def __init__(self, model: Callable[..., Any], calls: list[Call]) -> None:
        self._modules = module_paths(model)
        self._calls = calls
        self._next_node = sequence_number()
        self._forward_of: dict[int, Origin] = {}  # by sequence number of the backward's node

    def origin(self, operator: str, frame: FrameType) -> Origin:
        """Return the origin of an operator that runs now."""
        if current_phase() == "backward":
            node: Any = current_node()
            forward = self._forward_of.get(node._sequence_nr()) if node is not None else None
            if node is None and self._calls:  # the gradient of the loss itself, sums of gradients
                forward = self._calls[-1].origins[0]
            if forward is not None:
                return replace(forward, operator=operator)
        module, file, line = place_of(frame, self._modules)
        return Origin(operator, module, file, line)

    def owners(self, operator: str, names: Iterable[str]) -> tuple[Origin, ...]:
        """Return, for an optimizer's call, the modules of the parameters with these names or of their state."""
        modules = dict.fromkeys(name.split(" ")[0].rpartition(".")[0] for name in names if name)
        return tuple(Origin(operator, module) for module in modules)

    def where(self, operator: Any, frame: FrameType) -> str:
        """Say in words where an operator runs."""
        origin, now = self.origin(str(operator), frame), current_phase()
        file, line = line_inside(frame) if now == "backward" else ("", 0)
        return (replace(origin, file=file, line=line) if file else origin).during(now)

    def where_raised(self, frame: FrameType) -> str:
        """Say in words where the model was when torch raised an error in ``frame``."""
        return self.where(f"torch's {frame.f_code.co_name}", frame)

    def line(self, frame: FrameType) -> str:
        """Return ``file:line`` of the user's code that runs."""
        return ":".join(map(str, place_of(frame, self._modules)[1:]))

    def before(self, frame: FrameType | None) -> str:
        """Say in words between which call and which line something happened; None: the end of the run."""
        last = str(self._calls[-1]) if self._calls else "the first call"
        module, file, line = place_of(frame, self._modules) if frame else ("", "", 0)
        here = f", before {file}:{line} in {module or 'the model'}" if file else ", before the end"
        return f"after {last}{here}"

    def remember_nodes(self, operator: str, frame: FrameType) -> None:
        """Note that autograd's nodes made since the last operator are those of the operator that runs now."""
        if not torch.is_grad_enabled():
            return
        following = sequence_number()
        if following > self._next_node and current_phase() != "backward":
            origin = self.origin(operator, frame)
            self._forward_of.update(dict.fromkeys(range(self._next_node, following), origin))
        self._next_node = following
