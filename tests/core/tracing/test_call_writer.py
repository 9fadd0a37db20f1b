"""What is written down of a call: its arguments, allocations and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.ir.allocations import Ask, Window
from nimble_core.ir.call_graph import build_graph
from nimble_core.tracing.operator_traits import makes_memory_only, storage_address, written_tensors
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from tests.support.models import make
from tests.support.recordings import recorded


class Allocations(TorchDispatchMode):
    """Counts as in a capture, on a device without memory, and tells the labels under which memory was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.label = ""
        self.made: list[str] = []
        self.windows: Sequence[Window] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = {storage_address(result)} - {storage_address(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self.made += [self.label] * len(new)
        self.calls += not makes_memory_only(func) and (bool(new) or bool(written_tensors(func, args, kwargs or {})))
        return result

    def nodes(self) -> int:
        return self.calls

    def begin(self, label: str) -> None:
        assert not self.label
        self.label = label

    def end(self) -> None:
        self.label = ""

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        self.windows = windows
        return ()

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_each_calls_allocations_have_its_label() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = x.relu().view(-1).view(4, 4)
        b = torch.empty_like(a).copy_(a)
        return b.t().neg()

    x = torch.zeros(2, 8, device="meta")
    with Allocations() as counter:
        recording = record(forward, Signature((x,), {}), args=(x,), kwargs={}, counter=counter)
    assert [call.label for call in recording.program.calls] == ["relu", "copy_", "neg"]
    labels = [window.label for window in counter.windows]
    assert len(set(labels)) == 3
    # The memory that only copy_ fills was made before it, and is not what copy_ asked for.
    assert [counter.made.count(label) for label in labels] == [1, 0, 1]
    assert len(counter.made) == 3
    assert all(counter.made)
    assert len(recording.steps) == 7
    assert counter.label == ""


def test_random_calls_keep_their_order_through_the_generator() -> None:
    model, args, kwargs = make("dropout")
    program = recorded(model, *args, **kwargs).program
    drawn = [
        call.index
        for call in program.calls
        if any(program.storages[access.ref.storage].role == "generator" for access in call.accesses)
    ]
    assert len(drawn) == 2
    edges = set(build_graph(program).edges)
    assert tuple(drawn) in edges
