"""Captures on streams of our own: begun, ended and cleaned up whatever happens inside."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.cuda.executable import free_ended
from nimble_core.runtime.cuda.graph_nodes import CaptureProbe
from nimble_core.torch_compat.cuda import clear_cublas_workspaces, end_allocate_to_pool
from nimble_core.tracing.rng_state import TORCH, random_state_kept
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.locks import capturing

__all__ = ["Lanes", "capture_on", "errors_explained", "fork", "join", "retry_with_room"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_STREAMS: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
"""Streams of our own, by GPU and priority."""


@contextmanager
def capture_on(
    device: torch.device, graph: torch.cuda.CUDAGraph, count: int
) -> Iterator[tuple[list[torch.cuda.Stream], CaptureProbe]]:
    """Capture on ``count`` streams, forked from the first and joined into it, whatever happens inside."""
    with (
        capturing,
        collector_paused(),
        torch.cuda.device(device),
        random_state_kept(device, draws=(TORCH,)),
        errors_explained(),
    ):
        free_ended()
        streams = own_streams(device, count)
        caller = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        # A workspace left on these streams by an earlier engine is not ours to bake into this graph.
        clear_cublas_workspaces()
        torch.cuda.set_stream(streams[0])
        pool = torch.cuda.graph_pool_handle()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                fork(streams)
                yield streams, CaptureProbe(streams[0].cuda_stream)
                join(streams)
                _end(graph)
            except BaseException:
                torch.cuda.set_stream(streams[0])  # a capture ends on the stream that it began on
                with suppress(Exception):
                    join(streams)
                with suppress(Exception):
                    _end(graph)
                # Where CUDA invalidated the capture, torch's allocator was not told that it is over.
                with suppress(Exception):
                    end_allocate_to_pool(device.index, pool)
                _settle_generator(caller)
                raise
        finally:
            torch.cuda.set_stream(caller)
            clear_cublas_workspaces()


def retry_with_room(capture: Callable[_P, _T]) -> Callable[_P, _T]:
    """Capture once more if memory ran out, after torch and Python have freed what they can.

    Inside of a capture neither can give anything back: torch keeps the memory of ended captures, which no other capture
    may have, and Python's collector is paused.
    """

    @wraps(capture)
    def captured(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return capture(*args, **kwargs)
        except DeviceError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
        with capturing:
            gc.collect()
            torch.cuda.empty_cache()
        return capture(*args, **kwargs)

    return captured


@contextmanager
def errors_explained() -> Iterator[None]:
    """Raise DeviceError where memory ran out, and CaptureError where CUDA refused a capture."""
    try:
        yield
    except NimbleError:  # says more already; some are RuntimeErrors
        raise
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "CUDA out of memory: " + str(error).splitlines()[0],
            fix="free memory, use a smaller batch, or cap streams with Options(max_streams=...)",
        ) from error
    except torch.AcceleratorError as error:
        raise CaptureError(
            "CUDA refused the capture: " + str(error).splitlines()[0],
            fix="run the model once in eager mode first; keep synchronising operators out of the prepared module",
        ) from error
    except RuntimeError as error:
        refused = [line for line in str(error).splitlines() if "during CUDA graph capture" in line]
        if not refused:
            raise
        raise CaptureError(
            f"the model cannot be captured: {refused[-1].removeprefix('RuntimeError: ')}",
            fix="make tensors on the device, outside of the prepared module, or keep what copies them out of it",
        ) from error


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # A recording that was refused at its first call leaves an empty graph, which is thrown away.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _settle_generator(stream: torch.cuda.Stream) -> None:
    """Let random numbers be drawn again after a capture that CUDA invalidated.

    Such a capture never tells the generator that it ended ("Offset increment outside graph capture" is what the next
    ``torch.randn`` would say); an empty one that ends well does.
    """
    torch.cuda.set_stream(torch.cuda.Stream(stream.device))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with suppress(Exception):
        graph.capture_begin(capture_error_mode="thread_local")
        _end(graph)


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
