from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policies
from nimble_core.api import nimble as nimble_module
from nimble_core.api.nimble import Nimble
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.runtime.device import Executable
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.policies import POLICIES
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static, state_kept
from tests.support.models import Wide


def in_a_row_ns(device: FakeDevice) -> Callable[[Executable], float]:
    def time(executable: Executable) -> float:
        start = device.clock_ns()
        for _ in range(5):
            executable.replay()
        return (device.clock_ns() - start) / 5

    return time


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    device = FakeDevice(lambda call: 1_000.0 * (1 + call.index % 3))
    monkeypatch.setattr(nimble_module, "device_for", lambda _: device)
    torch.manual_seed(0)
    model, x = Wide(branches=6).eval(), torch.randn(4, 16)
    net = Nimble(model).prepare(x)
    signature = check_inputs(model, (x,), {})
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    with state_kept(recorded):
        found = policies.measured(device, recorded, net.engines[0], in_a_row_ns(device), seconds=0.01)
    found["auto"]["prepare s"] = found["wall s"] = 1.0
    return found


def test_every_plan_is_measured_checked_and_simulated_exactly(result: dict[str, Any]) -> None:
    plans = result["policies"]
    assert set(POLICIES) <= set(plans)
    assert {f"{policy}, {cap} streams" for policy in policies.OURS for cap in policies.CAPS} <= set(plans)
    for name, entry in plans.items():
        assert entry["replay"]["median us"] == pytest.approx(entry["simulated us"])
        assert entry["simulation error"] == pytest.approx(0)
        assert entry["equality"]["passed"], name
        assert entry["memory"]["arena over lower bound"] >= 1
        assert entry["memory"]["arena bytes"] <= entry["memory"]["without reuse bytes"]
    assert plans["nimble, 2 streams"]["streams"] == 2
    assert plans["nimble"]["streams"] == 6
    assert plans["single"]["kernels in flight"] == {"mean": 1.0, "max": 1}
    assert plans["nimble"]["kernels in flight"]["max"] == 6
    # No cap of 8 binds on a model with six branches.
    assert plans["nimble, 8 streams"] == {**plans["nimble"], "same as": "nimble"}
    assert sum(one["chosen"] for one in result["auto"]["candidates"]) == 1


def test_the_summary_is_of_what_was_measured(result: dict[str, Any], tmp_path: Path) -> None:
    found = policies.summary({"a, float32": result, "b, float32": result})
    over = found["speed over single"]["replay"]
    assert over["single"] == pytest.approx(1)
    single, nimble = (result["policies"][name]["replay"]["median us"] for name in ("single", "nimble"))
    assert over["nimble"] == pytest.approx(single / nimble)
    assert found["speed over nimble"]["replay"]["nimble"] == pytest.approx(1)
    assert found["simulation error"]["median"] == pytest.approx(0)
    assert not found["equal to eager"]["not shown"]
    assert json.loads(json.dumps(found)) == found
    lines = policies.table(found)
    assert any(line.startswith("contention ") for line in lines)
    policies.row("a, float32", result)
    wrong = json.loads(json.dumps(result))
    wrong["policies"]["opara"]["equality"] |= {"passed": False, "reason": "differs"}
    wrong["policies"]["opara"].pop("same as", None)
    assert policies.summary({"a": wrong})["equal to eager"]["not shown"] == {"opara on a": "differs"}


def test_kernels_in_flight() -> None:
    spans = tuple(Span(0, start, end, None, "") for start, end in ((0, 10), (5, 15), (15, 20)))
    timeline = Timeline("x", "measured", "", (Lane("a", "stream"),), spans)
    assert policies.in_flight(timeline) == {"mean": 25 / 20, "max": 2}
