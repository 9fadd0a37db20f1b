"""Requests read from an allocator's history, against an allocator that is played through."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.allocations import Ask, Event, Window, asks_of
from nimble_core.runtime.cuda.allocation_trace import CaptureCounter, allocations_traced


def test_what_a_call_frees_and_keeps() -> None:
    history = [
        Event(64, 5),  # before the first call
        Event(128, 10, "first"),
        Event(256, 20, "first"),
        Event(64, 0, "first"),  # of an earlier call: none of this one's business
        Event(256, 0, "first"),
        Event(256, 15, "first"),
        Event(128, 0),  # after the last allocation
        Event(512, 7, "second"),
    ]
    first, second = asks_of(history, [Window("first", {256: 3}), Window("second", {512: 9})])
    assert first == (Ask(10), Ask(20, None, 2), Ask(15, 3))
    assert second == (Ask(7, 9),)


@given(st.data(), st.lists(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=4), max_size=5))
def test_every_allocation_is_found_once(data: st.DataObject, calls: list[list[tuple[int, bool]]]) -> None:
    events, windows, count = [], [], 0
    for number, requests in enumerate(calls):
        storages = {}
        for nbytes, kept in requests:
            if data.draw(st.booleans()):
                events.append(Event(-count - 1, 3))  # of another thread
            events.append(Event(count, nbytes, str(number)))
            if kept:
                storages[count] = count
            else:
                events.append(Event(count, 0, str(number)))
            count += 1
        windows.append(Window(str(number), storages))
    found = asks_of(events, windows)
    assert [[ask.nbytes for ask in asks] for asks in found] == [[nbytes for nbytes, _ in one] for one in calls]
    first = 0
    for asks, requests in zip(found, calls, strict=True):
        for place, (ask, (_, kept)) in enumerate(zip(asks, requests, strict=True)):
            assert ask.storage == (first + place if kept else None)
            last = place == len(requests) - 1
            assert ask.freed_before == (None if kept or last else place + 1)
        first += len(requests)


def test_what_is_set_to_zero_is_of_the_last_that_was_there() -> None:
    history = [
        Event(64, 32, "one"),
        Event(64, 0, "one"),
        Event(64, 16, "one"),
        Event(96, 8, "one"),
        Event(64, 9, "two"),
    ]
    windows = [Window("one", {96: 5}), Window("two", {})]

    def zeroed(fill: range) -> list[list[int]]:
        return [[ask.zeroed for ask in asks] for asks in asks_of(history, windows, {"one": fill})]

    assert zeroed(range(66, 70)) == [[0, 6, 0], [0]]
    assert zeroed(range(64, 96)) == [[32, 0, 0], [0]]
    assert zeroed(range(98, 104)) == [[0, 0, 8], [0]]
    assert zeroed(range(60, 70)) == zeroed(range(90, 100)) == [[0, 0, 0], [0]]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_users_label_counts_for_no_call_and_is_put_back(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    label, events = "0", []  # the label that the first call gets, too

    def labelled(now: str) -> None:
        nonlocal label
        label = now

    def allocated(address: int) -> None:
        events.append({"addr": address, "size": 8, "action": "alloc", "stream": 1, "user_metadata": label})

    for name, replacement in {
        "history_enabled": lambda: False,
        "memory_metadata": lambda: label,
        "set_memory_metadata": labelled,
        "clear_cublas_workspaces": lambda: None,
        "record_memory_history": lambda **_: None,
        "memory_snapshot": lambda: {"device_traces": [events]},
    }.items():
        monkeypatch.setattr(f"nimble_core.runtime.cuda.allocation_trace.{name}", replacement)
    stream: Any = SimpleNamespace(cuda_stream=1, device=torch.device("cuda", 0))
    probe: Any = SimpleNamespace(nodes=lambda: 0, zeroed=lambda nodes: dict.fromkeys(nodes, range(130, 134)))
    with pytest.raises(error) if error else nullcontext(), allocations_traced(stream) as trace:
        counter = CaptureCounter(probe, stream.device, trace)
        allocated(64)  # before the first call
        counter.begin("0")
        allocated(128)
        if error:
            raise error
        counter.end()
        assert counter.asks([Window("0", {128: 3})]) == ((Ask(8, 3, zeroed=6),),)
    assert label == "0"
