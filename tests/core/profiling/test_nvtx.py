"""Ranges of captures and replays, as a tool that is attached hears them; and nothing where none is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nimble_viz
from nimble_core.profiling.nvtx import COLOURS, colour
from tests.support.hidden import hiding
from tests.support.nvtx_tool import Heard, Spoken, listened

pytestmark = pytest.mark.compiler

ENGINE = """
import json, torch
from nimble_core import Nimble, Options
from nimble_core.profiling.nvtx import call_bytes, call_name, colour

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.left, self.right = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
    def forward(self, x):
        x = torch.relu(self.stem(x))
        return torch.sigmoid(self.left(x)) + torch.tanh(self.right(x))

def told(engine):
    program, schedule = engine.recorded.recording.program, engine.schedule
    return {
        "calls": [
            [call_name(call), call.phase, colour(schedule.stream[call.index]), call.index, call_bytes(call)]
            for call in program.calls
        ],
        "order": list(schedule.order), "policy": schedule.policy, "streams": schedule.streams,
    }

device = DEVICE
model, x = Branches().eval().to(device), torch.randn(4, 16, device=device)
options = Options(policy="nimble", tune="off", fuse="none")
"""
REPLAYS = ENGINE + (
    "net = Nimble(model, options).prepare(x)\n"
    "outputs = [net(x), net(x)]\n"
    "net.engines[0].executable.replay()\n"
    "assert torch.allclose(outputs[0], model(x), atol=1e-4)\n"
    "print(json.dumps(told(net.engines[0])))\n"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def as_told(call: Heard) -> list[Any]:
    """A call's range in the form in which the program says what it should be."""
    return [call.message, call.category, call.color, call.payload["call"], call.payload["nbytes"]]


def named(spoken: Spoken, start: str) -> list[Heard]:
    return [one for one in spoken.ranges if one.message.startswith(start)]


@pytest.mark.parametrize("device", DEVICES)
def test_captures_and_replays(tmp_path: Path, device: str) -> None:
    spoken = listened(REPLAYS.replace("DEVICE", repr(device)), tmp_path)
    calls = spoken.said["calls"]
    total = {"call": len(calls), "nbytes": sum(nbytes for *_, nbytes in calls)}
    assert {one["domain"] for one in spoken.events if one["event"] == "domain"} >= {"nimble"}
    assert all(one["registered"] for one in spoken.events if one["event"] == "push" and one["domain"] == "nimble")

    capture = named(spoken, "capture nimble")[-1]
    assert (capture.category, capture.payload) == ("capture", total)
    # Calls are captured stream by stream on CUDA; host code tries each once, in program order.
    wanted = calls if device == "cpu" else [calls[call] for call in spoken.said["order"]]
    assert [as_told(call) for call in capture.inside] == wanted
    assert capture.inside[0].message == "addmm stem"
    assert {call.category for call in capture.inside} == {"forward"}

    replays = named(spoken, "replay nimble")
    assert len(replays) == 3
    assert {(one.category, one.color, one.inside) for one in replays} == {("replay", colour(None), ())}
    assert all(one.payload == total for one in replays)


def test_colours_are_those_of_the_viewer() -> None:
    script = Path(nimble_viz.__file__).parent / "render" / "viewer" / "theme.js"
    found = re.search(r"light: \[(.*?)\]", script.read_text(encoding="utf-8"))
    assert found
    assert tuple(int(f"ff{one}", 16) for one in re.findall(r"#(\w{6})", found[1])) == COLOURS


def test_phases_of_a_training_step_are_categories(tmp_path: Path) -> None:
    code = ENGINE.replace("DEVICE", "'cpu'") + (
        "from nimble_core import TrainStep\n"
        "model.train()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "step = TrainStep(model, torch.nn.functional.mse_loss, optimizer, options=options)\n"
        "step.prepare(x, torch.randn(4, 8))\n"
        "for _ in range(3): step(x, torch.randn(4, 8))\n"
        "print('null')\n"
    )
    spoken = listened(code, tmp_path)
    captures = [one for one in spoken.ranges if one.category == "capture"]
    assert {call.category for call in captures[-1].inside} == {"forward", "loss", "backward", "optimizer"}
    replays = [one for one in spoken.ranges if one.category == "replay"]
    assert replays[-1].message.endswith("(forward, loss, backward, optimizer)")


def test_a_call_that_fails_leaves_no_range_open(tmp_path: Path) -> None:
    code = ENGINE.replace("DEVICE", "'cpu'") + (
        "net = Nimble(model, options).prepare(x)\n"
        "executable = net.engines[0].executable\n"
        "try:\n    executable.run([torch.randn(3, 5)])\n"
        "except Exception as error:\n    print(json.dumps(type(error).__name__))\n"
    )
    spoken = listened(code, tmp_path)
    assert spoken.said == "DeviceError"
    assert [one.category for one in spoken.ranges][-1] == "replay"


UNTOUCHED = ENGINE.replace("DEVICE", "'cpu'") + (
    "from nimble_core.profiling.nvtx import listener\n"
    "executable = Nimble(model, options).prepare(x).engines[0].executable\n"
    "print(json.dumps([listener() is None, 'run' in vars(executable), 'replay' in vars(executable)]))\n"
)


def test_a_tool_that_is_not_heard_is_warned_of(tmp_path: Path) -> None:
    """As under Nsight Systems 2024.2, of which nvtx 0.2.12 and later do not know whether it listens."""
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tmp_path / "no-such-tool.so")}
    command = [sys.executable, "-c", UNTOUCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, False, False]
    assert "does not find that it listens" in done.stderr


@pytest.mark.parametrize(
    ("code", "attached", "environment"),
    [
        (UNTOUCHED, False, {}),
        (UNTOUCHED, True, {"NIMBLE_NVTX": "0"}),
        (UNTOUCHED, True, {"NVTX_DISABLE": "1"}),
        (hiding(["nvtx"]) + UNTOUCHED, True, {}),
    ],
    ids=["no tool", "turned off", "nvtx turned off", "no nvtx"],
)
def test_where_nobody_listens_executables_are_as_they_were(
    tmp_path: Path, code: str, attached: bool, environment: dict[str, str]
) -> None:
    spoken = listened(code, tmp_path, attached=attached, **environment)
    assert spoken.said == [True, False, False]
    assert spoken.ranges == []


def test_with_a_tool_they_are_not(tmp_path: Path) -> None:
    assert listened(UNTOUCHED, tmp_path).said == [False, True, True]
