"""Requests read from an allocator's history, against an allocator that is played through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.allocations import Ask, Event, Window, asks_of


def test_what_a_call_frees_and_keeps() -> None:
    history = [
        Event(64, 5),  # before the first call
        Event(128, 10),
        Event(256, 20),
        Event(64, 0),  # of an earlier call: none of this one's business
        Event(256, 0),
        Event(256, 15),
        Event(128, 0),  # after the last allocation
        Event(512, 7),  # the next call
    ]
    first, second = asks_of(history, [Window(1, 4, {256: 3}), Window(4, 5, {512: 9})])
    assert first == (Ask(10), Ask(20, None, 2), Ask(15, 3))
    assert second == (Ask(7, 9),)


def test_other_streams_are_looked_through() -> None:
    history = [Event(128, 10), Event(512, 99, own=False), Event(128, 0, own=False), Event(256, 20)]
    assert asks_of(history, [Window(0, 3, {128: 1, 256: 2})]) == ((Ask(10, 1), Ask(20, 2)),)


def test_calls_that_ask_for_nothing() -> None:
    assert asks_of([], [Window(0, 0, {}), Window(0, 0, {})]) == ((), ())
    assert asks_of([Event(8, 4)], [Window(7, 7, {}), Window(7, 8, {8: 0})], before=7) == ((), (Ask(4, 0),))


@given(st.lists(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=4), max_size=5))
def test_every_allocation_is_found_once(calls: list[list[tuple[int, bool]]]) -> None:
    events, windows, count = [], [], 0
    for requests in calls:
        storages = {}
        start = count
        for nbytes, kept in requests:
            events.append(Event(count, nbytes))
            if kept:
                storages[count] = count
            else:
                events.append(Event(count, 0))
            count += 1
        windows.append(Window(start, count, storages))
    found = asks_of(events, windows)
    assert [[ask.nbytes for ask in asks] for asks in found] == [[nbytes for nbytes, _ in one] for one in calls]
    for window, asks, requests in zip(windows, found, calls, strict=True):
        for place, (ask, (_, kept)) in enumerate(zip(asks, requests, strict=True)):
            assert ask.storage == (window.first + place if kept else None)
            last = place == len(requests) - 1
            assert ask.freed_before == (None if kept or last else place + 1)
