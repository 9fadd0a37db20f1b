"""CUPTI is left to whoever has it, and said to be; torch's own profiler sees as much beside us as without us."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nimble_viz
from nimble_core import Nimble, Options
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling import cupti, kineto, replay_hook
from nimble_core.profiling.cupti import Activity, attached_tool, collect, unavailable
from nimble_core.profiling.kernel_matching import TIMED
from nimble_core.runtime.cuda.device import CudaDevice, CudaExecutable
from nimble_core.runtime.cuda.observing import observed
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.utils.errors import DeviceError, NimbleWarning
from nimble_core.utils.locks import capturing, launching
from nimble_viz.collect import profile
from nimble_viz.traces.profiler import profile_eager

ROOT = Path(__file__).parents[3]
TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "NV_NSIGHT_INJECTION_PORT_BASE": "Nsight Compute",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
    "CUDA_INJECTION64_PATH": "another tool",
}
PLAIN = Options(policy="nimble", tune="off", budget_s=0.1, fuse="none")


class Untouchable:
    """A CUPTI that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"cupti.{name} was used")


@pytest.fixture(autouse=True)
def nobody_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOOLS:
        monkeypatch.delenv(name, raising=False)


def never() -> None:
    raise AssertionError("nothing should run")


@pytest.mark.parametrize("name", TOOLS)
def test_an_attached_tool_keeps_cupti_to_itself(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cupti, "_cupti", Untouchable)
    assert (attached_tool(), unavailable(), cupti.available()) == ("", "", True)
    monkeypatch.setenv(name, "")
    assert attached_tool() == ""
    monkeypatch.setenv(name, "1")
    assert attached_tool() == f"{TOOLS[name]} ({name} is set)"
    assert unavailable() == f"{TOOLS[name]} ({name} is set) is attached, and CUPTI serves one tool at a time"
    assert not cupti.available()
    assert collect(never, never) == ([], {})


def test_the_tool_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in reversed(TOOLS):
        monkeypatch.setenv(name, "1")
        assert attached_tool() == f"{TOOLS[name]} ({name} is set)"


def test_a_running_profiler_keeps_cupti_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_cupti", Untouchable)
    with torch.profiler.profile():
        assert unavailable() == "torch.profiler is running, and CUPTI serves one tool at a time"
        assert collect(never, never) == ([], {})
    assert unavailable() == ""


def test_without_cupti_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_cupti", lambda: None)
    assert unavailable() == "cupti-python is not installed"
    assert collect(never, never) == ([], {})


def test_an_observation_says_why_it_has_no_times() -> None:
    executable = SimpleNamespace(
        schedule=Schedule("nimble", (0, 0), (0, 1), ()),
        raw=SimpleNamespace(kinds=("kernel", "kernel"), nodes=(1, 2), owner=(0, 1)),
    )
    why = "somebody else has it: replayed kernels have no times"
    gpu = Multiprocessors(132, 2048, 65536, 233472)
    seen = observed(executable, [], {}, 3, 1000.0, gpu, why)  # type: ignore[arg-type]  # what it reads of one
    assert (seen.timeline.note, seen.timeline.reliable, seen.timeline.spans) == (why, False, ())
    assert (seen.costs.source, seen.costs.seen, seen.costs.expected) == (f"unknown: {why}", 0, 2)


GRAPH = 7 << 32
"""Number of a graph, in the upper half of the ids of its nodes."""
KERNEL_FIELDS = (
    *("kind", "start", "end", "stream_id", "graph_node_id", "name", "grid_x", "grid_y", "grid_z"),
    *("block_x", "block_y", "block_z", "registers_per_thread", "static_shared_memory", "dynamic_shared_memory"),
    "correlation_id",
)
CONCURRENT_KERNEL, MEMCPY = 10, 1


class KernelRecord:
    """A record as CUPTI hands it over: one row of a structured array, and the name behind the pointer in it."""

    def __init__(self, name: str, start: int, node_id: int, launch: int = 0) -> None:
        numpy = pytest.importorskip("numpy")
        row = (CONCURRENT_KERNEL, start, start + 5, 7, node_id, 4096 + start, 8, 1, 1, 64, 1, 1, 32, 16, 4, launch)
        self._data = numpy.array(row, dtype=[(field, "u8") for field in KERNEL_FIELDS])
        self.name = name


