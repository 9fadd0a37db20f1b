"""Counts replays of torch's CUDA graphs, and holds them back while CUPTI comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from nimble_core.utils.locks import launching

__all__ = ["Replays"]

_counting: list[Replays] = []
_undo = ExitStack()


class Replays:
    """Counts replays until ``end``: ours, torch.compile's, the user's. Each holds ``launching``.

    Launches of graphs without torch are neither counted nor held back.
    """

    def __init__(self) -> None:
        from nimble_core.torch_compat.public import GRAPH_REPLAY

        self.count = 0
        with launching:
            if not _counting:
                _undo.enter_context(GRAPH_REPLAY.replaced_by(_held(GRAPH_REPLAY.require())))
            _counting.append(self)

    def end(self) -> None:
        """Stop counting."""
        with launching:
            if self in _counting:
                _counting.remove(self)
                if not _counting:
                    _undo.close()


def _held(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(replay)
    def held(self: Any) -> None:
        with launching:
            for one in _counting:
                one.count += 1
            replay(self)

    return held
