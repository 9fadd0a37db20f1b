"""Time ways to run a model: raw samples in µs, under the names that records give them.

``latency_us`` is one call and a synchronisation, ``throughput_us`` a block of calls and one synchronisation over the
number of calls, ``device_us`` CUDA events around back-to-back replays of the CUDA graphs that one call replays,
``host_us`` until the call returns, the GPU idle before, and ``launch_us`` what launching the same graphs by themselves
takes of that. Without a GPU only latency and throughput are taken: a call returns when it is done.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nimble_core.algorithms.median_interval import median_interval

WARM_UPS, SAMPLES, CALLS, BLOCKS, DEVICE_BLOCKS = 10, 400, 50, 17, 17
BLOCK_S, LEAST_CALLS = 0.1, 5  # a block takes about so long at most, but is never of fewer calls
FEWEST = 16, 16  # samples of latency and of throughput that are taken however long they last
WIDE = 1.1  # a median whose interval's ends are further apart is uncertain: its latencies are taken anew
LONGER, LONGER_GRAPH = 12, 3  # for so many times as long at most; where graphs are replayed, the host decides less
PAUSE_S, BATCH = 0.02, 64  # with pauses, looking after each batch
Act = Callable[[], object]
Timed = tuple[Act, Act, bool]  # a call, what waits until the device has done it, whether its graphs replay without it


def take_times(ways: Mapping[str, Timed], *, cuda: bool, seconds: float = 2.0) -> dict[str, dict[str, Any]]:
    """Take samples of ``ways``, for at most ``seconds`` for each figure of a way.

    Latencies of several are taken in turn, each sample after an untimed call of the same; other figures way by way.
    Latencies of one whose median stays uncertain, since the host's speed drifts, are taken anew, with pauses between.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    began = time.perf_counter()
    for done in range(SAMPLES):
        if done >= FEWEST[0] and time.perf_counter() - began > seconds * len(ways):
            break
        for name, way in ways.items():
            pairs[name].append(_pair(*way[:2], rehearse=len(ways) > 1))
    if len(ways) == 1 and _uncertain(pairs[name]):
        longer = LONGER_GRAPH if cuda and replayed(way[0])[1] else LONGER
        pairs = {name: _spread(way, longer * seconds)}
    return {name: _figures(way, pairs[name], cuda, seconds) for name, way in ways.items()}


def _uncertain(pairs: Sequence[tuple[float, float]]) -> bool:
    low, _, high = median_interval([math.log(latency) for latency, _ in pairs])
    return high - low > math.log(WIDE)


def _spread(way: Timed, seconds: float) -> list[tuple[float, float]]:
    """Take latencies with pauses between, so that they are less correlated, until their median is certain."""
    taken: list[tuple[float, float]] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds and (len(taken) < SAMPLES or _uncertain(taken)):
        for _ in range(BATCH):
            time.sleep(PAUSE_S)
            taken.append(_pair(*way[:2], rehearse=True))
    return taken


def block(call: Act, synchronize: Act, calls: int) -> float:
    """Wall time of a call among so many, µs."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e3 / calls


def _pair(call: Act, synchronize: Act, *, rehearse: bool = False) -> tuple[float, float]:
    """Latency and host time of one call."""
    if rehearse:
        block(call, synchronize, 1)
    start = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e3, (returned - start) / 1e3


def _figures(way: Timed, pairs: Sequence[tuple[float, float]], cuda: bool, seconds: float) -> dict[str, Any]:
    """All samples of a way whose latencies were taken."""
    call, synchronize, alone = way
    latency, host = zip(*pairs, strict=True)
    calls = max(LEAST_CALLS, min(CALLS, int(BLOCK_S * 1e6 / statistics.median(latency))))
    throughput: list[float] = []
    began = time.perf_counter()
    while len(throughput) < BLOCKS and (time.perf_counter() - began < seconds or len(throughput) < FEWEST[1]):
        throughput.append(block(call, synchronize, calls))
    found: dict[str, Any] = {"latency_us": latency, "throughput_us": tuple(throughput)}
    if not cuda:
        return found
    import torch

    replay, graphs = replayed(call)
    synchronize()
    found |= {"host_us": host, "graphs": graphs}
    if graphs and alone:
        wait = torch.cuda.synchronize
        found["device_us"] = device_samples(replay, wait, partial(torch.cuda.Event, enable_timing=True), calls)
        found["launch_us"] = tuple(_pair(replay, wait)[1] for _ in pairs)
    return found


def replayed(call: Act, kind: Any = None) -> tuple[Act, int]:
    """Return a function that replays the graphs, torch's or of class ``kind``, that ``call`` replays; and how many."""
    kind = kind or importlib.import_module("torch").cuda.CUDAGraph
    seen: list[Any] = []
    launch = kind.replay

    def noted(graph: Any) -> None:
        seen.append(graph)
        launch(graph)

    def replay() -> None:
        for graph in seen:
            launch(graph)

    kind.replay = noted
    try:
        call()
    finally:
        kind.replay = launch
    return replay, len(seen)


def device_samples(replay: Act, synchronize: Act, event: Callable[[], Any], calls: int = CALLS) -> tuple[float, ...]:
    """Device time of a ``replay``, µs: ``calls`` of them back to back between two events, after an untimed one."""
    found: list[float] = []
    for _ in range(DEVICE_BLOCKS):
        first, last = event(), event()
        replay()
        first.record()
        for _ in range(calls):
            replay()
        last.record()
        synchronize()
        found.append(first.elapsed_time(last) / calls * 1e3)
    return tuple(found)
