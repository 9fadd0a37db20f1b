"""Times of replayed kernels through ``torch.profiler``, where ``cupti-python`` is not installed: without node ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nimble_core.cupti import Activity

__all__ = ["collect", "graph_activities"]

_GRAPH_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch")


def collect(run: Callable[[], object], synchronize: Callable[[], object]) -> list[Activity]:
    """Run ``run`` and return what the graphs that it launched did on the GPU, sorted by start.

    Nodes are unknown (-1), launch shapes and registers too (zeros).

    Args:
        run: launches graphs.
        synchronize: waits for them.
    """
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        synchronize()
    return graph_activities(profiler.profiler.kineto_results.events())


def graph_activities(events: Any) -> list[Activity]:
    """The device events among Kineto's that a launched graph caused: they share the number of its launch."""
    listed = list(events)
    launches = {
        event.correlation_id()
        for event in listed
        if event.device_type().name == "CPU" and event.name().startswith(_GRAPH_LAUNCH)
    }
    found = [
        _activity(event)
        for event in listed
        if event.device_type().name != "CPU" and not event.is_user_annotation() and event.correlation_id() in launches
    ]
    return sorted(found, key=lambda one: (one.start_ns, one.end_ns))


def _activity(event: Any) -> Activity:
    name, start = event.name(), event.start_ns()
    kind = next((one for one in ("memcpy", "memset") if name.lower().startswith(one)), "kernel")
    return Activity(
        kind, name if kind == "kernel" else kind, start, start + event.duration_ns(), event.device_resource_id(), -1
    )