class CopyRecord:
    """The same of a copy."""

    def __init__(self, start: int, node_id: int) -> None:
        numpy = pytest.importorskip("numpy")
        fields = ("kind", "bytes", "start", "end", "stream_id", "graph_node_id", "correlation_id")
        self._data = numpy.array(
            (MEMCPY, 64, start, start + 5, 7, node_id, 0), dtype=[(field, "u8") for field in fields]
        )


def test_the_first_node_of_a_graph_is_told_from_work_outside_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_kinds", lambda: {CONCURRENT_KERNEL: "kernel", MEMCPY: "memcpy"})
    monkeypatch.setattr(cupti, "_names", {})
    monkeypatch.setattr(cupti, "_fields", {})
    monkeypatch.setattr(cupti, "_seen", [])
    replay_hook = [
        [
            KernelRecord("fill", at, 0),  # torch sets the random state before each replay
            CopyRecord(at + 10, GRAPH),
            KernelRecord("dropout", at + 20, GRAPH + 1),
            KernelRecord("gemm", at + 30, GRAPH + 3),
        ]
        for at in (100, 200)
    ]
    cupti._completed([*replay_hook[0], *replay_hook[1]])
    assert [one.node for one in cupti._seen] == [-1, 0, 1, 3] * 2
    assert [one.kind for one in cupti._seen] == ["kernel", "memcpy", "kernel", "kernel"] * 2
    assert cupti._seen[2] == Activity("kernel", "dropout", 120, 125, 7, 1, (8, 1, 1), (64, 1, 1), 32, 20)
    executable = SimpleNamespace(
        schedule=Schedule("nimble", (0, 0, 0), (0, 1, 2), ()),
        raw=RawGraph((1000, 1001, 1002), ("memcpy", "kernel", "kernel"), ((0, 1), (1, 2)), (0, 1, 2)),
    )
    gpu = Multiprocessors(132, 2048, 65536, 233472)
    seen = observed(executable, cupti._seen, {0: 0, 1: 1, 3: 2}, 2, 1000.0, gpu, "")  # type: ignore[arg-type]
    assert seen.timeline.check == SelfCheck(3, 3, "graph node id")
    assert (seen.timeline.reliable, seen.timeline.nodes) == (True, (0, 1, 3))
    assert [(kernel.call, kernel.name, kernel.node) for kernel in seen.costs.kernels] == [
        (0, "memcpy", 0),
        (1, "dropout", 1),
        (2, "gemm", 3),
    ]


def test_a_graph_of_one_node_is_told_by_its_id() -> None:
    executable = SimpleNamespace(
        schedule=Schedule("single", (0,), (0,), ()), raw=RawGraph((1000,), ("kernel",), (), (0,))
    )
    gpu = Multiprocessors(132, 2048, 65536, 233472)
    ran = [Activity("kernel", "neg", 0, 5, 7, 0, (8, 1, 1), (64, 1, 1))]
    seen = observed(executable, ran, {0: 0}, 1, 1000.0, gpu, "")  # type: ignore[arg-type]
    assert seen.timeline.check == SelfCheck(1, 1, "graph node id")
    assert seen.timeline.nodes == (0,)


@dataclass
class Graph:
    """A captured graph, as far as CUPTI changes it."""

    number: int
    timed: bool = False
    idle: bool = False
    broken: bool = False


class Library:
    """CUPTI and what it does to graphs, as seen on an H200: see ``nimble_core.profiling.cupti``.

    Args:
        fail_at: which of the calls from now on is interrupted, from 0.
    """

    ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=CONCURRENT_KERNEL, MEMCPY=MEMCPY, MEMSET=2)

    def __init__(self) -> None:
        self.graphs = [Graph(number) for number in range(3)]
        self.asked: list[str] = []
        self.attached = False
        self.enabled: set[int] = set()
        self.launches: list[SimpleNamespace] = []
        self.fail_at = -1

    def _ask(self, what: str, attach: bool = True) -> None:
        if self.fail_at == 0:
            self.fail_at = -1
            raise KeyboardInterrupt
        self.fail_at -= self.fail_at > 0
        self.asked.append(what)
        self.attached |= attach

    def activity_register_callbacks(self, requested: object, completed: object) -> None:
        self._ask("register")

    def activity_enable(self, kind: int) -> None:
        self._ask("enable")
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self._ask("disable")
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        self._ask("flush")

    def get_timestamp(self) -> int:
        return time.perf_counter_ns()

    def get_graph_node_id(self, node: int) -> int:
        self._ask("id")
        return GRAPH + node - 1000

    def finalize(self) -> None:
        self._ask("finalize", attach=False)
        assert launching._is_owned()  # type: ignore[attr-defined]  # not in what types know of it
        self.attached = False
        self.enabled.clear()
        for graph in self.graphs:
            graph.broken |= graph.idle

    def launch(self, number: int) -> None:
        """A graph is launched, without torch."""
        graph = self.graphs[number]
        assert not graph.broken, "unspecified launch failure"
        if self.enabled:
            graph.timed, graph.idle = True, False
            cpu = SimpleNamespace(name="CPU")
            self.launches.append(SimpleNamespace(name=lambda: "cudaGraphLaunch", device_type=lambda: cpu))
            cupti._completed([KernelRecord("gemm", 30, GRAPH * (number + 1) + 3, len(self.launches))])
        elif self.attached:
            graph.idle = graph.timed

    def replay(self, number: int) -> None:
        """Torch replays a graph."""
        torch.cuda.CUDAGraph(self, number).replay()  # type: ignore[call-arg]  # what stands for it takes these

    def profile(self, number: int) -> None:
        """Somebody's session of torch's profiler."""
        session = Profiler(self)
        session.start()
        self.launch(number)
        session.stop()


