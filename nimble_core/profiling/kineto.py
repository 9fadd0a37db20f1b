"""Sessions of ``torch.profiler`` that take CUPTI out again.

Where ``cupti-python`` is not installed, replayed kernels are timed in one: without node ids.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from nimble_core.profiling.cupti import Activity, present, take_out
from nimble_core.profiling.replay_hook import Replays
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_core.utils.locks import capturing, launching

__all__ = ["Session", "collect", "graph_activities"]

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


def collect(run: Callable[[], object], synchronize: Callable[[], object]) -> list[Activity]:
    """Run ``run`` and return what the graphs that it launched did on the GPU, sorted by start.

    Nodes are unknown (-1), launch shapes and registers too (zeros).

    Args:
        run: launches graphs.
        synchronize: waits for them.
    """
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    profiler: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
    with ExitStack() as running:
        with interrupts_postponed():
            running.enter_context(profiler)
        run()
        synchronize()
        with interrupts_postponed():
            running.close()
    return graph_activities(profiler.profiler.kineto_results.events())


def graph_activities(events: Any) -> list[Activity]:
    """Return the device events that a launched graph caused: they share the number of its launch."""
    listed = list(events)
    launches = {event.correlation_id() for event in listed if _launches_graph(event)}
    found = [
        _activity(event)
        for event in listed
        if event.device_type().name != "CPU" and not event.is_user_annotation() and event.correlation_id() in launches
    ]
    return sorted(found, key=lambda one: (one.start_ns, one.end_ns))


def _launches_graph(event: Any) -> bool:
    return bool(event.name().startswith(_GRAPH_LAUNCH)) and event.device_type().name == "CPU"


def _activity(event: Any) -> Activity:
    name, start = event.name(), event.start_ns()
    kind = next((one for one in ("memcpy", "memset") if name.lower().startswith(one)), "kernel")
    return Activity(
        kind, name if kind == "kernel" else kind, start, start + event.duration_ns(), event.device_resource_id(), -1
    )
