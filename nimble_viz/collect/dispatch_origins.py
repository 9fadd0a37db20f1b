"""Note where each operator that is dispatched comes from, in order."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from nimble_core.ir.program import Origin
from nimble_core.torch_compat.dispatch import TorchDispatchMode, current_mode
from nimble_core.tracing.provenance import module_paths, place_of
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_viz.collect.sources import pass_over_machinery
from nimble_viz.traces.events import PRINT
from nimble_viz.traces.profiler import watched_prints

__all__ = ["DispatchOrigins"]


class DispatchOrigins:
    """Watches from ``begin`` to ``end``, which different functions of the watched code may call.

    Attributes:
        seen: an origin for each operator, in order.
    """

    def __init__(self) -> None:
        self.seen: list[Origin] = []
        self._paths: dict[int, str] = {}
        self._roots: set[int] = set()
        self._mode: Any = None
        self._watching = ExitStack()

    def begin(self) -> None:
        """Start to watch; not under a mode of somebody else, who would leave ours in its place."""
        if current_mode() is not None:
            return
        pass_over_machinery()
        self._watching.enter_context(watched_prints(self._printed))
        self._mode = _Notes(self)
        self._mode.__enter__()

    def end(self) -> None:
        """Stop, if it still watches. Under a mode that was entered since, it stays until that has been left."""
        with interrupts_postponed():
            self._watching.close()
            if self._mode is not None and current_mode() is self._mode:
                self._mode.__exit__(None, None, None)
                self._mode = None

    def note(self, operator: str, frame: Any) -> None:
        """Add the origin of an operator that ``frame`` called."""
        root = _outermost_module(frame)
        if root is not None and id(root) not in self._roots:
            self._roots.add(id(root))
            self._paths.update(module_paths(root))
        self.seen.append(Origin(operator, *place_of(frame, self._paths)))

    def _printed(self) -> nullcontext[None]:
        """Note one operator for a tensor that is printed: the reads that it makes run without a mode."""
        self.note(PRINT.replace("::", "."), sys._getframe())
        return nullcontext()


class _Notes(TorchDispatchMode):
    """Tells ``DispatchOrigins`` of each operator."""

    def __init__(self, origins: DispatchOrigins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._origins = origins

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._origins.note(str(func), sys._getframe().f_back)  # autograd's threads may have no frame
        return func(*args, **(kwargs or {}))


def _outermost_module(frame: Any) -> torch.nn.Module | None:
    root = None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            found = frame.f_locals.get("self")
            root = found if isinstance(found, torch.nn.Module) else root
        frame = frame.f_back
    return root
