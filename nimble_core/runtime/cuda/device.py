"""The CUDA device: recordings and schedules become CUDA graphs.

A recording runs under a throwaway capture: no kernel executes. A schedule is captured for good by re-issuing the
Program, each call on its stream, with exactly the schedule's waits between streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Observation
from nimble_core.profiling.machine import interruptions
from nimble_core.profiling.nvtx import call_ranges, capture_range, replays_marked
from nimble_core.runtime.cuda.allocation_trace import CaptureCounter, allocations_traced
from nimble_core.runtime.cuda.capturing import Lanes, capture_on, errors_explained, fork, join, retry_with_room
from nimble_core.runtime.cuda.executable import CudaExecutable
from nimble_core.runtime.cuda.graph_nodes import CaptureProbe, linked, links_change, read_graph, zeroed_at_once
from nimble_core.runtime.cuda.input_copies import InputCopies, copied_by_nodes
from nimble_core.runtime.cuda.kernel_forms import forms_timed
from nimble_core.runtime.cuda.memory import CudaArena, places_memory
from nimble_core.runtime.cuda.observing import observe_replays
from nimble_core.runtime.device import Executable, PlacementError, Timed
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import Layout, lay_out
from nimble_core.scheduling.simulator import H200
from nimble_core.scheduling.verify_capture import RawGraph, launched_ahead
from nimble_core.tracing.grad_accumulators import kept_graphs_apart
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, Rewritten, issuing
from nimble_core.tracing.rng_state import TORCH, random_state_kept
from nimble_core.tracing.side_effects import preserved, rehearse
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.step_wrapper import Around
from nimble_core.tracing.strides import widened
from nimble_core.utils.errors import CaptureError, DeviceError, NimbleError
from nimble_core.utils.locks import capturing, launching

__all__ = ["CudaDevice", "CudaExecutable"]

_TIMED_CALLS = 10


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
        self._unplaced: set[str] = set()
        """Operators whose calls were seen to allocate in another way than planned."""

    def stream_cap(self, asked: int | None) -> int | None:
        """Return ``asked``: streams are our own, and captured edges are what counts."""
        return asked

    def clock_ns(self) -> float:
        """Read the host clock, ns."""
        return time.perf_counter_ns()

    def interruptions(self) -> int:
        """Count how often another program took a core from this process since it started."""
        return interruptions()

    def synchronize(self) -> None:
        """Wait for everything on this GPU; not while another thread captures, which CUDA does not allow."""
        with capturing:
            torch.cuda.synchronize(self.device)

    def warm_up(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run as it is: this loads kernels, creates library handles, lets cuDNN choose if it is asked to."""
        with capturing, errors_explained(), forms_timed(self.device, self._time_ns):
            rehearse(model, args, kwargs)
            self.synchronize()

    @retry_with_room
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
            capture_on(self.device, torch.cuda.CUDAGraph(keep_graph=True), 1) as (streams, probe),
            allocations_traced(streams[0]) if traced else nullcontext() as trace,
        ):
            counter = CaptureCounter(probe, self.device, trace)
            return record(model, signature, args=args, kwargs=kwargs, counter=counter, rewritten=rewritten)

    def lay_out(self, recording: Recording, schedule: Schedule, *, stagger: bool = True) -> Layout | None:
        """Lay out all that calls allocate, but for operators that were seen to allocate in another way."""
        program = recording.program
        if not places_memory() or len(recording.asks) < len(program.calls):
            return None
        layout = lay_out(program, schedule, recording.asks, skip=frozenset(self._unplaced), stagger=stagger)
        return replace(layout, beside_nbytes=sum(ref.nbytes for ref in program.inputs))

    @retry_with_room
    def capture(
        self,
        recording: Recording,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        layout: Layout | None = None,
        memory: MemoryPlan | None = None,
    ) -> CudaExecutable:
        """Capture a multi-stream graph with the schedule's waits, and instantiate it."""
        with errors_explained():
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
                    capture_on(self.device, graph, max(schedule.streams, 1)) as (streams, probe),
                    issuing("cuda"),
                ):
                    bounds = _issue_schedule(
                        self.device, recording, schedule, issuer, arena, streams, probe, self._unplaced
                    )
                    outputs = issuer.outputs()
                outputs = arena.settled(outputs)
                issuer.tensors.clear()
                arena.capture_ended()
                raw = _read_and_link(self.device, graph, bounds, recording, arena.untouched)
                copies = _copied(self.device, graph, raw, buffers, inputs)
                with errors_explained():
                    graph.instantiate()
                held = max(torch.cuda.memory_reserved(self.device) - before, 0)
        except BaseException:
            issuer.tensors.clear()
            arena.close()
            raise
        shapes = [tensor.shape for tensor in inputs]
        executable = CudaExecutable(
            self.device, graph, schedule, recording, buffers, shapes, outputs, raw, held, arena, copies
        )
        return replays_marked(executable, recording.program, schedule)

    @retry_with_room
    def capture_whole(self, model: Callable[..., Any], recording: Recording, signature: Signature) -> CudaExecutable:
        """Capture the module on one stream, every launch included, seen or not."""
        with errors_explained():
            buffers = [_like(tensor, tensor.shape) for tensor in signature.tensors]
        args, kwargs = builder(signature.structure)(buffers)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = torch.cuda.memory_reserved(self.device)
        kept = preserved(model, live=False, draws=())
        with kept, kept_graphs_apart(_leaves(model)), capture_on(self.device, graph, 1), torch.no_grad():
            result = model(*args, **kwargs)
        with errors_explained():
            graph.instantiate()
        outputs, _ = flatten(result, what="output")
        raw = read_graph(graph.raw_cuda_graph())
        held = max(torch.cuda.memory_reserved(self.device) - before, 0)
        calls = len(recording.program.calls)
        schedule = Schedule("single", (0,) * calls, tuple(range(calls)), ())
        shapes = [buffer.shape for buffer in buffers]
        executable = CudaExecutable(self.device, graph, schedule, recording, buffers, shapes, outputs, raw, held)
        return replays_marked(executable, recording.program, schedule)

    def observe(self, executable: Executable, recording: Recording, replays: int) -> Observation:
        """Time every replayed node, by call; no times and a note why where nothing can be seen.

        Through CUPTI by graph node id; without ``cupti-python`` kernels have no times.
        """
        if not isinstance(executable, CudaExecutable):
            raise DeviceError(f"a {type(executable).__name__} does not run on a GPU")
        return observe_replays(executable, replays, self.synchronize)

    def call_times_ns(self, calls: Sequence[Timed]) -> list[float | None]:
        """Time each call as one of several in a replayed graph: the fastest of a few replays."""
        with torch.no_grad(), self.libraries_tuned(), random_state_kept(self.device, draws=(TORCH,)):
            return [self._time_ns(*call) if isinstance(call, tuple) else self._time_ns(call) for call in calls]

    def _time_ns(self, *calls: Callable[[], object]) -> float | None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with capturing:
                for call in calls:
                    call()  # libraries choose their routines
                self.synchronize()
            with capture_on(self.device, graph, len(calls)) as (streams, _):
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
        """Have cuDNN time its routines inside, unless it is told to be deterministic."""
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark
        cudnn.benchmark = before or not cudnn.deterministic
        try:
            yield
        finally:
            cudnn.benchmark = before

    def memory_peak(self, run: Callable[[], object]) -> int:
        """Measure the peak of torch's allocator during ``run`` above what was allocated before."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = run()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return max(peak, 0)


def _leaves(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the parameters whose gradients a run of ``model`` makes, where it runs a backward as well."""
    return dict(model.named_parameters()) if isinstance(model, Around) else {}


