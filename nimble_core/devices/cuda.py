"""The CUDA device: recordings and schedules become CUDA graphs.

A recording runs under a throwaway capture: no kernel executes. A schedule is captured for good by re-issuing the
Program, each call on its stream, with exactly the schedule's waits between streams.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch

from nimble_core import cupti, kineto
from nimble_core.accumulators import kept_graphs_apart
from nimble_core.allocations import Ask, Event, Window, asks_of
from nimble_core.arena import MemoryPlan
from nimble_core.around import Around
from nimble_core.collector import collector_paused
from nimble_core.devices.base import Executable, Observation, PlacementError, Timed
from nimble_core.devices.placement import Placer
from nimble_core.emitted import RawGraph, emitted_counts, launched_ahead
from nimble_core.errors import CaptureError, DeviceError, NimbleError
from nimble_core.inductor import first_line
from nimble_core.launchers import Relaunch
from nimble_core.layout import Layout, lay_out
from nimble_core.locks import capturing, launching
from nimble_core.memory import release_plan
from nimble_core.observation import TIMED, Launch, observation, tell_by_id, tell_by_order
from nimble_core.occupancy import Multiprocessors
from nimble_core.preserve import random_state_kept, run_until_settled
from nimble_core.program import Program
from nimble_core.ranges import call_ranges, capture_range, replays_marked
from nimble_core.rawgraph import CaptureProbe, linked, links_change, read_graph, read_launches, zeroed_at_once
from nimble_core.record import record
from nimble_core.recording import Issuer, Recording, issuing
from nimble_core.rewritten import Rewritten
from nimble_core.schedule import Schedule
from nimble_core.signature import Signature
from nimble_core.simulate import H200
from nimble_core.structure import builder, flatten

__all__ = ["CudaDevice", "CudaExecutable", "multiprocessors"]

_ENDED: list[tuple[torch.device, torch.cuda.CUDAGraph, _Arena | None, object, object]] = []
"""Of executables that were closed: device, graph, arena, and what they used."""
_PATIENCE_S = 1.0
"""How long an engine that is closed waits for a capture of another thread to end."""
_STREAMS: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_TIMED_CALLS = 10
_CUDNN_TRIALS = 4
"""Routines that cuDNN times for a convolution that it meets: each takes milliseconds, and it names the likely first."""
_GUARD_BYTES = 512
"""Between the start of an arena's own block and the first address in it: no two blocks may start at one address."""


