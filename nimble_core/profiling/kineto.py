"""Sessions of ``torch.profiler`` that take CUPTI out again."""

from __future__ import annotations

from typing import Any

from nimble_core.profiling.cupti import present, take_out
from nimble_core.profiling.replay_hook import Replays
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_core.utils.locks import capturing, launching

__all__ = ["Session"]

_GRAPH_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch")


class Session:
    """A session of ``torch.profiler``, from now until ``stop``.

    torch's profiler that is interrupted as it starts or stops goes on running, or has lost what it saw, and raises
    errors of its own later. Postpone interrupts until what is to ``stop`` it is in place (``interrupts_postponed``).
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        with capturing, launching:
            self._found = present()
            self._replays = Replays()
            try:
                profiler.start()
            except BaseException:
                self._replays.end()
                raise

    def stop(self) -> None:
        """Stop it, and take CUPTI out unless it was there before or graphs were launched without torch."""
        import torch

        with interrupts_postponed(), capturing, launching:
            try:
                self._profiler.stop()
                if torch.cuda.is_initialized() and not self._found and self._launches() <= self._replays.count:
                    take_out()
            finally:
                self._replays.end()

    def _launches(self) -> int:
        return sum(map(_launches_graph, self._profiler.profiler.kineto_results.events()))


def _launches_graph(event: Any) -> bool:
    return bool(event.name().startswith(_GRAPH_LAUNCH)) and event.device_type().name == "CPU"
