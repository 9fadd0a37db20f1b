"""What the device did during a profiled iteration, and what the iteration was bound by. Pure."""

from __future__ import annotations

from collections import Counter
from statistics import median

from nimble_viz.collect.intervals import union
from nimble_viz.report.data import INPUT, Bound, DeviceIdle, OverheadProfile
from nimble_viz.traces.events import Trace

__all__ = ["device_idle", "iteration_bound"]


def device_idle(trace: Trace) -> DeviceIdle:
    """Say why the device idled: each gap between its busy stretches, by what ended it.

    A gap is ended by a kernel (or copy). Up to the moment when the host began to launch that kernel nothing was queued:
    the host was late. From there to the kernel's start it is launch latency. If the launch lies before the gap the
    kernel was queued in time; what is left of the usual latency (the median over launches that found the device idle)
    is still launch latency, and the rest is dependency: the device turning from one kernel to the next, or a stream
    waiting for another. After the last kernel the host is late too: nothing more was queued. Gaps that end with a
    kernel whose launch was not seen are unknown. Pure; O(n log n).
    """
    launched = {event.correlation: event.start_ns for event in trace.runtime if event.correlation}
    inside = [kernel for kernel in trace.kernels if kernel.end_ns > trace.start_ns and kernel.start_ns < trace.end_ns]
    gaps: list[tuple[int, int, int | None]] = []  # start, end, launch of what ended it
    reached = trace.start_ns
    for kernel in sorted(inside, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        if kernel.start_ns > reached:
            gaps.append((reached, kernel.start_ns, launched.get(kernel.correlation)))
        reached = max(reached, min(kernel.end_ns, trace.end_ns))
    found: Counter[str] = Counter(host_late=max(0, trace.end_ns - reached))
    usual = median([end - at for start, end, at in gaps if at is not None and start <= at <= end] or [0])
    for start, end, at in gaps:
        if at is None:
            found["unknown"] += end - start
            continue
        late = min(max(at - start, 0), end - start)  # clocks disagree by microseconds: a kernel may precede its launch
        latency = end - start - late if at >= start else min(end - start, max(0, round(at + usual) - start))
        found["host_late"] += late
        found["launch"] += latency
        found["dependency"] += end - start - late - latency
    return DeviceIdle(
        host_late_ns=float(found["host_late"]),
        launch_ns=float(found["launch"]),
        dependency_ns=float(found["dependency"]),
        unknown_ns=float(found["unknown"]),
    )


def iteration_bound(trace: Trace, profile: OverheadProfile) -> Bound:
    """Say what the wall time went to: waiting for input, work of the device, or the host's overhead.

    Each nanosecond counts once. On CUDA: the device was busy; else the host was in a phase of input (``"loader"``,
    ``"copy"``); else it is the host's. On the host device: phases of input; else the calls' estimated work; else the
    host's. Pure; O(n log n).
    """
    spans = union([(start, end) for name, start, end in trace.phases if name in INPUT])
    feeding = sum(end - start for start, end in spans)
    if trace.device == "cpu":
        own = sum(one.work_ns for one in profile.phases if one.phase in INPUT)
        work = max(0.0, min(profile.device_busy_ns - own, float(trace.length_ns - feeding)))
        return Bound(float(feeding), work, trace.length_ns - feeding - work)
    busy = union([(max(k.start_ns, trace.start_ns), min(k.end_ns, trace.end_ns)) for k in trace.kernels])
    device = sum(end - start for start, end in busy)
    either = sum(end - start for start, end in union([*busy, *spans]))
    return Bound(float(either - device), float(device), float(trace.length_ns - either))
