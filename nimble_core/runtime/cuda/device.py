"""The CUDA device: recordings and schedules become CUDA graphs.

A recording runs under a throwaway capture: no kernel executes. A schedule is captured for good by re-issuing the
Program, each call on its stream, with exactly the schedule's waits between streams.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch

from nimble_core.ir.observation import Observation
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.profiling import cupti, kineto
from nimble_core.profiling.kernel_matching import TIMED, Launch, observation, tell_by_id, tell_by_order
from nimble_core.profiling.machine import interruptions
from nimble_core.profiling.nvtx import call_ranges, capture_range, replays_marked
from nimble_core.runtime.cuda.allocation_trace import CaptureCounter, allocations_traced
from nimble_core.runtime.cuda.executable import CudaExecutable, free_ended
from nimble_core.runtime.cuda.graph_nodes import (
    CaptureProbe,
    linked,
    links_change,
    read_graph,
    read_launches,
    zeroed_at_once,
)
from nimble_core.runtime.cuda.memory import CudaArena, places_memory
from nimble_core.runtime.cuda.streams import Lanes, fork, join, own_streams
from nimble_core.runtime.device import Executable, PlacementError, Timed
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import Layout, lay_out
from nimble_core.scheduling.simulator import H200
from nimble_core.scheduling.verify_capture import RawGraph, launched_ahead
from nimble_core.torch_compat.cuda import clear_cublas_workspaces, end_allocate_to_pool
from nimble_core.tracing.grad_accumulators import kept_graphs_apart
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing, rewinding
from nimble_core.tracing.rewritten import Rewritten
from nimble_core.tracing.rng_state import TORCH, random_state_kept
from nimble_core.tracing.side_effects import preserved, rehearse
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.step_wrapper import Around
from nimble_core.tracing.strides import widened
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.locks import capturing, launching

__all__ = ["CudaDevice", "CudaExecutable", "multiprocessors"]

_TIMED_CALLS = 10
_CUDNN_TRIALS = 4
"""Routines that cuDNN times for a convolution that it meets: each takes milliseconds, and it names the likely first."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _with_room(capture: Callable[_P, _T]) -> Callable[_P, _T]:
    """Capture once more if memory ran out, with what torch and Python still hold of earlier work given back.

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

    def interruptions(self) -> int:
        """How often another program took a core from this process since it started."""
        return interruptions()

    def synchronize(self) -> None:
        """Wait for everything on this GPU; not while another thread captures, which CUDA does not allow."""
        with capturing:
            torch.cuda.synchronize(self.device)

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run as it is: loads kernels, creates library handles, lets cuDNN choose if it is asked to."""
        with capturing, _errors_explained():
            rehearse(model, args, kwargs)
            self.synchronize()

    @_with_room
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
            allocations_traced(streams[0]) if traced else nullcontext() as trace,
        ):
            counter = CaptureCounter(probe, self.device, trace)
            return record(model, signature, args=args, kwargs=kwargs, counter=counter, rewritten=rewritten)

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout | None:
        """Everything that calls allocate, but for calls that were seen to allocate in another way."""
        program = recording.program
        if not places_memory() or len(recording.asks) < len(program.calls):
            return None
        layout = lay_out(program, schedule, recording.asks, skip=self._unplaced, stagger=stagger)
        return replace(layout, beside_nbytes=sum(ref.nbytes for ref in program.inputs))

    @_with_room
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
            arena = CudaArena(self.device, recording.program, schedule, layout, memory)
            buffers = [
                arena.input(ref.storage, tensor, ref.sizes) if ref.storage in arena.inputs else _like(tensor, ref.sizes)
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
                raw, held = self._instantiated(graph, bounds, recording, arena.untouched, before)
        except BaseException:
            issuer.tensors.clear()
            arena.close()
            raise
        kept = tuple(recording.given.values())
        shapes, rewind = [tensor.shape for tensor in inputs], rewinding(recording, buffers)
        written = recording.written_inputs
        executable = CudaExecutable(
            self.device, graph, schedule, buffers, shapes, outputs, raw, written, rewind, held, arena, kept
        )
        return replays_marked(executable, recording.program, schedule)

    def _issued(
        self,
        recording: Recording,
        schedule: Schedule,
        issuer: Issuer,
        arena: CudaArena,
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
        lanes = Lanes(self.device, schedule)
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

    @_with_room
    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> CudaExecutable:
        """Plain one-stream capture of the module, every launch included, seen or not."""
        with _errors_explained():
            buffers = [_like(tensor, tensor.shape) for tensor in signature.tensors]
        args, kwargs = builder(signature.structure)(buffers)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = torch.cuda.memory_reserved(self.device)
        kept = preserved(model, live=False, draws=())
        with kept, kept_graphs_apart(_leaves(model)), self._capturing(graph, 1), torch.no_grad():
            result = model(*args, **kwargs)
        with _errors_explained():
            graph.instantiate()
        outputs, _ = flatten(result, what="output")
        raw = read_graph(graph.raw_cuda_graph())
        held = max(torch.cuda.memory_stats(self.device)["reserved_bytes.all.current"] - before, 0)
        calls = len(recording.program.calls)
        schedule = Schedule("single", (0,) * calls, tuple(range(calls)), ())
        shapes, rewind = [buffer.shape for buffer in buffers], rewinding(recording, buffers)
        written = recording.written_inputs
        executable = CudaExecutable(
            self.device, graph, schedule, buffers, shapes, outputs, raw, written, rewind, held, None, ()
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
        with torch.no_grad(), self.libraries_tuned(), random_state_kept(self.device, draws=(TORCH,)):
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
                    fork(streams)
                    for stream, call in zip(streams, calls, strict=True):
                        torch.cuda.set_stream(stream)
                        call()
                    join(streams)
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
        untouched: Sequence[Mapping[int, Sequence[range]]],
        reserved_before: int,
    ) -> tuple[RawGraph, int]:
        """Make a captured graph ready to launch; its nodes and edges, and the bytes it took.

        Args:
            graph: as captured.
            bounds: of each call, its first node and the first after it.
            recording: of the calls.
            untouched: addresses that nothing touches between the beginning of a replay and a call, by call, of what
                lies together.
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
                raw = zeroed_at_once(handle, raw, untouched)
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
            random_state_kept(self.device, draws=(TORCH,)),
            _errors_explained(),
        ):
            free_ended()
            streams = own_streams(self.device, count)
            caller = torch.cuda.current_stream(self.device)
            self.synchronize()
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
                        end_allocate_to_pool(self.device.index, pool)
                    _settle_generator(caller)
                    raise
            finally:
                torch.cuda.set_stream(caller)
                clear_cublas_workspaces()


def _leaves(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Parameters whose gradients a run of ``model`` makes: of what runs another model's backward as well."""
    return dict(model.named_parameters()) if isinstance(model, Around) else {}


def _like(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if tensor.shape != torch.Size(sizes):
        return widened(tensor.detach(), sizes)
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


@contextmanager
def _errors_explained() -> Iterator[None]:
    try:
        yield
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