def _streams(device: torch.device, count: int, priority: int = 0) -> list[torch.cuda.Stream]:
    """``count`` streams of our own, the same ones each time.

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


class CudaDevice:
    """One GPU.

    Args:
        device: which, e.g. ``torch.device("cuda:0")``.

    Raises:
        DeviceError: torch sees no such GPU, or cuda-bindings is missing.
    """

    kind = "cuda"
    model = H200

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceError("torch sees no CUDA GPU", fix="run on the host: move model and inputs to the CPU")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.name = torch.cuda.get_device_name(self.device)
        self._unplaced: frozenset[str] = frozenset()

    def stream_cap(self, asked: int | None) -> int | None:
        """As asked: streams are our own, and captured edges are what counts."""
        return asked

    def clock_ns(self) -> float:
        """Host clock, nanoseconds."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait for everything on this GPU; not while another thread captures, which CUDA does not allow."""
        with capturing:
            torch.cuda.synchronize(self.device)

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run as it is: loads kernels, creates library handles, lets cuDNN choose if it is asked to."""
        with capturing, random_state_kept(self.device), _errors_explained():
            run_until_settled(model, args, kwargs)
            self.synchronize()

    def record(
        self,
        model: Callable[..., Any],
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rewritten: Rewritten | None = None,
        *,
        traced: bool = True,
    ) -> Recording:
        """Record under a throwaway capture."""
        with (
            kept_graphs_apart(_leaves(model)),
            self._capturing(torch.cuda.CUDAGraph(keep_graph=True), 1) as (streams, probe),
            _allocations_traced(streams[0]) if traced else nullcontext() as trace,
        ):
            counter = _Counter(probe, self.device, trace)
            return record(model, signature, args=args, kwargs=kwargs, counter=counter, rewritten=rewritten)

    def lay_out(self, recording: Recording, schedule: Schedule) -> Layout | None:
        """Everything that calls allocate, but for calls that were seen to allocate in another way."""
        program = recording.program
        if not _places_memory() or len(recording.asks) < len(program.calls):
            return None
        layout = lay_out(program, schedule, recording.asks, skip=self._unplaced)
        return replace(layout, beside_nbytes=sum(ref.nbytes for ref in program.inputs))

    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> CudaExecutable:
        """Capture a multi-stream graph with the schedule's waits, and instantiate it."""
        with _errors_explained():
            arena = _Arena(self.device, recording.program, schedule, layout, memory)
            buffers = [
                arena.input(ref.storage, tensor) if ref.storage in arena.inputs else _like(tensor)
                for ref, tensor in zip(recording.program.inputs, inputs, strict=True)
            ]
        issuer = Issuer(recording, buffers)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = torch.cuda.memory_reserved(self.device)
        try:
            with capture_range(recording.program, schedule):
                with (
                    self._capturing(graph, max(schedule.streams, 1)) as (streams, probe),
                    issuing("cuda"),
                ):
                    bounds = self._issued(recording, schedule, issuer, arena, streams, probe)
                    outputs = issuer.outputs()
                outputs = arena.settled(outputs)
                issuer.tensors.clear()
                arena.capture_ended()
                raw, held = self._instantiated(graph, bounds, recording, arena.cells, before)
        except BaseException:
            issuer.tensors.clear()
            arena.close()
            raise
        kept = tuple(recording.given.values())
        executable = CudaExecutable(
            self.device, graph, schedule, buffers, outputs, raw, recording.written_inputs, held, arena, kept
        )
        return replays_marked(executable, recording.program, schedule)

    def _issued(
        self,
        recording: Recording,
        schedule: Schedule,
        issuer: Issuer,
        arena: _Arena,
        streams: Sequence[torch.cuda.Stream],
        probe: CaptureProbe,
    ) -> list[tuple[int, int]]:
        """Issue the calls, each on its stream behind what it waits for; of each, its first node and the next after it.

        Raises:
            CaptureError: a call that cannot be issued again.
            PlacementError: results that are not where they were planned.
        """
        range_of = call_ranges(recording.program, schedule)
        producers = {producer for producer, _ in schedule.syncs}
        waits: dict[int, list[int]] = {}
        for producer, consumer in schedule.syncs:
            waits.setdefault(consumer, []).append(producer)
        events: dict[int, torch.cuda.Event] = {}
        bounds: list[tuple[int, int]] = [(0, 0)] * len(recording.program.calls)
        lanes = _Lanes(self.device, schedule)
        nodes = probe.nodes()
        with lanes.joined(streams):
            for position, call in enumerate(schedule.order):
                stream = lanes.enter(call, streams)
                for producer in waits.get(call, ()):
                    stream.wait_event(events[producer])
                for storage in arena.dead_before(position):
                    issuer.release(storage)
                try:
                    with range_of(call), arena.placing(call):
                        issuer.issue(call)
                except (RuntimeError, TypeError, ValueError) as error:
                    if isinstance(error, (NimbleError, torch.OutOfMemoryError)):
                        raise
                    raise CaptureError(
                        f"a call could not be re-issued: {str(error).splitlines()[0]}",
                        where=str(recording.program.calls[call]),
                        fix="report this model; until then, leave that part out of the prepared module",
                    ) from error
                if not arena.placed(call, issuer):
                    # At once: what comes next may be meant for the memory in which these results are now.
                    self._unplaced |= {recording.program.calls[call].operator}
                    raise PlacementError(f"not placed as planned: {recording.program.calls[call]}")
                first, nodes = nodes, probe.nodes()
                bounds[call] = (first, nodes)
                if call in producers:
                    event = torch.cuda.Event()
                    event.record(stream)
                    events[call] = event
        return bounds

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> CudaExecutable:
        """Plain one-stream capture of the module, every launch included, seen or not."""
        with _errors_explained():
            buffers = [_like(tensor) for tensor in signature.tensors]
        args, kwargs = builder(signature.structure)(buffers)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = torch.cuda.memory_reserved(self.device)
        with kept_graphs_apart(_leaves(model)), self._capturing(graph, 1), torch.no_grad():
            result = model(*args, **kwargs)
        with _errors_explained():
            graph.instantiate()
        outputs, _ = flatten(result, what="output")
        raw = read_graph(graph.raw_cuda_graph())
        held = max(torch.cuda.memory_stats(self.device)["reserved_bytes.all.current"] - before, 0)
        calls = len(recording.program.calls)
        schedule = Schedule("single", (0,) * calls, tuple(range(calls)), ())
        executable = CudaExecutable(
            self.device, graph, schedule, buffers, outputs, raw, recording.written_inputs, held, None, ()
        )
        return replays_marked(executable, recording.program, schedule)

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Times of every replayed node, by call; none and a note why where nothing can be seen.

        Through CUPTI by graph node id; without ``cupti-python`` through ``torch.profiler``, by name and order.
        """
        if not isinstance(executable, CudaExecutable):
            raise DeviceError(f"a {type(executable).__name__} does not run on a GPU")
        found = self._watched(executable, replays)
        if not executable.raw.ahead or not links_change(executable.raw):
            return found
        with executable.none_ahead():  # else a kernel's time begins while it waits for the one before
            return replace(found, costs=self._watched(executable, replays).costs)

    def _watched(self, executable: CudaExecutable, replays: int) -> Observation:
        wall = _event_times_ns(executable, max(replays, 5))
        watched: list[float] = []

        def replay() -> None:
            watched.extend(_event_times_ns(executable, replays))  # one by one: what is compared is taken alike

        why_not, clock = cupti.unavailable(), "CUPTI activity, GPU clock"
        seen: list[cupti.Activity] = []
        places: dict[int, int] = {}
        if not why_not:
            seen, places = cupti.collect(replay, self.synchronize, executable.raw.nodes)
        elif not cupti.taken():
            seen, clock = kineto.collect(replay, self.synchronize), "torch.profiler, GPU clock"
        note = f"{why_not}: replayed kernels have no times" if why_not and not seen else ""
        profiled = median(watched) if watched else 0.0
        gpu = multiprocessors(self.device)
        return _observation(executable, seen, places, replays, median(wall), gpu, note, profiled, clock)

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """Device time of one of several runs in a graph that is replayed, the fastest of a few replays."""
        with torch.no_grad(), self.libraries_tuned(), random_state_kept(self.device):
            return [self._time_ns(*call) if isinstance(call, tuple) else self._time_ns(call) for call in calls]

    def _time_ns(self, *calls: Callable[[], object]) -> float | None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with capturing:
                for call in calls:
                    call()  # libraries choose their routines
                self.synchronize()
            with self._capturing(graph, len(calls)) as (streams, _):
                for _ in range(_TIMED_CALLS):
                    _fork(streams)
                    for stream, call in zip(streams, calls, strict=True):
                        torch.cuda.set_stream(stream)
                        call()
                    _join(streams)
                torch.cuda.set_stream(streams[0])
            graph.instantiate()
        except (RuntimeError, CaptureError, DeviceError):
            return None
        times: list[float] = []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            with launching:
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e6 / _TIMED_CALLS)
        graph.reset()
        return min(times)

    @contextmanager
    def libraries_tuned(self) -> Iterator[None]:
        """cuDNN times its routines, unless it is told to be deterministic."""
        cudnn = torch.backends.cudnn
        before, limit = cudnn.benchmark, cudnn.benchmark_limit
        cudnn.benchmark = before or not cudnn.deterministic
        cudnn.benchmark_limit = limit if before else _CUDNN_TRIALS
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.benchmark_limit = before, limit

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Peak of torch's allocator during ``run`` above what was allocated before."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = run()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return max(peak, 0)

    def _instantiated(
        self,
        graph: torch.cuda.CUDAGraph,
        bounds: Sequence[tuple[int, int]],
        recording: Recording,
        cells: range,
        reserved_before: int,
    ) -> tuple[RawGraph, int]:
        """Make a captured graph ready to launch; its nodes and edges, and the bytes it took.

        Args:
            graph: as captured.
            bounds: of each call, its first node and the first after it.
            recording: of the calls.
            cells: addresses that are each the workspace of one call, or nothing.
            reserved_before: bytes that torch's allocator held before the capture.
        """
        handle = graph.raw_cuda_graph()
        raw = read_graph(handle)
        owner: list[int | None] = [None] * len(raw.nodes)
        for call, (first, last) in enumerate(bounds):
            owner[first:last] = [call] * (last - first)
        raw = replace(raw, owner=tuple(owner))
        if links_change(raw):
            functions: dict[int, Any] = {step.call: step.func for step in recording.steps if step.call is not None}
            waiting = {call for call, func in functions.items() if isinstance(func, Relaunch) and func.waits}
            library = {call for call, func in functions.items() if getattr(func, "namespace", "") == "aten"}
            with torch.cuda.device(self.device):
                raw = zeroed_at_once(handle, raw, cells)
            wanted = launched_ahead(raw, waiting, library)
            raw = linked(handle, raw, sorted(set(raw.ahead) & set(wanted)))
            with suppress(DeviceError):  # such edges are a gain, and nothing is wrong without
                raw = linked(handle, raw, wanted)
        with _errors_explained():
            graph.instantiate()
        held = torch.cuda.memory_reserved(self.device) - reserved_before
        return raw, max(held, 0)

    @contextmanager
    def _capturing(
        self, graph: torch.cuda.CUDAGraph, count: int
    ) -> Iterator[tuple[list[torch.cuda.Stream], CaptureProbe]]:
        """Capture on ``count`` streams, forked from the first and joined into it, whatever happens inside."""
        with (
            capturing,
            collector_paused(),
            torch.cuda.device(self.device),
            random_state_kept(self.device),
            _errors_explained(),
        ):
            _free_ended()
            streams = _streams(self.device, count)
            caller = torch.cuda.current_stream(self.device)
            self.synchronize()
            # A workspace left on these streams by an earlier engine is not ours to bake into this graph.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.set_stream(streams[0])
            pool = torch.cuda.graph_pool_handle()
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    _fork(streams)
                    yield streams, CaptureProbe(streams[0].cuda_stream)
                    _join(streams)
                    _end(graph)
                except BaseException:
                    torch.cuda.set_stream(streams[0])  # a capture ends on the stream that it began on
                    with suppress(Exception):
                        _join(streams)
                    with suppress(Exception):
                        _end(graph)
                    # Where CUDA invalidated the capture, torch's allocator was not told that it is over.
                    with suppress(Exception):
                        torch._C._cuda_endAllocateToPool(self.device.index, pool)
                    _settle_generator(caller)
                    raise
            finally:
                torch.cuda.set_stream(caller)
                torch._C._cuda_clearCublasWorkspaces()


class CudaExecutable:
    """An instantiated CUDA graph with its input and output buffers."""

    def __init__(
        self,
        device: torch.device,
        graph: torch.cuda.CUDAGraph,
        schedule: Schedule,
        buffers: list[torch.Tensor],
        outputs: list[torch.Tensor],
        raw: RawGraph,
        written_inputs: tuple[int, ...],
        pool_nbytes: int,
        arena: _Arena | None,
        kept: tuple[torch.Tensor, ...],
    ) -> None:
        self.device = device
        self._kept = kept  # what the graph reads by address
        self.schedule = schedule
        self.raw = raw
        self.memory = arena.memory if arena and arena.nbytes else None
        placed = arena.inputs.values() if arena else ()
        own = sum(buffer.nbytes for buffer in buffers if buffer.data_ptr() not in placed)
        self.nbytes = pool_nbytes + own + (arena.nbytes if arena else 0)
        self.counts = emitted_counts(schedule, raw)
        self.graph: torch.cuda.CUDAGraph | None = graph
        self.buffers = buffers
        self.outputs = outputs
        self._written = written_inputs
        self._arena = arena
        self._lock = threading.Lock()
        self._linking = threading.RLock()
        self._stream: torch.cuda.Stream | None = None
        self._stream_id = 0

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Copy ``inputs`` in, replay on the caller's stream, return copies of the outputs (or the buffers)."""
        grad = torch.is_grad_enabled()
        with self._lock:
            graph = self.graph
            if graph is None:
                raise _closed()
            if grad:
                torch._C._set_grad_enabled(False)
            try:
                self._follow_last_run()
                buffers = self.buffers
                if len(buffers) == 1:
                    buffers[0].copy_(inputs[0], non_blocking=True)
                else:
                    torch._foreach_copy_(buffers, list(inputs), non_blocking=True)
                with launching:
                    graph.replay()
                for position in self._written:
                    inputs[position].copy_(buffers[position])
                return list(self.outputs) if static else [output.clone() for output in self.outputs]
            finally:
                if grad:
                    torch._C._set_grad_enabled(True)

    def replay(self) -> None:
        """Replay on the caller's stream."""
        with self._lock:
            if self.graph is None:
                raise _closed()
            self._follow_last_run()
            with launching:
                self.graph.replay()

    @contextmanager
    def none_ahead(self) -> Iterator[None]:
        """Inside, a replay launches no kernel before what it waits for has ended; one thread at a time."""
        with self._linking:
            ahead = self.raw.ahead
            if not self._link(()):
                raise _closed()
            try:
                yield
            finally:
                self._link(ahead)

    def _link(self, ahead: Sequence[tuple[int, int]]) -> bool:
        """Launch the heads of these edges ahead, and no others; False if there is no graph any more."""
        with capturing, self._lock:
            graph = self.graph
            if graph is None:
                return False
            torch.cuda.synchronize(self.device)
            self.raw = linked(graph.raw_cuda_graph(), self.raw, ahead)
            try:
                graph.instantiate()
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
        """Between two runs: what is issued inside on the current stream follows the one and precedes the other."""
        with self._lock:
            if self.graph is None:
                raise _closed()
            self._follow_last_run()
            yield

    def _follow_last_run(self) -> None:
        # The buffers are shared by all runs: a run on another stream waits for the previous one.
        current = torch._C._cuda_getCurrentStream(self.device.index)[0]
        if current != self._stream_id:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._stream_id = stream, current

    def close(self) -> None:
        """Wait for the last run and free graph and buffers."""
        with self._lock:
            graph, arena = self.graph, self._arena
            held = self.buffers, self.outputs
            self.graph, self._arena, self.buffers, self.outputs = None, None, [], []
            kept, self._kept = self._kept, ()
        if graph is not None:
            # Not under this engine's lock: a run that holds it may be collecting garbage, and close another engine.
            _ENDED.append((self.device, graph, arena, held, kept))  # the last two because a run may be using them
            # Nor in the midst of a launch: who holds ``capturing`` may be waiting for it. The next to end frees both,
            # or the next capture, where another thread holds it for long: it may wait for the run around this.
            launches = launching._is_owned()  # type: ignore[attr-defined]  # not in what types know of it
            if not launches and capturing.acquire(timeout=_PATIENCE_S):
                try:
                    _free_ended()
                finally:
                    capturing.release()