@dataclass
class TorchGraph:
    """A ``torch.cuda.CUDAGraph``."""

    library: Library
    number: int

    def replay(self) -> None:
        self.library.launch(self.number)


class Profiler:
    """What is used of a ``torch.profiler.profile``: it says what was launched."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: library.launches))

    def start(self) -> None:
        self._library.attached = True
        self._library.launches.clear()
        self._library.enabled.add(CONCURRENT_KERNEL)

    def stop(self) -> None:
        self._library.enabled.clear()


@contextmanager
def installed() -> Iterator[Library]:
    library = Library()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", NimbleWarning)
        patch.setattr(cupti, "_cupti", lambda: library)
        patch.setattr(cupti, "_kinds", lambda: {CONCURRENT_KERNEL: "kernel", MEMCPY: "memcpy"})
        patch.setattr(cupti, "_ns_per_tick", lambda *_: 1.0)
        patch.setattr(cupti, "launches_are_slow", lambda: library.attached)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "CUDAGraph", TorchGraph)
        for name, new in (("_launches", set()), ("_seen", []), ("_names", {}), ("_fields", {})):
            patch.setattr(cupti, name, new)
        patch.setattr(cupti, "_said", threading.Event())
        yield library
    assert not replay_hook._counting
    for lock in (capturing, launching):
        assert not lock._is_owned()  # type: ignore[attr-defined]


IN = ["register", "enable", "enable"]
ENDS = ["flush", "disable", "disable"]


def test_a_collection_takes_cupti_out_again() -> None:
    with installed() as library:
        taken, places = collect(lambda: library.replay(0), lambda: None, (1003, 1001))
        assert [one.name for one in taken] == ["gemm"]
        assert places == {3: 0, 1: 1}
        assert library.asked == [*IN, "id", "id", *ENDS, "finalize"]
        assert not cupti.present()


def test_what_fails_leaves_no_cupti_behind() -> None:
    with installed() as library:
        with pytest.raises(AssertionError, match="nothing should run"):
            collect(never, lambda: None)
        assert library.asked == [*IN, *ENDS, "finalize"]
        assert not cupti.present()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_what_torch_replays_meanwhile_is_no_reason_to_stay(others: int) -> None:
    with installed() as library:
        collect(lambda: [library.replay(number) for number in range(1 + others)], lambda: None)
        assert not cupti.present()
        assert not hasattr(torch.cuda.CUDAGraph.replay, "__wrapped__")


@pytest.mark.parametrize("why", ["torch's profiler was there", "another graph ran"])
def test_cupti_stays_where_taking_it_out_could_break_graphs(why: str) -> None:
    with installed() as library:
        if why.startswith("torch"):
            library.profile(0)

        def run() -> None:
            library.replay(0)
            if why.startswith("another"):
                library.launch(1)

        with pytest.warns(NimbleWarning, match=r"^CUPTI stays in this process, .* 0\.6 µs a node longer"):
            collect(run, lambda: None)
        assert library.asked[-3:] == ENDS
        assert cupti.present()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collect(lambda: library.replay(0), lambda: None)  # said once
        assert "finalize" not in library.asked


@pytest.mark.parametrize("replayed", [False, True])
def test_a_session_takes_cupti_out_again(replayed: bool) -> None:
    with installed() as library:
        session = kineto.Session(Profiler(library))
        assert library.attached
        if replayed:
            library.replay(0)
        session.stop()
        assert library.asked == ["finalize"]
        assert not cupti.present()


@pytest.mark.parametrize("why", ["it was in before", "a graph was launched", "a tool is attached", "no cupti-python"])
def test_cupti_stays_after_a_session_where_taking_it_out_is_not_safe(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as library:
        library.attached = why == "it was in before"
        if why == "a tool is attached":
            monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        if why == "no cupti-python":
            monkeypatch.setattr(cupti, "_cupti", lambda: None)
        session = kineto.Session(Profiler(library))
        if why == "a graph was launched":
            library.launch(0)
        session.stop()
        assert library.asked == []
        assert cupti.present()


def test_a_profiler_that_does_not_start_leaves_replays_alone() -> None:
    with installed() as library:
        profiler = Profiler(library)
        profiler.start = never  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="nothing should run"):
            kineto.Session(profiler)


GRAPHS = st.integers(0, 2)
LAUNCHES = st.lists(st.tuples(st.sampled_from(("replay", "launch")), GRAPHS), max_size=3)
EVENTS = st.one_of(
    st.tuples(st.sampled_from(("collect", "session", "profile", "between")), LAUNCHES, st.just(-1)),
    st.tuples(st.just("collect"), LAUNCHES, st.integers(0, 12)),
)


@settings(max_examples=500)
@given(st.lists(EVENTS, max_size=12))
def test_no_graph_breaks_whatever_is_measured_profiled_replayed_and_interrupted(
    events: list[tuple[str, list[tuple[str, int]], int]],
) -> None:
    with installed() as library:
        quiet = True
        for what, launches, fail_at in events:

            def run(launches: list[tuple[str, int]] = launches) -> None:
                for how, graph in launches:
                    getattr(library, how)(graph)

            if what == "between":
                run()
                continue
            foreign = any(how == "launch" for how, _ in launches)
            if what == "collect":
                library.fail_at = fail_at
                with suppress(KeyboardInterrupt):
                    collect(run, lambda: None, (1003,))
                quiet = quiet and not foreign and (fail_at < 0 or library.fail_at >= 0)
                library.fail_at = -1
            elif what == "session":
                session = kineto.Session(Profiler(library))
                run()
                session.stop()
                quiet = quiet and not foreign
            else:
                profiler = Profiler(library)
                profiler.start()
                run()
                profiler.stop()
                quiet = False
            if quiet:
                assert not library.attached
                assert not cupti.present()
        for graph in range(3):
            library.launch(graph)


def test_what_is_collected_in_the_midst_of_a_launch_is_freed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds ``capturing`` may be waiting for that launch."""
    freed: list[int] = []

    def executable(number: int) -> CudaExecutable:
        one = CudaExecutable.__new__(CudaExecutable)
        one.device, one._lock, one._arena, one._kept = torch.device("cuda", 0), threading.Lock(), None, ()
        one.buffers, one._rests, one.outputs = [], [], []
        one.graph = SimpleNamespace(reset=lambda: freed.append(number))  # type: ignore[assignment]
        return one

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with capturing, launching:
        thread = threading.Thread(target=executable(0).close)
        thread.start()
        executable(1).close()
        assert freed == []
    thread.join()
    executable(2).close()
    assert sorted(freed) == [0, 1, 2]


