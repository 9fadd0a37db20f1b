"""One profiled iteration, by this machine's profiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from nimble_viz.traces.events import is_synchronisation
from nimble_viz.traces.profiler import profile_eager


def test_real_profile_is_nested_ordered_and_within_the_iteration() -> None:
    layer = torch.nn.Linear(8, 8)
    waits: list[int] = []
    with torch.no_grad():
        trace = profile_eager(lambda: layer(torch.ones(2, 8)), device="cpu", synchronize=lambda: waits.append(1))
    assert len(waits) == 1 + 2 + 3
    names = [event.name for event in trace.operators]
    assert names.index("aten::linear") < names.index("aten::addmm")
    assert [e.start_ns for e in trace.operators] == sorted(e.start_ns for e in trace.operators)
    assert all(trace.start_ns <= e.start_ns <= e.end_ns <= trace.run_end_ns for e in trace.operators)
    assert len(trace.iterations_ns) == 3
    assert trace.length_ns == sorted(trace.iterations_ns)[1]
    assert trace.kernels == trace.runtime == ()
    assert 0 < trace.floor_ns < 1e6


def test_an_error_of_the_model_stops_the_profiler() -> None:
    def fail() -> None:
        raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        profile_eager(fail, device="cpu", synchronize=lambda: None)
    assert profile_eager(lambda: torch.ones(1), device="cpu", synchronize=lambda: None).operators


def test_kineto_is_silent_and_the_environment_as_it_was() -> None:
    code = (
        "import os; from nimble_viz.traces.profiler import profile_eager; "
        "profile_eager(lambda: None, device='cpu', synchronize=lambda: None); "
        "assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    clean = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.gpu
def test_cuda_profile_joins_every_launch() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.ones(2, 64, device="cuda")
    with torch.no_grad():
        trace = profile_eager(lambda: layer(x).relu(), device="cuda", synchronize=torch.cuda.synchronize)
    assert trace.warnings == ()
    assert len(trace.kernels) >= 2
    assert not any(is_synchronisation(event.name) for event in trace.runtime)