def _free_ended() -> None:
    """Free what was closed meanwhile; who calls this holds ``capturing``, and captures nothing."""
    while _ENDED:
        ended = _ENDED.pop()
        _free(*ended[:3])
        del ended


def _free(device: torch.device, graph: torch.cuda.CUDAGraph, arena: _Arena | None) -> None:
    torch.cuda.synchronize(device)
    graph.reset()
    if arena is not None:
        arena.close()


class _Arena:
    """The memory of one captured schedule: a single block, and the allocator told where in it each call's results go.

    Args:
        device: which GPU.
        program: the calls.
        schedule: the schedule to be captured.
        layout: what each call allocates; None: all is left to torch's allocator, which reuses memory on each stream.
        memory: where it goes.
    """

    def __init__(
        self,
        device: torch.device,
        program: Program,
        schedule: Schedule,
        layout: Layout | None,
        memory: MemoryPlan | None,
    ) -> None:
        self.memory = memory
        self._device = device.index
        self._asked = {} if layout is None else dict(enumerate(layout.asked))
        self._as_asked = True
        self._allocated: tuple[int, int] | None = None  # up to the last placed call: to ask takes long
        self._surprises = 0
        self.nbytes = 0
        self._releases: Sequence[Sequence[int]] = release_plan(program, schedule).before
        self._planned: list[list[tuple[int, int]]] = []
        self._address: dict[int, int] = {}
        self._placer: Placer | None = None
        self._block: torch.Tensor | None = None
        self.inputs: dict[int, int] = {}
        self.cells = range(0)
        if layout is None or memory is None:
            return
        placed = {block.storage for blocks in layout.blocks for block in blocks if block.storage is not None}
        self._releases = _last_uses(program, schedule, placed, self._releases)
        shared = layout.front_nbytes
        kept = shared + memory.nbytes
        cells = kept + layout.kept_nbytes
        scratch = cells + layout.cells_nbytes
        self.nbytes = scratch + memory.scratch_nbytes
        if not any(layout.blocks):
            return
        self._placer = Placer(device.index)
        self._block = torch.empty(self.nbytes + _GUARD_BYTES, dtype=torch.uint8, device=device)
        start = self._block.data_ptr() + _GUARD_BYTES
        self.cells = range(start + cells, start + scratch)

        def located(offset: int) -> int:
            in_arena = start + shared + offset - memory.start
            return in_arena if offset >= memory.start else layout.lent_address + offset

        self.inputs = {one: located(memory.offsets[one]) for one in layout.inputs if memory.offsets[one] >= 0}
        for call, blocks in enumerate(layout.blocks):
            running = {
                "scratch": start + scratch + (memory.scratch_offsets[call] if memory.scratch_offsets else 0),
                "workspace": located(memory.workspace_offsets[call] if memory.workspace_offsets else 0),
            }
            planned = []
            for block in blocks:
                if block.home == "arena" and block.storage is not None:
                    address = located(memory.offsets[block.storage])
                elif block.home == "front":
                    address = start + block.offset
                elif block.home == "kept":
                    address = start + kept + block.offset
                elif block.home == "cell":
                    address = start + cells + block.offset
                else:
                    address = running[block.home]
                    running[block.home] += -(-block.nbytes // memory.alignment) * memory.alignment
                if block.storage is not None:
                    self._address[block.storage] = address
                planned.append((address, block.nbytes))
            self._planned.append(planned)
        self._made = [[block.storage for block in blocks if block.storage is not None] for blocks in layout.blocks]

    def input(self, storage: int, example: torch.Tensor) -> torch.Tensor:
        """The buffer of an input at its place; what it holds is whatever is there."""
        strides = torch.empty_like(example, device="meta").stride()
        memory = torch._C._construct_storage_from_data_pointer(self.inputs[storage], example.device, example.nbytes)
        return torch.empty(0, dtype=example.dtype, device=example.device).set_(memory, 0, example.shape, strides)

    def dead_before(self, position: int) -> Sequence[int]:
        """Storages to let go of before the call at this place of the issue order."""
        return self._releases[position]

    @contextmanager
    def placing(self, call: int) -> Iterator[None]:
        """Inside, what ``call`` allocates goes where it was planned."""
        if self._placer is None or not self._planned[call]:
            yield
            self._allocated = None
            return
        # A library's workspace that an earlier call got is not this call's: it asks for its own.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            before = self._allocated or _allocations(self._device)
            with self._placer.placing(self._planned[call]) as made:
                yield
                after = self._allocated = _allocations(self._device)
            asked = (after[0] - before[0] - made[0], after[1] - before[1] - made[1])
            self._as_asked = self._asked[call] == asked
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def placed(self, call: int, issuer: Issuer) -> bool:
        """Whether all results of ``call`` are where they should be, and it asked for what was planned."""
        if self._placer is None:
            return True
        surprised = len(self._placer.surprises) > self._surprises
        self._surprises = len(self._placer.surprises)
        # Also what is freed again counts: a workspace larger than in the recording may have run over its block.
        return (
            not surprised
            and (self._as_asked or not self._planned[call])
            and all(
                (tensor := issuer.tensor_on(storage)) is None
                or tensor.untyped_storage().data_ptr() == self._address[storage]
                for storage in self._made[call]
            )
        )

    def settled(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs as views of the block itself, so that the allocator's pools can go."""
        if self._block is None:
            return outputs
        block = self._block
        start, end = block.data_ptr(), block.data_ptr() + block.nbytes
        settled = []
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            if start < address < end:
                view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                offset = (address - start) // tensor.element_size() + tensor.storage_offset()
                view.set_(block.untyped_storage(), offset, tensor.shape, tensor.stride())
                view = torch._conj(view) if tensor.is_conj() else view
                tensor = torch._neg_view(view) if tensor.is_neg() else view
            settled.append(tensor)
        return settled

    @property
    def all(self) -> torch.Tensor | None:
        """Every byte that calls use; None if there is none."""
        return None if self._block is None or not self.nbytes else self._block[_GUARD_BYTES:]

    def capture_ended(self) -> None:
        """Let the pools go; nothing may be alive in them."""
        if self._placer is not None:
            self._placer.release()

    def close(self) -> None:
        """Free the block."""
        self._block = None
        if self._placer is not None:
            self._placer.release()
            self._placer.close()
            self._placer = None


def _last_uses(
    program: Program, schedule: Schedule, placed: set[int], releases: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Placed storages go right after their last use was issued: their bytes are the plan's; the others as before."""
    last: dict[int, int] = {}
    for position, call in enumerate(schedule.order):
        for access in program.calls[call].accesses:
            if access.ref.storage in placed:
                last[access.ref.storage] = position
    for ref in program.outputs:
        last.pop(ref.storage, None)
    before = [[storage for storage in storages if storage not in placed] for storages in releases]
    for storage, position in last.items():
        if position + 1 < len(before):
            before[position + 1].append(storage)
    return before


class _Lanes:
    """The streams of a schedule during its capture: one a lane, or one for each priority that its calls have."""

    def __init__(self, device: torch.device, schedule: Schedule) -> None:
        self._schedule = schedule
        self._urgent = {
            level: _streams(device, schedule.streams, level) for level in sorted(set(schedule.priority) - {0})
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
        """Bring every lane back to its own stream at the end, and the first one to be current; errors go first."""
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


class _Counter:
    """Nodes of the throwaway capture, and a way out of it for host constants."""

    def __init__(self, probe: CaptureProbe, device: torch.device, trace: _Trace | None) -> None:
        self.nodes = probe.nodes
        self._device = device
        self._trace = trace

    def begin(self, label: str) -> None:
        if self._trace is not None:
            # A workspace that a library kept from the call before would not show.
            torch._C._cuda_clearCublasWorkspaces()
            torch._C._cuda_setMemoryMetadata(label)

    def end(self) -> None:
        if self._trace is not None:
            torch._C._cuda_setMemoryMetadata("")

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        return asks_of(self._trace.events(), windows) if self._trace else ()

    @contextmanager
    def outside(self) -> Iterator[None]:
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


def _leaves(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Parameters whose gradients a run of ``model`` makes: of what runs another model's backward as well."""
    return dict(model.named_parameters()) if isinstance(model, Around) else {}


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, requires_grad=False)
    return made.copy_(tensor.detach())


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


def _fork(streams: Sequence[torch.cuda.Stream]) -> None:
    event = torch.cuda.Event()
    event.record(streams[0])
    for stream in streams[1:]:
        stream.wait_event(event)


def _join(streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams[1:]:
        event = torch.cuda.Event()
        event.record(stream)
        streams[0].wait_event(event)


def _closed() -> DeviceError:
    return DeviceError("this engine was closed", fix="prepare the model again")


@contextmanager
def _errors_explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceError(
            "CUDA out of memory: " + str(error).splitlines()[0],
            fix="free memory, use a smaller batch, or cap streams with Options(max_streams=...)",
        ) from error
    except torch.AcceleratorError as error:
        raise CaptureError(
            "CUDA refused the capture: " + str(error).splitlines()[0],
            fix="run the model once in eager mode first; keep synchronising operators out of the prepared module",
        ) from error


def _allocations(device: int) -> tuple[int, int]:
    """``(allocations, bytes asked for)`` so far."""
    stats = torch._C._cuda_memoryStats(device)
    return stats["allocation"]["all"]["allocated"], stats["requested_bytes"]["all"]["allocated"]


@dataclass(frozen=True, slots=True)
class _Trace:
    """The allocator's history of one stream. Labels are of the thread that allocates: others' are told apart."""

    stream: torch.cuda.Stream

    def events(self) -> list[Event]:
        """What was allocated and freed since, in order."""
        own = self.stream.cuda_stream
        return [
            Event(one["addr"], one["size"] if one["action"] == "alloc" else 0, one["user_metadata"])
            for one in torch.cuda.memory._snapshot()["device_traces"][self.stream.device.index]
            if one["action"] in ("alloc", "free_requested") and one["stream"] == own
        ]


@contextmanager
def _allocations_traced(stream: torch.cuda.Stream) -> Iterator[_Trace | None]:
    """Yields what tells the allocations inside; None where someone else traces them."""
    if torch._C._cuda_isHistoryEnabled():
        yield None
        return
    label = torch._C._cuda_getMemoryMetadata()
    try:
        torch.cuda.memory._record_memory_history(enabled="all", context=None)
        torch._C._cuda_setMemoryMetadata("")  # the user's could be that of a call
        yield _Trace(stream)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch._C._cuda_setMemoryMetadata(label)


@cache
def _places_memory() -> bool:
    """Whether this torch has what placing memory takes."""
    names = ("_cuda_customAllocator", "_cuda_beginAllocateCurrentThreadToPool", "_cuda_releasePool")
    return torch.cuda.get_allocator_backend() == "native" and all(hasattr(torch._C, name) for name in names)


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """What the multiprocessors of ``device`` hold."""
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        count=found.multi_processor_count,
        threads=found.max_threads_per_multi_processor,
        registers=getattr(found, "regs_per_multiprocessor", 65536),
        shared_bytes=found.shared_memory_per_multiprocessor,
    )


def _event_times_ns(executable: Executable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        executable.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e6)
    return times


def _observation(
    executable: CudaExecutable,
    seen: Sequence[cupti.Activity],
    places: Mapping[int, int],
    replays: int,
    wall_ns: float,
    gpu: Multiprocessors,
    note: str,
    profiled_ns: float = 0.0,
    clock: str = "CUPTI activity, GPU clock",
) -> Observation:
    raw = executable.raw
    ids = {node: position for node, position in places.items() if raw.kinds[position] in TIMED}
    told = tell_by_id(seen, raw, ids, replays)
    launches: tuple[Launch, ...] = ()
    if seen and not any(activity.node >= 0 for activity in seen):
        try:
            launches = read_launches(raw)
        except DeviceError as error:
            note = f"no graph node ids, and {error.what}"
        else:
            told = tell_by_order(seen, raw, launches, replays)
    return observation(
        told,
        raw,
        executable.schedule,
        replays,
        clock=clock,
        profiled_ns=profiled_ns,
        unprofiled_ns=wall_ns,
        gpu=gpu,
        launches=launches,
        note=note,
    )