def test_an_interrupted_end_of_a_profile_leaves_replays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "calibrate", interrupted)
    with pytest.raises(KeyboardInterrupt), nimble_viz.profile():
        torch.ones(2).neg()
    assert not replay_hook._counting
    assert not cupti.profiler_runs()


def test_under_a_tool_the_gpu_is_not_profiled_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    with pytest.raises(DeviceError, match=r"Nsight Systems .* is attached"):
        profile_eager(never, device="cuda", synchronize=never)
    # The host's own events are nobody else's.
    trace = profile_eager(lambda: torch.ones(2).neg(), device="cpu", synchronize=lambda: None)
    assert [event.name for event in trace.operators] == ["aten::ones", "aten::empty", "aten::fill_", "aten::neg"]


@pytest.mark.gpu
def test_compare_under_a_tool_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda().eval(), torch.ones(8, 64).cuda()
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(cupti, "_cupti", Untouchable)
    report = nimble_viz.compare(model, x, options=PLAIN)
    said = "Nsight Systems (NSYS_PROFILING_SESSION_ID is set) is attached, and CUPTI serves one tool at a time"
    assert report.overhead is None
    assert f"eager could not be profiled: {said}" in report.warnings
    assert any(line.note == f"{said}: replayed kernels have no times" for line in report.timelines)
    assert not any(line.reliable for line in report.timelines)
    with pytest.raises(DeviceError, match="is attached"):
        nimble_viz.profile(model, x)


