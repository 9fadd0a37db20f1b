"""What replays on a GPU: an instantiated CUDA graph between its input and output buffers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.cuda.graph_nodes import linked
from nimble_core.runtime.cuda.input_copies import InputCopies
from nimble_core.runtime.cuda.memory import CudaArena
from nimble_core.runtime.device import Quick, Ready
from nimble_core.scheduling.verify_capture import RawGraph, emitted_counts
from nimble_core.torch_compat.autograd import set_grad_enabled
from nimble_core.torch_compat.cuda import current_stream
from nimble_core.torch_compat.dispatch import foreach_copy_, foreach_zero_
from nimble_core.tracing.recording import Recording, rewinding
from nimble_core.tracing.strides import corner, rests
from nimble_core.utils.errors import DeviceError, first_line
from nimble_core.utils.locks import capturing, launching

__all__ = ["CudaExecutable", "free_ended"]

_ENDED: list[tuple[torch.device, torch.cuda.CUDAGraph, CudaArena | None, object, object]] = []
"""Device, graph, arena, and what they used, of executables that were closed."""
_NO_STREAM = -1
"""What no stream is called: the default one is 0."""
_PATIENCE_S = 1.0
"""How long an engine that is closed waits for a capture of another thread to end."""


class CudaExecutable:
    """An instantiated CUDA graph with its input and output buffers.

    Args:
        device: which GPU.
        graph: as captured, and instantiated.
        schedule: that it was captured with.
        recording: of the calls in it.
        buffers: what its calls read the inputs from.
        shapes: of the inputs: where a buffer is larger, the input lies in its corner, and the rest is zeros.
        outputs: where its results lie.
        raw: what the graph consists of.
        pool_nbytes: that the capture took of torch's allocator.
        arena: the memory of its calls, if they have some of their own.
        copies: nodes of the graph that copy inputs, if it has some.
    """

    def __init__(
        self,
        device: torch.device,
        graph: torch.cuda.CUDAGraph,
        schedule: Schedule,
        recording: Recording,
        buffers: list[torch.Tensor],
        shapes: Sequence[torch.Size],
        outputs: list[torch.Tensor],
        raw: RawGraph,
        pool_nbytes: int,
        arena: CudaArena | None = None,
        copies: InputCopies | None = None,
    ) -> None:
        self.device = device
        self._kept = tuple(recording.given.values())  # what it reads by address
        self.schedule = schedule
        self.raw = raw
        self.memory = arena.memory if arena and arena.nbytes else None
        placed = arena.inputs.values() if arena else ()
        own = sum(buffer.nbytes for buffer in buffers if buffer.data_ptr() not in placed)
        self.nbytes = pool_nbytes + own + (arena.nbytes if arena else 0)
        self.counts = emitted_counts(schedule, raw)
        self.graph: torch.cuda.CUDAGraph | None = graph
        # Memory of a buffer is used for other things between its last reader and the next run.
        self._rests = [one for buffer, shape in zip(buffers, shapes, strict=True) for one in rests(buffer, shape)]
        self.buffers = [corner(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)]
        self.outputs = outputs
        self._written, self._rewind = recording.written_inputs, rewinding(recording, buffers)
        self._arena, self._copies = arena, copies
        if copies is not None:
            copies.attach(graph.raw_cuda_graph_exec())
        self._lock = threading.Lock()
        self._linking = threading.RLock()
        self._stream: torch.cuda.Stream | None = None
        self._stream_id, self._index = _NO_STREAM, device.index

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Copy ``inputs`` in, replay on the caller's stream, return copies of the outputs (or the buffers)."""
        grad = torch.is_grad_enabled()
        with self._lock:
            graph = self.graph
            if graph is None:
                raise _closed()
            if grad:
                set_grad_enabled(False)
            try:
                self._follow_last_run()
                buffers = self.buffers
                if self._copies is None or not self._copies.read(inputs):
                    self._copy_in(inputs)
                with launching:
                    graph.replay()
                for position in self._written:
                    inputs[position].copy_(buffers[position])
                return list(self.outputs) if static else [output.clone() for output in self.outputs]
            finally:
                if grad:
                    set_grad_enabled(True)

    def quick(self, ready: Ready, *, static: bool) -> Quick | None:
        """Return runs whose inputs nodes copy, on the stream of the last run."""
        copies, lock = self._copies, self._lock
        if copies is None or self._written or any(output.requires_grad for output in self.outputs):
            return None

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
            with lock:
                graph = self.graph
                if (
                    graph is None
                    or current_stream(self._index)[0] != self._stream_id
                    or not ready(copies.read_on, args, kwargs)
                ):
                    return None
                with launching:
                    graph.replay()
                return list(self.outputs) if static else [output.clone() for output in self.outputs]

        return run

    def _copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        buffers = self.buffers
        if self._rests:
            foreach_zero_(self._rests)
            for buffer, given in zip(buffers, inputs, strict=True):
                buffer.copy_(given)
        elif len(buffers) == 1:
            buffers[0].copy_(inputs[0], non_blocking=True)
        else:
            foreach_copy_(buffers, list(inputs), non_blocking=True)

    def replay(self) -> None:
        """Replay on the caller's stream, on what the buffers hold."""
        with self._lock:
            if self.graph is None:
                raise _closed()
            self._follow_last_run()
            if self._copies is not None:
                self._copies.off()
            if self._rewind:
                self._rewind()
            with launching:
                self.graph.replay()

    @contextmanager
    def none_ahead(self) -> Iterator[None]:
        """Have replays inside launch no kernel before what it waits for has ended; one thread at a time."""
        with self._linking:
            ahead = self.raw.ahead
            if not self._link(()):
                raise _closed()
            try:
                yield
            finally:
                self._link(ahead)

    def _link(self, ahead: Sequence[tuple[int, int]]) -> bool:
        """Launch the heads of these edges ahead, and no others; return False if there is no graph any more."""
        with capturing, self._lock:
            graph = self.graph
            if graph is None:
                return False
            torch.cuda.synchronize(self.device)
            self.raw = linked(graph.raw_cuda_graph(), self.raw, ahead)
            try:
                graph.instantiate()
                if self._copies is not None:
                    self._copies.attach(graph.raw_cuda_graph_exec())
            except BaseException as error:
                # Its instance is gone, and torch would end that once more: nobody may launch or free this graph again.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
                self.graph = None
                raise DeviceError(
                    f"a graph could not be instantiated again: {first_line(error)}",
                    fix="free memory, and prepare the model again",
                ) from error
            return True

    @property
    def arena(self) -> torch.Tensor | None:
        """The memory of its calls, bytes; results that the next run overwrites lie in it."""
        return self._arena.all if self._arena else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stay between two runs: work issued inside on the current stream runs between them."""
        with self._lock:
            if self.graph is None:
                raise _closed()
            self._follow_last_run()
            yield

    def _follow_last_run(self) -> None:
        # The buffers are shared by all runs: a run on another stream waits for the previous one.
        current = current_stream(self._index)[0]
        if current != self._stream_id:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._stream_id = stream, current

    def close(self) -> None:
        """Wait for the last run and free graph and buffers."""
        with self._lock:
            graph, arena = self.graph, self._arena
            held = self.buffers, self._rests, self.outputs
            self.graph, self._arena, self.buffers, self._rests, self.outputs = None, None, [], [], []
            kept, self._kept = self._kept, ()
        if graph is not None:
            # Not under this engine's lock: a run that holds it may be collecting garbage, and close another engine.
            _ENDED.append((self.device, graph, arena, held, kept))  # the last two because a run may be using them
            # Nor in the midst of a launch: who holds ``capturing`` may be waiting for it. The next to end frees both,
            # or the next capture, where another thread holds it for long: it may wait for the run around this.
            launches = launching._is_owned()  # type: ignore[attr-defined]  # not in what types know of it
            if not launches and capturing.acquire(timeout=_PATIENCE_S):
                try:
                    free_ended()
                finally:
                    capturing.release()


def free_ended() -> None:
    """Free what was closed meanwhile; the caller holds ``capturing``, and captures nothing."""
    while _ENDED:
        ended = _ENDED.pop()
        _free(*ended[:3])
        del ended


def _free(device: torch.device, graph: torch.cuda.CUDAGraph, arena: CudaArena | None) -> None:
    torch.cuda.synchronize(device)
    graph.reset()
    if arena is not None:
        arena.close()


def _closed() -> DeviceError:
    return DeviceError("this engine was closed", fix="prepare the model again")
