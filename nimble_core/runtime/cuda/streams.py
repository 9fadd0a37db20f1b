"""Streams of our own on a GPU, and a schedule's lanes on them while it is captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.utils.errors import DeviceError

__all__ = ["Lanes", "fork", "join", "own_streams"]

_STREAMS: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


def own_streams(device: torch.device, count: int, priority: int = 0) -> list[torch.cuda.Stream]:
    """Return ``count`` streams of our own, the same ones each time.

    ``torch.cuda.Stream()`` hands out 32 round robin: above that two of them are silently one.

    Args:
        device: whose streams.
        count: how many.
        priority: 0 normal, higher sooner; capped at what the GPU offers.
    """
    pool = _STREAMS.setdefault((device.index or 0, priority), [])
    if len(pool) < count:
        from cuda.bindings import runtime

        with torch.cuda.device(device):
            _, _, greatest = runtime.cudaDeviceGetStreamPriorityRange()
            level = max(-priority, int(greatest))  # CUDA counts downwards: -5 is the most urgent
            while len(pool) < count:
                code, handle = runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, level)
                if int(code) != 0:
                    raise DeviceError(f"cudaStreamCreateWithPriority failed: {code.name}")
                pool.append(torch.cuda.ExternalStream(int(handle), device=device))
    return pool[:count]


def fork(streams: Sequence[torch.cuda.Stream]) -> None:
    """Let the others begin behind what the first has been given."""
    event = torch.cuda.Event()
    event.record(streams[0])
    for stream in streams[1:]:
        stream.wait_event(event)


def join(streams: Sequence[torch.cuda.Stream]) -> None:
    """Let the first go on behind what the others have been given."""
    for stream in streams[1:]:
        event = torch.cuda.Event()
        event.record(stream)
        streams[0].wait_event(event)


class Lanes:
    """The streams of a schedule during its capture: one for each lane, and for each priority in it."""

    def __init__(self, device: torch.device, schedule: Schedule) -> None:
        self._schedule = schedule
        self._urgent = {
            level: own_streams(device, schedule.streams, level) for level in sorted(set(schedule.priority) - {0})
        }
        self._current: dict[int, torch.cuda.Stream] = {}

    def enter(self, call: int, streams: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream:
        """Make the stream of ``call`` current, behind what its lane has issued so far."""
        lane = self._schedule.stream[call]
        level = self._schedule.priority[call] if self._schedule.priority else 0
        stream = self._urgent[level][lane] if level else streams[lane]
        before = self._current.setdefault(lane, streams[lane])
        if before is not stream:
            stream.wait_stream(before)
            self._current[lane] = stream
        torch.cuda.set_stream(stream)
        return stream

    @contextmanager
    def joined(self, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        """Bring every lane back to its own stream at the end, and make the first one current."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # CUDA may have ended the capture
                self._leave(streams)
            raise
        self._leave(streams)

    def _leave(self, streams: Sequence[torch.cuda.Stream]) -> None:
        for lane, stream in self._current.items():
            if stream is not streams[lane]:
                streams[lane].wait_stream(stream)
        torch.cuda.set_stream(streams[0])
