"""CUPTI is left to whoever has it, and taken out again after a collection."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nimble_viz
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling import cupti, kineto, replay_hook
from nimble_core.profiling.cupti import Activity, attached_tool, collect, unavailable
from nimble_core.runtime.cuda.device import CudaExecutable
from nimble_core.runtime.cuda.observing import observed
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.utils.errors import DeviceError, NimbleWarning
from nimble_core.utils.locks import capturing, launching
from nimble_viz.collect.iterations import profile_eager
from nimble_viz.traces import profiler
from tests.support.fake_cupti import (
    CONCURRENT_KERNEL,
    GRAPH,
    MEMCPY,
    CopyRecord,
    KernelRecord,
    Profiler,
    Untouchable,
    installed,
    never,
)

TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "NV_NSIGHT_INJECTION_PORT_BASE": "Nsight Compute",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
    "CUDA_INJECTION64_PATH": "another tool",
}


@pytest.fixture(autouse=True)
def nobody_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOOLS:
        monkeypatch.delenv(name, raising=False)


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
    assert (seen.timeline.reliable, len(seen.timeline.spans)) == (True, 3)
    assert [(kernel.call, kernel.name, kernel.node) for kernel in seen.costs.kernels] == [
        (0, "memcpy", 0),
        (1, "dropout", 1),
        (2, "gemm", 3),
    ]


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

    monkeypatch.setattr(profiler, "calibrate", interrupted)
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
