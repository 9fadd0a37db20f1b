"""A rewritten graph as a function to record, which knows what eager calls its calls stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.to_fx import calls_of
from nimble_core.ir.program import Origin, Program
from nimble_core.tracing.recording import Provenance

__all__ = ["provenance_of", "tracked"]


def provenance_of(program: Program, calls: Sequence[int], operator: str) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
    """Return origins of eager calls, each once, or the operator alone if there are none; and the calls."""
    origins = dict.fromkeys(origin for call in calls for origin in program.calls[call].origins)
    return tuple(origins) or (Origin(operator),), tuple(calls)


class _Tracked(fx.Interpreter):
    """Runs a graph node by node, and knows which node is running."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.now: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.now = n
        return super().run_node(n)


def tracked(module: fx.GraphModule, program: Program) -> tuple[Callable[..., Any], Provenance]:
    """Return a graph as a function, and the provenance of the call that it is issuing."""
    interpreter = _Tracked(module)

    def provenance(func: Any, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
        calls = calls_of(interpreter.now) if interpreter.now is not None else ()
        return provenance_of(program, calls, str(func))

    def run(*inputs: torch.Tensor) -> Any:
        return interpreter.run(*inputs, enable_io_processing=False)

    return run, provenance
