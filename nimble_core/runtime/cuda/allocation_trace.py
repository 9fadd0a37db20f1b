"""Nodes and allocations of a throwaway capture while a model is recorded under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nimble_core.ir.allocations import Ask, Event, Window, asks_of
from nimble_core.runtime.cuda.graph_nodes import CaptureProbe
from nimble_core.torch_compat.cuda import (
    clear_cublas_workspaces,
    history_enabled,
    memory_metadata,
    memory_snapshot,
    record_memory_history,
    set_memory_metadata,
)

__all__ = ["AllocationTrace", "CaptureCounter", "allocations_traced"]


class CaptureCounter:
    """Nodes of the throwaway capture, and a way out of it for host constants."""

    def __init__(self, probe: CaptureProbe, device: torch.device, trace: AllocationTrace | None) -> None:
        self.nodes = probe.nodes
        self._probe = probe
        self._device = device
        self._trace = trace
        self._first: dict[str, int] = {}

    def begin(self, label: str) -> None:
        """Attribute what is allocated and captured from now on to the call with this label."""
        if self._trace is not None:
            self._first[label] = self.nodes()
            # A workspace that a library kept from the call before would not show.
            clear_cublas_workspaces()
            set_memory_metadata(label)

    def end(self) -> None:
        """Attribute what is allocated from now on to no call."""
        if self._trace is not None:
            set_memory_metadata("")

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        """Return what each call has asked the allocator for; nothing where that was not traced."""
        if self._trace is None:
            return ()
        first = {self._first[window.label]: window.label for window in windows}
        zeroed = {first[node]: found for node, found in self._probe.zeroed(first).items()}
        return asks_of(self._trace.events(), windows, zeroed)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, what is launched runs at once, on a stream of its own, and is waited for."""
        from cuda.bindings import runtime

        relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _, mode = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
        side = torch.cuda.Stream(self._device)
        try:
            with torch.cuda.stream(side):
                yield
                side.synchronize()
        finally:
            runtime.cudaThreadExchangeStreamCaptureMode(mode)


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """The allocator's history of one stream; its labels are set by the thread that allocates."""

    stream: torch.cuda.Stream

    def events(self) -> list[Event]:
        """Return what was allocated and freed since, in order."""
        own = self.stream.cuda_stream
        return [
            Event(one["addr"], one["size"] if one["action"] == "alloc" else 0, one["user_metadata"])
            for one in memory_snapshot()["device_traces"][self.stream.device.index]
            if one["action"] in ("alloc", "free_requested") and one["stream"] == own
        ]


@contextmanager
def allocations_traced(stream: torch.cuda.Stream) -> Iterator[AllocationTrace | None]:
    """Trace the allocations inside; yield None where someone else traces them."""
    if history_enabled():
        yield None
        return
    label = memory_metadata()
    try:
        record_memory_history(enabled="all", context=None)
        set_memory_metadata("")  # the user's could be that of a call
        yield AllocationTrace(stream)
    finally:
        record_memory_history(enabled=None)
        set_memory_metadata(label)
