"""Kernels of a GPU timed through CUPTI, beside torch's profiler and other threads."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nimble_viz
from nimble_core import Nimble, Options
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling import cupti
from nimble_core.profiling.cupti import unavailable
from nimble_core.profiling.kernel_matching import TIMED
from nimble_core.runtime.cuda.device import CudaDevice, CudaExecutable
from nimble_core.utils.errors import DeviceError
from tests.support.fake_cupti import Untouchable

ROOT = Path(__file__).parents[3]
PLAIN = Options(policy="nimble", tune="off", budget_s=0.1, fuse="none")


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
    return made, Counter(name for name in on_gpu if not name.endswith((" Sync", "Wait Event", "Buffer Full")))

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
        assert sorted(kernel.node for kernel in seen.costs.kernels) == places
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
from nimble_viz.collect.iterations import profile_eager

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