NEIGHBOUR = """
import json
from collections import Counter
import torch, nimble_viz
from nimble_core import Options
from nimble_viz.traces.profiler import _BOOKKEEPING

layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Tanh())
model, x = torch.nn.Sequential(*layers).cuda().eval(), torch.randn(8, 64, device="cuda")
options = Options(policy="nimble", tune="off", budget_s=0.1, fuse="none")
activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

def profiled(run):
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        made = run()
        torch.cuda.synchronize()
    on_gpu = [one.name for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return made, Counter(name for name in on_gpu if name not in _BOOKKEEPING)

@torch.no_grad()
def five_runs():
    for _ in range(5):
        model(x)

def compared():
    return nimble_viz.compare(model, x, options=options)

def watched(report):
    return [[line.clock, line.reliable, len(line.spans), line.note] for line in report.timelines if line.run != "eager"]

five_runs()
profiled(five_runs)  # the first session of a process may lose events
"""

IN_TURN = """
seen, reports = [profiled(five_runs)[1]], []
for _ in range(2):
    reports.append(compared())
    seen.append(profiled(five_runs)[1])
print(json.dumps({
    "seen": seen, "watched": [watched(one) for one in reports],
    "profiled": [one.overhead is not None and one.overhead.device_busy_ns > 0 for one in reports],
}))
"""

AROUND = """
def around():
    report = compared()
    for _ in range(5):
        torch.atan2(x, x)
    return report

report, seen = profiled(around)
print(json.dumps({
    "atan2": sum(count for name, count in seen.items() if "atan2" in name),
    "warnings": report.warnings, "watched": watched(report), "after": profiled(five_runs)[1],
}))
"""


HANGS = "import faulthandler; faulthandler.dump_traceback_later(200, exit=True)\n"


def alone(code: str) -> dict[str, Any]:
    """What a new interpreter with nothing else in it says; one that hangs says where, and fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HANGS + code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class Dropping(torch.nn.Module):
    """Draws numbers: torch sets the random state, by a kernel of its own, before each replay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(x, 0.5, training=True)
        return torch.nn.functional.dropout(dropped.relu() + x, 0.5, training=True)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_every_node_of_a_model_with_dropout_is_seen_once_in_every_replay(policy: str) -> None:
    if not cupti.available():
        pytest.skip(unavailable())
    x = torch.ones(64, 64, device="cuda")
    plain = Options(policy=policy, tune="off", budget_s=0.1, fuse="none")
    prepared = Nimble(Dropping().cuda().train(), plain).prepare(x)
    try:
        (engine,) = prepared.engines
        executable = engine.executable
        assert isinstance(executable, CudaExecutable)
        nodes = [node for node, kind in zip(executable.raw.nodes, executable.raw.kinds, strict=True) if kind in TIMED]
        taken, found = cupti.collect(lambda: [executable.replay() for _ in range(5)], torch.cuda.synchronize, nodes)
        places = sorted(found)
        assert places[0] == 0
        assert any(one.node < 0 for one in taken)  # else there is nothing here to take for the first node
        assert sorted(one.node for one in taken if one.node >= 0) == sorted(places * 5)
        seen = CudaDevice(x.device).observe(executable, engine.recorded.recording, 5)
        assert seen.timeline.check == SelfCheck(len(nodes), len(nodes), "graph node id")
        assert seen.timeline.reliable
        assert sorted(seen.timeline.nodes) == sorted(kernel.node for kernel in seen.costs.kernels) == places
    finally:
        prepared.close()


ALONE = """
import threading, time, warnings
import torch, nimble_viz
from nimble_core import Nimble, Options
from nimble_core.profiling import cupti
from nimble_core.profiling import kineto
from nimble_core.profiling import replay_hook
from nimble_core.utils.errors import NimbleWarning
from nimble_viz.collect import profile
from nimble_viz.traces.profiler import profile_eager

layers = [layer for _ in range(150) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
model, x = torch.nn.Sequential(*layers).cuda().eval(), torch.randn(8, 64, device="cuda")
options = Options(policy="nimble", tune="off", budget_s=0.1, fuse="none")
nets = [Nimble(model, options).prepare(x) for _ in range(2)]
first, second = (net.engines[0].executable for net in nets)
wanted = nets[0](x).clone()

def right():
    for net in nets:
        torch.testing.assert_close(net(x), wanted)
    torch.cuda.synchronize()

def launch_us():
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        first.replay()
        taken.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return min(taken) / 1e3

def collected():
    return cupti.collect(lambda: [first.replay() for _ in range(3)], torch.cuda.synchronize, first.raw.nodes)

def profiled():
    with torch.no_grad():
        return profile_eager(lambda: model(x), device="cuda", synchronize=torch.cuda.synchronize)
"""

