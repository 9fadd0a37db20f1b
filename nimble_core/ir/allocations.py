"""What each call asks of the device's allocator, in which order, and what it gives back: read from its history.

The order matters. A library that frees one workspace before its result is allocated gets the result where the workspace
was, so that the block has to hold either; counts and sums of bytes do not show that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

__all__ = ["Ask", "Event", "Window", "asks_of"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One allocation that a call asks for.

    Args:
        nbytes: how much.
        storage: the storage it holds when the call is over, None for what the call frees again.
        freed_before: how many allocations the call had made when this one was freed; None: it held on to it.
        zeroed: up to which byte a library sets it to zero before the call's first kernel.
    """

    nbytes: int
    storage: int | None = None
    freed_before: int | None = None
    zeroed: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation, or the end of one.

    Args:
        address: of the memory.
        nbytes: asked for; 0 for an end.
        label: of what ran on its thread at the time; empty if that is none of the windows.
    """

    address: int
    nbytes: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """One call's part of a history.

    Args:
        label: of its events.
        storages: what the call made: storage by address.
    """

    label: str
    storages: Mapping[int, int]


def asks_of(
    events: Sequence[Event], windows: Sequence[Window], zeroed: Mapping[str, range] = MappingProxyType({})
) -> tuple[tuple[Ask, ...], ...]:
    """List what each window asks for.

    Args:
        events: of one stream, in the order in which they happened.
        windows: of the calls.
        zeroed: addresses that a call sets to zero before all else, by the label of its window.

    >>> history = [Event(7, 12, "relu"), Event(7, 0, "relu"), Event(7, 9, "relu"), Event(8, 4, "relu")]
    >>> [(ask.nbytes, ask.storage, ask.freed_before) for ask in asks_of(history, [Window("relu", {7: 5, 8: 6})])[0]]
    [(12, None, 1), (9, 5, None), (4, 6, None)]
    """
    labelled: dict[str, list[Event]] = {}
    for event in events:
        labelled.setdefault(event.label, []).append(event)
    found = []
    for window in windows:
        asks: list[Ask] = []
        addresses: list[int] = []
        held: dict[int, int] = {}
        own = labelled.get(window.label, [])
        # Up to the last allocation: what is freed after it matters to nobody.
        last = max((place for place, event in enumerate(own) if event.nbytes), default=-1)
        for event in own[: last + 1]:
            if event.nbytes:
                held[event.address] = len(asks)
                addresses.append(event.address)
                asks.append(Ask(event.nbytes))
            elif event.address in held:
                number = held.pop(event.address)
                asks[number] = Ask(asks[number].nbytes, None, len(asks))
        for address, number in held.items():
            if address in window.storages:
                asks[number] = Ask(asks[number].nbytes, window.storages[address])
        fill = zeroed.get(window.label, range(0))
        for number in reversed(range(len(asks)) if fill else ()):
            start = addresses[number]
            if start <= fill.start and fill.stop <= start + asks[number].nbytes:
                asks[number] = replace(asks[number], zeroed=fill.stop - start)
                break
        found.append(tuple(asks))
    return tuple(found)
