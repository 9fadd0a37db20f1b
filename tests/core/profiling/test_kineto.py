"""Device events of graph launches among those of torch.profiler, and when it is not ours to use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling.cupti import Activity
from nimble_core.profiling.kernel_matching import Launch
from nimble_core.profiling.kineto import collect, graph_activities
from nimble_core.runtime.cuda import observing
from nimble_core.runtime.cuda.observing import observed
from nimble_core.scheduling.verify_capture import RawGraph


def test_what_graph_launches_caused_is_kept() -> None:
    def event(name: str, device: str, number: int, start: int = 0, note: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: SimpleNamespace(name=device),
            correlation_id=lambda: number,
            start_ns=lambda: start,
            duration_ns=lambda: 4,
            device_resource_id=lambda: 7,
            is_user_annotation=lambda: note,
        )

    events = [
        event("cudaGraphLaunch", "CPU", 1),
        event("cudaLaunchKernel", "CPU", 2),
        event("later", "CUDA", 1, 20),
        event("Memset (Device)", "CUDA", 1, 10),
        event("outside", "CUDA", 2, 5),
        event("a range", "CUDA", 1, 1, note=True),
    ]
    found = graph_activities(events)
    assert [(one.kind, one.name, one.start_ns, one.end_ns, one.stream, one.node) for one in found] == [
        ("memset", "memset", 10, 14, 7, -1),
        ("kernel", "later", 20, 24, 7, -1),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_nothing_is_collected() -> None:
    ran = []
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert collect(lambda: ran.append(torch.ones(2).neg()), lambda: None) == []
    assert len(ran) == 1


CHAIN = SimpleNamespace(
    schedule=Schedule("nimble", (0, 0), (0, 1), ()),
    raw=RawGraph((1, 2), ("kernel", "kernel"), ((0, 1),), (0, 1)),
)
RAN = [Activity("kernel", name, start, start + 4, 7, -1) for name, start in (("a", 0), ("b", 5))]
GPU = Multiprocessors(132, 2048, 65536, 233472)


def test_an_observation_without_node_ids_asks_the_graph_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = (Launch("a", (1, 1, 1), (32, 1, 1)), Launch("b", (2, 1, 1), (32, 1, 1)))
    monkeypatch.setattr(observing, "read_launches", lambda raw: launches)
    seen = observed(CHAIN, RAN, {}, 1, 12.0, GPU, "", 11.0, "torch.profiler, GPU clock")  # type: ignore[arg-type]
    line = seen.timeline
    assert [(span.call, span.name, span.start_ns, span.end_ns) for span in line.spans] == [
        (0, "a", 0, 4),
        (1, "b", 5, 9),
    ]
    assert (line.clock, line.profiled_ns, line.unprofiled_ns) == ("torch.profiler, GPU clock", 11.0, 12.0)
    assert line.check == SelfCheck(2, 2, "name and order")
    assert line.reliable
    assert [kernel.grid for kernel in seen.costs.kernels] == [(1, 1, 1), (2, 1, 1)]


@pytest.mark.gpu
def test_replays_of_a_graph_are_told_by_name_and_order_as_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import nimble_viz
    from nimble_core import Options
    from nimble_core.profiling import cupti

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda().eval()
    x = torch.ones(8, 64, device="cuda")
    plain = Options(policy="nimble", tune="off", budget_s=0.1, fuse="none")
    exact = nimble_viz.compare(model, x, options=plain).timeline("single")
    monkeypatch.setattr(cupti, "_cupti", lambda: None)
    told = nimble_viz.compare(model, x, options=plain).timeline("single")
    assert exact is not None
    assert told is not None
    assert exact.check is not None
    assert told.check is not None
    assert exact.check.by == "graph node id"
    assert told.check.by == "name and order"
    assert told.reliable
    assert [(span.call, span.name) for span in told.spans] == [(span.call, span.name) for span in exact.spans]