GONE = """
never = launch_us()
after = []
for _ in range(4):
    taken, places = collected()
    assert len(taken) == 3 * len(places) >= 900, (len(taken), len(places))
    after.append(launch_us())
    right()
    assert len(profiled().kernels) >= 300
    after.append(launch_us())
    right()
nimble_viz.profile(model, x)
after.append(launch_us())
report = nimble_viz.compare(layers[0], x, options=options)
assert report.overhead is not None
assert not any("CUPTI" in line for line in report.warnings), report.warnings
after.append(launch_us())
there = cupti.present()
right()
both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
with torch.no_grad(), torch.profiler.profile(activities=both) as theirs:
    model(x)
    torch.cuda.synchronize()
on_gpu = [one for one in theirs.events() if one.device_type == torch.autograd.DeviceType.CUDA]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        taken, places = collected()  # beside what torch's profiler has left
        assert len(taken) == 3 * len(places)
        right()
        profiled()
        right()
said = [str(one.message) for one in said if issubclass(one.category, NimbleWarning)]
report = nimble_viz.compare(layers[0], x, options=options)
assert any(line.startswith("CUPTI was in this process") for line in report.warnings), report.warnings
print(json.dumps({
    "never": never, "after": after, "there": there, "left": launch_us(), "still": cupti.present(), "said": said,
    "theirs": len(on_gpu),
}))
"""

BESIDE = """
stop, runs, failed = threading.Event(), [], []

def serve():
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.testing.assert_close(nets[1](x), wanted)
                runs.append(1)
    except Exception as error:
        failed.append(str(error))

thread = threading.Thread(target=serve)
thread.start()
while not runs:
    time.sleep(0.01)
warnings.simplefilter("ignore")
for _ in range(20):
    collected()
    time.sleep(0.02)
stop.set()
thread.join()
right()
print(json.dumps({"served": len(runs), "failed": failed, "present": cupti.present()}))
"""


@pytest.mark.gpu
def test_launches_are_as_quick_after_measuring_as_before() -> None:
    """A launch of 300 nodes takes the host 5 µs, with CUPTI in 60 and more: nearer the first, as a factor."""
    if not cupti.available():
        pytest.skip(unavailable())
    found = alone("import json\n" + ALONE + GONE)
    # Once it is in, every launch is slow; a busy host slows down some.
    assert statistics.median(found["after"]) < math.sqrt(found["never"] * found["left"]), found
    assert not found["there"]
    assert found["theirs"] >= 300  # somebody's own session sees as much as ever
    assert found["left"] > 3 * found["never"]  # else there is nothing here that could be taken out
    assert found["still"]
    assert [one.startswith("CUPTI stays in this process") for one in found["said"]] == [True]


@pytest.mark.gpu
def test_replays_of_other_threads_survive_measuring() -> None:
    if not cupti.available():
        pytest.skip(unavailable())
    found = alone("import json\n" + ALONE + BESIDE)
    assert found["failed"] == []
    assert found["served"] > 20
    assert not found["present"]


@pytest.mark.gpu
def test_torch_profiler_sees_the_same_before_between_and_after() -> None:
    if not cupti.available():
        pytest.skip(unavailable())
    found = alone(NEIGHBOUR + IN_TURN)
    before, between, after = found["seen"]
    assert sum(before.values()) >= 5 * 4  # a kernel for each layer, or more
    assert before == between == after
    for lines in found["watched"]:
        assert lines  # so that CUPTI was ours in between, and saw every node
        assert all(clock.startswith("CUPTI") and reliable and spans for clock, reliable, spans, _ in lines), lines
    assert found["profiled"] == [True, True]


@pytest.mark.gpu
def test_a_profiler_around_compare_keeps_its_events() -> None:
    found = alone(NEIGHBOUR + AROUND)
    assert found["atan2"] == 5
    assert "eager could not be profiled: another profiler is running in this process" in found["warnings"]
    assert found["watched"]
    assert all("torch.profiler is running" in note for *_, note in found["watched"])
    assert sum(found["after"].values()) >= 5 * 4
