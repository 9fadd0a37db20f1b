"""What a recording has written down so far, and the capture that it runs under."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import torch

from nimble_core.ir.allocations import Ask, Window
from nimble_core.ir.program import Call
from nimble_core.tracing.call_origins import CallOrigins
from nimble_core.tracing.recording import Step
from nimble_core.tracing.tensor_table import TensorTable

__all__ = ["NodeCounter", "RunLog", "Unseen"]


class NodeCounter(Protocol):
    """Counts the nodes of the capture under way, which tells calls from host steps."""

    def nodes(self) -> int:
        """Return how many nodes were captured so far."""

    def begin(self, label: str) -> None:
        """Attribute this thread's allocations to the call with this label from now on."""

    def end(self) -> None:
        """Attribute its allocations to no call from now on."""

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        """Return what each of these asked of the allocator; empty if that is not known."""

    def outside(self) -> AbstractContextManager[None]:
        """Run work inside for real instead of capturing it, such as copies of host constants."""


class Unseen:
    """What happened in a run and is in no recorded call.

    Attributes:
        count: how often: launches, writes to memory, values.
        where: the first time, in words.
    """

    def __init__(self) -> None:
        self.count = 0
        self.where = ""

    def note(self, where: str, count: int = 1) -> None:
        """Add ``count`` events."""
        self.count += count
        self.where = self.where or where


@dataclass(slots=True)
class RunLog:
    """One run of a model: where it runs, and what was written down of it so far.

    Args:
        device: that is recorded.
        counter: of the capture; None for a run on the host.
        values: whether tensors have values; False for fake ones.
        origins: where its calls come from.
        calls: so far.
        steps: so far, calls and host steps.
        table: its tensors.
        unseen: what no call shows.
    """

    device: torch.device
    counter: NodeCounter | None
    values: bool
    origins: CallOrigins
    calls: list[Call]
    steps: list[Step] = field(default_factory=list)
    table: TensorTable = field(default_factory=TensorTable)
    unseen: Unseen = field(default_factory=Unseen)
    _nodes: int = 0

    def __post_init__(self) -> None:
        self._nodes = self.counter.nodes() if self.counter else 0

    @property
    def on_host(self) -> bool:
        """Whether the run executes, on the host."""
        return self.counter is None and self.values

    def outside(self) -> AbstractContextManager[None]:
        """Run work inside for real, not captured."""
        return self.counter.outside() if self.counter else nullcontext()

    def new_nodes(self) -> int:
        """Return how many nodes the capture got since the last look; 0 on the host."""
        if self.counter is None:
            return 0
        before, self._nodes = self._nodes, self.counter.nodes()
        return self._nodes - before

    def note_unseen_nodes(self, frame: FrameType | None) -> None:
        """Note nodes that came since the last call, before the line that runs in ``frame``; None: before the end."""
        if count := self.new_nodes():
            self.unseen.note(self.origins.before(frame), count)
