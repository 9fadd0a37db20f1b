"""The benchmark of policies on a device whose clock is known: every plan is measured, checked and summed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policies
from nimble_core.api import prepare_engine
from nimble_core.api.nimble import Nimble
from nimble_core.ir.call_graph import graph_from_edges
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.device import Executable
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.policies import POLICIES
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static, state_kept
from tests.support.models import Wide

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "policies-h200.json"


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    device = FakeDevice(lambda call: 1_000.0 * (1 + call.index % 3))

    def in_a_row_ns(executable: Executable) -> float:
        start = device.clock_ns()
        for _ in range(5):
            executable.replay()
        return (device.clock_ns() - start) / 5

    monkeypatch.setattr(prepare_engine, "device_for", lambda _: device)
    torch.manual_seed(0)
    model, x = Wide(branches=6).eval(), torch.randn(4, 16)
    net = Nimble(model).prepare(x)
    signature = check_inputs(model, (x,), {})
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    with state_kept(recorded):
        found = policies.measured(device, recorded, net.engines[0], in_a_row_ns, seconds=0.01)
    return found


def test_every_plan_is_measured_checked_and_simulated_exactly(result: dict[str, Any]) -> None:
    plans = result["policies"]
    assert set(POLICIES) == set(plans)
    for name, entry in plans.items():
        assert entry["replay"]["median us"] == pytest.approx(entry["simulated us"])
        assert entry["simulation error"] == pytest.approx(0)
        assert entry["equality"]["passed"], name
        assert entry["memory"]["arena bytes"] > 0
    assert plans["nimble"]["streams"] == 6
    assert result["auto"]["chosen"] in plans
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_plan_that_another_policy_made_is_found() -> None:
    graph, costs = graph_from_edges(3, [(0, 1), (0, 2)]), uniform_costs(3)
    one, several = (POLICIES[name](graph, costs) for name in ("single", "nimble"))
    assert policies.duplicates({"a": several, "b": one, "c": several}) == {"c": "a"}


def test_the_summary_is_of_what_was_measured(result: dict[str, Any]) -> None:
    found = policies.summary({"a, float32": result, "b, float32": result})
    over = {policy: speeds["replay"]["geometric mean"] for policy, speeds in found["speed over single"].items()}
    assert over["single"] == pytest.approx(1)
    single, nimble = (result["policies"][name]["replay"]["median us"] for name in ("single", "nimble"))
    assert over["nimble"] == pytest.approx(single / nimble)
    assert found["simulation error"]["median"] == pytest.approx(0)
    assert not found["equal to eager"]["not shown"]
    assert json.loads(json.dumps(found)) == found
    wrong = json.loads(json.dumps(result))
    wrong["policies"]["opara"]["equality"] |= {"passed": False, "reason": "differs"}
    wrong["policies"]["opara"].pop("same as", None)
    assert policies.summary({"a": wrong})["equal to eager"]["not shown"] == {"opara on a": "differs"}


def test_the_committed_file_is_read_and_every_plan_in_it_was_right() -> None:
    found = policies.summary(json.loads(RESULTS.read_text())["models"])
    assert found["equal to eager"] == {"checked": 136, "not shown": {}}
    assert found["simulation error"]["plans"] == 88
