"""The CUDA device: recordings and schedules become CUDA graphs.

A recording runs under a throwaway capture: no kernel executes. A schedule is captured for good by re-issuing the
Program, each call on its stream, with exactly the schedule's waits between streams.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from nimble_core import cupti
from nimble_core.costs import Costs, Kernel
from nimble_core.devices.base import Executable, Observation
from nimble_core.errors import CaptureError, DeviceError, NimbleError
from nimble_core.kernel_names import short_kernel_name
from nimble_core.measurement import quantile
from nimble_core.memory import release_plan
from nimble_core.preserve import random_state_kept, run_preserved
from nimble_core.rawgraph import CaptureProbe, RawGraph, read_graph
from nimble_core.record import record
from nimble_core.recording import Issuer, Recording, collector_paused, issuing
from nimble_core.schedule import Schedule, SyncCounts
from nimble_core.signature import Signature
from nimble_core.structure import builder, flatten
from nimble_core.timeline import Lane, Span, Timeline

__all__ = ["CudaDevice", "CudaExecutable"]

_CAPTURE_LOCK = threading.RLock()
_STREAMS: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


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

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceError("torch sees no CUDA GPU", fix="run on the host: move model and inputs to the CPU")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.name = torch.cuda.get_device_name(self.device)

    def stream_cap(self, asked: int | None) -> int | None:
        """As asked: streams are our own, and captured edges are what counts."""
        return asked

    def clock_ns(self) -> float:
        """Host clock, nanoseconds."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait for everything on this GPU."""
        torch.cuda.synchronize(self.device)

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run once as it is: loads kernels, creates library handles, lets cuDNN choose if it is asked to."""
        with random_state_kept(self.device), _errors_explained():
            run_preserved(model, args, kwargs)
            self.synchronize()

    def record(
        self, model: Callable[..., Any], signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Recording:
        """Record under a throwaway capture."""
        with self._capturing(torch.cuda.CUDAGraph(keep_graph=True), 1) as (_, probe):
            return record(model, signature, args=args, kwargs=kwargs, counter=_Counter(probe, self.device))

    def capture(self, recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> CudaExecutable:
        """Capture a multi-stream graph with the schedule's waits, and instantiate it."""
        buffers = [_like(tensor) for tensor in inputs]
        issuer = Issuer(recording, buffers)
        releases = release_plan(recording.program, schedule).before
        producers = {producer for producer, _ in schedule.syncs}
        waits: dict[int, list[int]] = {}
        for producer, consumer in schedule.syncs:
            waits.setdefault(consumer, []).append(producer)
        events: dict[int, torch.cuda.Event] = {}
        bounds: list[tuple[int, int]] = [(0, 0)] * len(recording.program.calls)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        lanes = _Lanes(self.device, schedule)
        before = torch.cuda.memory_reserved(self.device)
        with self._capturing(graph, max(schedule.streams, 1)) as (streams, probe), issuing("cuda"):
            nodes = probe.nodes()
            for position, call in enumerate(schedule.order):
                stream = lanes.enter(call, streams)
                for producer in waits.get(call, ()):
                    stream.wait_event(events[producer])
                for storage in releases[position]:
                    issuer.release(storage)
                try:
                    issuer.issue(call)
                except (RuntimeError, TypeError, ValueError) as error:
                    if isinstance(error, (NimbleError, torch.OutOfMemoryError)):
                        raise
                    raise CaptureError(
                        f"a call could not be re-issued: {str(error).splitlines()[0]}",
                        where=str(recording.program.calls[call]),
                        fix="report this model; until then, leave that part out of the prepared module",
                    ) from error
                first, nodes = nodes, probe.nodes()
                bounds[call] = (first, nodes)
                if call in producers:
                    event = torch.cuda.Event()
                    event.record(stream)
                    events[call] = event
            lanes.leave(streams)
            outputs = issuer.outputs()
        raw, held = self._instantiated(graph, before)
        owner: list[int | None] = [None] * len(raw.nodes)
        for call, (first, last) in enumerate(bounds):
            owner[first:last] = [call] * (last - first)
        return CudaExecutable(
            self.device, graph, schedule, buffers, outputs, raw, tuple(owner), recording.written_inputs, held
        )

    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> CudaExecutable:
        """Plain one-stream capture of the module, every launch included, seen or not."""
        buffers = [_like(tensor) for tensor in signature.tensors]
        args, kwargs = builder(signature.structure)(buffers)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = torch.cuda.memory_reserved(self.device)
        with self._capturing(graph, 1), torch.no_grad():
            result = model(*args, **kwargs)
        with _errors_explained():
            graph.instantiate()
        outputs, _ = flatten(result, what="output")
        raw = read_graph(graph.raw_cuda_graph())
        held = max(torch.cuda.memory_stats(self.device)["reserved_bytes.all.current"] - before, 0)
        calls = len(recording.program.calls)
        schedule = Schedule("single", (0,) * calls, tuple(range(calls)), ())
        owner: tuple[int | None, ...] = (None,) * len(raw.nodes)
        return CudaExecutable(self.device, graph, schedule, buffers, outputs, raw, owner, (), held)

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Times of every replayed node, by call, through CUPTI; without it, no times and a note why."""
        if not isinstance(executable, CudaExecutable):
            raise DeviceError(f"a {type(executable).__name__} does not run on a GPU")
        wall = _event_times_ns(executable, max(replays, 5))

        def replay() -> None:
            for _ in range(replays):
                executable.replay()

        seen = cupti.collect(replay, self.synchronize)
        return _observation(executable, seen, replays, median(wall))

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

    def _instantiated(self, graph: torch.cuda.CUDAGraph, reserved_before: int) -> tuple[RawGraph, int]:
        """Make a captured graph ready to launch; its nodes and edges, and the bytes it took."""
        with _errors_explained():
            graph.instantiate()
        held = torch.cuda.memory_reserved(self.device) - reserved_before
        return read_graph(graph.raw_cuda_graph()), max(held, 0)

    @contextmanager
    def _capturing(
        self, graph: torch.cuda.CUDAGraph, count: int
    ) -> Iterator[tuple[list[torch.cuda.Stream], CaptureProbe]]:
        """Capture on ``count`` streams, forked from the first and joined into it, whatever happens inside."""
        with (
            _CAPTURE_LOCK,
            collector_paused(),
            torch.cuda.device(self.device),
            random_state_kept(self.device),
            _errors_explained(),
        ):
            streams = _streams(self.device, count)
            caller = torch.cuda.current_stream(self.device)
            self.synchronize()
            # A workspace left on these streams by an earlier engine is not ours to bake into this graph.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.set_stream(streams[0])
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    fork = torch.cuda.Event()
                    fork.record(streams[0])
                    for stream in streams[1:]:
                        stream.wait_event(fork)
                    yield streams, CaptureProbe(streams[0].cuda_stream)
                    _join(streams)
                    _end(graph)
                except BaseException:
                    with suppress(Exception):
                        _join(streams)
                    with suppress(Exception):
                        _end(graph)
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
        owner: tuple[int | None, ...],
        written_inputs: tuple[int, ...],
        nbytes: int,
    ) -> None:
        self.device = device
        self.schedule = schedule
        self.raw = raw
        self.owner = owner
        self.nbytes = nbytes
        self.counts = _emitted(schedule, raw, owner)
        self.graph: torch.cuda.CUDAGraph | None = graph
        self.buffers = buffers
        self.outputs = outputs
        self._written = written_inputs
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._stream_id = 0

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Copy ``inputs`` in, replay on the caller's stream, return copies of the outputs (or the buffers)."""
        graph = self.graph
        if graph is None:
            raise _closed()
        grad = torch.is_grad_enabled()
        with self._lock:
            if grad:
                torch._C._set_grad_enabled(False)
            try:
                self._follow_last_run()
                buffers = self.buffers
                if len(buffers) == 1:
                    buffers[0].copy_(inputs[0], non_blocking=True)
                else:
                    torch._foreach_copy_(buffers, list(inputs), non_blocking=True)
                graph.replay()
                for position in self._written:
                    inputs[position].copy_(buffers[position])
                return list(self.outputs) if static else [output.clone() for output in self.outputs]
            finally:
                if grad:
                    torch._C._set_grad_enabled(True)

    def replay(self) -> None:
        """Replay on the caller's stream."""
        if self.graph is None:
            raise _closed()
        with self._lock:
            self._follow_last_run()
            self.graph.replay()

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
            if self.graph is not None:
                torch.cuda.synchronize(self.device)
                self.graph.reset()
                self.graph, self.buffers, self.outputs = None, [], []


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

    def leave(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Bring every lane back to its own stream, and the first one to be current."""
        for lane, stream in self._current.items():
            if stream is not streams[lane]:
                streams[lane].wait_stream(stream)
        torch.cuda.set_stream(streams[0])


class _Counter:
    """Nodes of the throwaway capture, and a way out of it for host constants."""

    def __init__(self, probe: CaptureProbe, device: torch.device) -> None:
        self.nodes = probe.nodes
        self._device = device

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


def _emitted(schedule: Schedule, raw: RawGraph, owner: Sequence[int | None]) -> SyncCounts:
    """The schedule's counts with the cross-stream edges of the captured graph."""
    crossing = 0
    for tail, head in raw.edges:
        producer, consumer = owner[tail], owner[head]
        if producer is not None and consumer is not None:
            crossing += schedule.stream[producer] != schedule.stream[consumer]
    return replace(schedule.counts, emitted=crossing)


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
    executable: CudaExecutable, seen: Sequence[cupti.Activity], replays: int, wall_ns: float
) -> Observation:
    schedule, calls = executable.schedule, len(executable.schedule.stream)
    timed = [i for i, kind in enumerate(executable.raw.kinds) if kind in ("kernel", "memcpy", "memset")]
    place = {cupti.node_id(executable.raw.nodes[i]): i for i in timed} if seen else {}
    by_node: dict[int, list[cupti.Activity]] = {}
    for activity in seen:
        if activity.node in place:
            by_node.setdefault(place[activity.node], []).append(activity)
    complete = {node: runs for node, runs in by_node.items() if len(runs) == replays}
    kernels = []
    cost, spread = [0.0] * calls, [0.0] * calls
    for node in sorted(complete):
        runs = complete[node]
        durations = [float(run.end_ns - run.start_ns) for run in runs]
        middle, call = median(durations), executable.owner[node]
        if call is not None:
            cost[call] += middle
            spread[call] += quantile(durations, 0.75) - quantile(durations, 0.25)
        first = runs[0]
        kernels.append(
            Kernel(
                call,
                short_kernel_name(first.name),
                first.grid,
                first.block,
                first.registers,
                first.shared_bytes,
                first.node,
                middle,
            )
        )
    note = "" if cupti.available() else "cupti-python is not installed: replayed kernels have no times"
    costs = Costs(
        ns=tuple(cost),
        source=f"CUPTI, kernels of {replays} replays of policy {schedule.policy}" if complete else "unknown: " + note,
        spread_ns=tuple(spread),
        kernels=tuple(kernels),
        observed=replays,
        expected=len(timed),
        seen=len(complete),
    )
    reliable = costs.reliable and bool(complete)
    spans, profiled = _median_replay(executable, complete, replays)
    timeline = Timeline(
        run=schedule.policy,
        source="measured",
        clock="CUPTI activity, GPU clock",
        lanes=tuple(Lane(f"stream {index}", "stream") for index in range(max(schedule.streams, 1))),
        spans=spans,
        profiled_ns=profiled,
        unprofiled_ns=wall_ns,
        reliable=reliable,
        note=note or ("" if reliable else f"{len(complete)} of {len(timed)} nodes seen in every replay"),
    )
    return Observation(timeline, costs)


def _median_replay(
    executable: CudaExecutable, complete: Mapping[int, Sequence[cupti.Activity]], replays: int
) -> tuple[tuple[Span, ...], float]:
    if not complete:
        return (), 0.0
    starts = [min(runs[i].start_ns for runs in complete.values()) for i in range(replays)]
    ends = [max(runs[i].end_ns for runs in complete.values()) for i in range(replays)]
    order = sorted(range(replays), key=lambda i: ends[i] - starts[i])
    chosen = order[len(order) // 2]
    spans = []
    for node, runs in complete.items():
        call, run = executable.owner[node], runs[chosen]
        lane = executable.schedule.stream[call] if call is not None else 0
        start, end = run.start_ns - starts[chosen], run.end_ns - starts[chosen]
        spans.append(Span(lane, float(start), float(end), call, short_kernel_name(run.name)))
    spans.sort(key=lambda span: (span.start_ns, span.lane))
    return tuple(spans), float(ends[chosen] - starts[chosen])
