"""CUPTI, torch's graphs and its profiler, as far as they change each other: no GPU is needed."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_core.profiling import cupti, replay_hook
from nimble_core.utils.errors import NimbleWarning
from nimble_core.utils.locks import capturing, launching


class Untouchable:
    """A CUPTI that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"cupti.{name} was used")


def never() -> None:
    raise AssertionError("nothing should run")


GRAPH = 7 << 32
"""Number of a graph, in the upper half of the ids of its nodes."""


KERNEL_FIELDS = (
    *("kind", "start", "end", "stream_id", "graph_node_id", "name", "grid_x", "grid_y", "grid_z"),
    *("block_x", "block_y", "block_z", "registers_per_thread", "static_shared_memory", "dynamic_shared_memory"),
    "correlation_id",
)


CONCURRENT_KERNEL, MEMCPY = 10, 1


class KernelRecord:
    """A record as CUPTI hands it over: one row of a structured array, and the name behind the pointer in it."""

    def __init__(self, name: str, start: int, node_id: int, launch: int = 0) -> None:
        numpy = pytest.importorskip("numpy")
        row = (CONCURRENT_KERNEL, start, start + 5, 7, node_id, 4096 + start, 8, 1, 1, 64, 1, 1, 32, 16, 4, launch)
        self._data = numpy.array(row, dtype=[(field, "u8") for field in KERNEL_FIELDS])
        self.name = name


class CopyRecord:
    """The same of a copy."""

    def __init__(self, start: int, node_id: int) -> None:
        numpy = pytest.importorskip("numpy")
        fields = ("kind", "bytes", "start", "end", "stream_id", "graph_node_id", "correlation_id")
        self._data = numpy.array(
            (MEMCPY, 64, start, start + 5, 7, node_id, 0), dtype=[(field, "u8") for field in fields]
        )


@dataclass
class Graph:
    """A captured graph, as far as CUPTI changes it."""

    number: int
    timed: bool = False
    idle: bool = False
    broken: bool = False


class Library:
    """CUPTI and what it does to graphs, as seen on an H200: see ``nimble_core.profiling.cupti``.

    Args:
        fail_at: which of the calls from now on is interrupted, from 0.
    """

    ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=CONCURRENT_KERNEL, MEMCPY=MEMCPY, MEMSET=2)

    def __init__(self) -> None:
        self.graphs = [Graph(number) for number in range(3)]
        self.asked: list[str] = []
        self.attached = False
        self.enabled: set[int] = set()
        self.launches: list[SimpleNamespace] = []
        self.fail_at = -1

    def _ask(self, what: str, attach: bool = True) -> None:
        if self.fail_at == 0:
            self.fail_at = -1
            raise KeyboardInterrupt
        self.fail_at -= self.fail_at > 0
        self.asked.append(what)
        self.attached |= attach

    def activity_register_callbacks(self, requested: object, completed: object) -> None:
        self._ask("register")

    def activity_enable(self, kind: int) -> None:
        self._ask("enable")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self._ask("disable")
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        self._ask("flush")

    def get_timestamp(self) -> int:
        return time.perf_counter_ns()

    def get_graph_node_id(self, node: int) -> int:
        self._ask("id")
        return GRAPH + node - 1000

    def finalize(self) -> None:
        self._ask("finalize", attach=False)
        assert launching._is_owned()  # type: ignore[attr-defined]  # not in what types know of it
        self.attached = False
        self.enabled.clear()
        for graph in self.graphs:
            graph.broken |= graph.idle

    def launch(self, number: int) -> None:
        """A graph is launched, without torch."""
        graph = self.graphs[number]
        assert not graph.broken, "unspecified launch failure"
        if self.enabled:
            graph.timed, graph.idle = True, False
            cpu = SimpleNamespace(name="CPU")
            self.launches.append(SimpleNamespace(name=lambda: "cudaGraphLaunch", device_type=lambda: cpu))
            cupti._completed([KernelRecord("gemm", 30, GRAPH * (number + 1) + 3, len(self.launches))])
        elif self.attached:
            graph.idle = graph.timed

    def replay(self, number: int) -> None:
        """Torch replays a graph."""
        torch.cuda.CUDAGraph(self, number).replay()  # type: ignore[call-arg]  # what stands for it takes these

    def profile(self, number: int) -> None:
        """Somebody's session of torch's profiler."""
        session = Profiler(self)
        session.start()
        self.launch(number)
        session.stop()


@dataclass
class TorchGraph:
    """A ``torch.cuda.CUDAGraph``."""

    library: Library
    number: int

    def replay(self) -> None:
        self.library.launch(self.number)


class Profiler:
    """What is used of a ``torch.profiler.profile``: it says what was launched."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: library.launches))

    def start(self) -> None:
        self._library.attached = True
        self._library.launches.clear()
        self._library.enabled.add(CONCURRENT_KERNEL)

    def stop(self) -> None:
        self._library.enabled.clear()


@contextmanager
def installed() -> Iterator[Library]:
    library = Library()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", NimbleWarning)
        patch.setattr(cupti, "_cupti", lambda: library)
        patch.setattr(cupti, "_kinds", lambda: {CONCURRENT_KERNEL: "kernel", MEMCPY: "memcpy"})
        patch.setattr(cupti, "_ns_per_tick", lambda *_: 1.0)
        patch.setattr(cupti, "launches_are_slow", lambda: library.attached)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "CUDAGraph", TorchGraph)
        for name, new in (("_launches", set()), ("_seen", []), ("_names", {}), ("_fields", {})):
            patch.setattr(cupti, name, new)
        patch.setattr(cupti, "_said", threading.Event())
        yield library
    assert not replay_hook._counting
    for lock in (capturing, launching):
        assert not lock._is_owned()  # type: ignore[attr-defined]