def _like(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if tensor.shape != torch.Size(sizes):
        return widened(tensor.detach(), sizes)
    made = torch.empty_like(tensor, requires_grad=False)
    return made.copy_(tensor.detach())


def _copied(
    device: torch.device,
    graph: torch.cuda.CUDAGraph,
    raw: RawGraph,
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> InputCopies | None:
    """Have nodes of the graph copy inputs into buffers of the same shapes; None where calls copy them."""
    if any(buffer.shape != tensor.shape for buffer, tensor in zip(buffers, inputs, strict=True)):
        return None
    with torch.cuda.device(device):
        return copied_by_nodes(graph.raw_cuda_graph(), raw, buffers)


def _issue_schedule(
    device: torch.device,
    recording: Recording,
    schedule: Schedule,
    issuer: Issuer,
    arena: CudaArena,
    streams: Sequence[torch.cuda.Stream],
    probe: CaptureProbe,
    unplaced: set[str],
) -> list[tuple[int, int]]:
    """Issue each call on its stream behind its waits; return ``(first node, next after it)`` by call.

    An operator whose results are not where they were planned is added to ``unplaced``, and PlacementError raised.
    """
    range_of = call_ranges(recording.program, schedule)
    producers = {producer for producer, _ in schedule.syncs}
    waits: dict[int, list[int]] = {}
    for producer, consumer in schedule.syncs:
        waits.setdefault(consumer, []).append(producer)
    events: dict[int, torch.cuda.Event] = {}
    bounds: list[tuple[int, int]] = [(0, 0)] * len(recording.program.calls)
    lanes = Lanes(device, schedule)
    nodes = probe.nodes()
    with lanes.joined(streams):
        for position, call in enumerate(schedule.order):
            stream = lanes.enter(call, streams)
            for producer in waits.get(call, ()):
                stream.wait_event(events[producer])
            for storage in arena.dead_before(position):
                issuer.release(storage)
            with _refusal_explained(recording, call), range_of(call), arena.placing(call):
                issuer.issue(call)
            if not arena.placed(call, issuer):
                # At once: what comes next may be meant for the memory in which these results are now.
                unplaced.add(recording.program.calls[call].operator)
                raise PlacementError(f"not placed as planned: {recording.program.calls[call]}")
            first, nodes = nodes, probe.nodes()
            bounds[call] = (first, nodes)
            if call in producers:
                event = torch.cuda.Event()
                event.record(stream)
                events[call] = event
    return bounds


@contextmanager
def _refusal_explained(recording: Recording, call: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, (NimbleError, torch.OutOfMemoryError)):
            raise
        raise CaptureError(
            f"a call could not be re-issued: {str(error).splitlines()[0]}",
            where=str(recording.program.calls[call]),
            fix="report this model; until then, leave that part out of the prepared module",
        ) from error


def _read_and_link(
    device: torch.device,
    graph: torch.cuda.CUDAGraph,
    bounds: Sequence[tuple[int, int]],
    recording: Recording,
    untouched: Sequence[Mapping[int, Sequence[range]]],
) -> RawGraph:
    """Read a captured graph, and have kernels that may begin early launched ahead in its next instance.

    ``bounds`` are the first node of each call and the first after it; ``untouched`` is the arena's.
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
        with torch.cuda.device(device):
            raw = zeroed_at_once(handle, raw, untouched)
        wanted = launched_ahead(raw, waiting, library)
        raw = linked(handle, raw, sorted(set(raw.ahead) & set(wanted)))
        with suppress(DeviceError):  # such edges are a gain, and nothing is wrong without
            raw = linked(handle, raw, wanted)
    return raw
