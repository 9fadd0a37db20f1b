from __future__ import annotations

import pytest
import torch

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.measurement import interleave, ratio
from nimble_core.ir.program import Call
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.policies import nimble, single
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.tracing.signature import Signature

X = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def diamond(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y.sin() + y.cos()


def by_label(call: Call) -> float:
    return {"exp": 100.0, "sin": 30.0, "cos": 50.0, "add": 10.0}[call.label]


def test_times_are_exact() -> None:
    device = FakeDevice(by_label, model=DeviceModel(sync_ns=5.0), overhead_ns_per_call=7.0)
    recording = device.record(diamond, Signature((X,), {}), (X,), {})
    graph, costs = build_graph(recording.program), device.costs(recording.program)
    assert costs.ns == (100.0, 30.0, 50.0, 10.0)
    one = device.capture(recording, single(graph, costs), [X])
    two = device.capture(recording, nimble(graph, costs), [X])
    assert device.clock_ns() == 0.0
    taken = interleave(
        {"eager": lambda: device.eager(diamond)(X), "single": one.replay, "nimble": two.replay},
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        warmup=1,
        rounds=5,
    )
    assert taken["eager"].samples_ns == (190.0 + 4 * 7.0,) * 5
    assert taken["single"].samples_ns == (190.0,) * 5
    # exp and sin share a stream; cos starts a wait later and add another wait after it.
    assert taken["nimble"].samples_ns == (100.0 + 5.0 + 50.0 + 5.0 + 10.0,) * 5
    assert ratio(taken["nimble"], taken["eager"]).value == pytest.approx(218.0 / 170.0)
    assert taken["nimble"].stable
