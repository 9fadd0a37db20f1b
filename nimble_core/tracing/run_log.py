"""What a recording has written down so far, where its calls come from, and the capture that it runs under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import torch

from nimble_core.ir.allocations import Ask, Window
from nimble_core.ir.program import Call, Origin
from nimble_core.torch_compat.autograd import current_node, sequence_number
from nimble_core.tracing.provenance import line_inside, module_paths, place_of
from nimble_core.tracing.recording import Step
from nimble_core.tracing.recording_contexts import current_phase
from nimble_core.tracing.tensor_table import TensorTable

__all__ = ["CallOrigins", "NodeCounter", "RunLog", "Unseen"]


class CallOrigins:
    """Origins of the calls of one run."""

    def __init__(self, model: Callable[..., Any], calls: list[Call]) -> None:
        self._modules = module_paths(model)
        self._calls = calls
        self._next_node = sequence_number()
        self._forward_of: dict[int, Origin] = {}  # by sequence number of the backward's node

    def origin(self, operator: str, frame: FrameType) -> Origin:
        """Return the origin of an operator that runs now."""
        if current_phase() == "backward":
            node: Any = current_node()
            forward = self._forward_of.get(node._sequence_nr()) if node is not None else None
            if node is None and self._calls:  # the gradient of the loss itself, sums of gradients
                forward = self._calls[-1].origins[0]
            if forward is not None:
                return replace(forward, operator=operator)
        module, file, line = place_of(frame, self._modules)
        return Origin(operator, module, file, line)

    def owners(self, operator: str, names: Iterable[str]) -> tuple[Origin, ...]:
        """Return, for an optimizer's call, the modules of the parameters with these names or of their state."""
        modules = dict.fromkeys(name.split(" ")[0].rpartition(".")[0] for name in names if name)
        return tuple(Origin(operator, module) for module in modules)

    def where(self, operator: Any, frame: FrameType) -> str:
        """Say in words where an operator runs."""
        origin, now = self.origin(str(operator), frame), current_phase()
        file, line = line_inside(frame) if now == "backward" else ("", 0)
        return (replace(origin, file=file, line=line) if file else origin).during(now)

    def where_raised(self, frame: FrameType) -> str:
        """Say in words where the model was when torch raised an error in ``frame``."""
        return self.where(f"torch's {frame.f_code.co_name}", frame)

    def line(self, frame: FrameType) -> str:
        """Return ``file:line`` of the user's code that runs."""
        return ":".join(map(str, place_of(frame, self._modules)[1:]))

    def before(self, frame: FrameType | None) -> str:
        """Say in words between which call and which line something happened; None: the end of the run."""
        last = str(self._calls[-1]) if self._calls else "the first call"
        module, file, line = place_of(frame, self._modules) if frame else ("", "", 0)
        here = f", before {file}:{line} in {module or 'the model'}" if file else ", before the end"
        return f"after {last}{here}"

    def remember_nodes(self, operator: str, frame: FrameType) -> None:
        """Note that autograd's nodes made since the last operator are those of the operator that runs now."""
        if not torch.is_grad_enabled():
            return
        following = sequence_number()
        if following > self._next_node and current_phase() != "backward":
            origin = self.origin(operator, frame)
            self._forward_of.update(dict.fromkeys(range(self._next_node, following), origin))
        self._next_node = following


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
