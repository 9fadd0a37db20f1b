from __future__ import annotations

import pytest
import torch
from torch import nn

from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.measurement import interleave, ratio
from nimble_core.ir.program import Call
from nimble_core.runtime.fake import FakeDevice
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.policies import nimble, single
from nimble_core.scheduling.simulator import DeviceModel
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import other_values
from nimble_core.utils.errors import DeviceError

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


def test_values_are_real_in_any_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    device = FakeDevice()
    recording = device.record(model, Signature((X,), {}), (X,), {})
    graph, costs = build_graph(recording.program), device.costs(recording.program)
    for schedule in (single(graph, costs), nimble(graph, costs)):
        executable = device.capture(recording, schedule, [X])
        (fresh,) = other_values([X], seed=1)
        with torch.no_grad():
            assert torch.equal(executable.run([fresh])[0], model(fresh))
        assert executable.counts == schedule.counts
        assert executable.nbytes == 0, "no memory was planned"


def test_the_whole_model_takes_the_sum() -> None:
    device = FakeDevice(by_label)
    signature = Signature((X,), {})
    recording = device.record(diamond, signature, (X,), {})
    executable = device.capture_whole(diamond, recording, signature)
    assert torch.equal(executable.run([X])[0], diamond(X))
    assert device.clock_ns() == 190.0


def test_closed_or_foreign_executables_are_refused() -> None:
    device = FakeDevice()
    recording = device.record(diamond, Signature((X,), {}), (X,), {})
    schedule = single(build_graph(recording.program), device.costs(recording.program))
    executable = device.capture(recording, schedule, [X])
    executable.close()
    executable.close()
    with pytest.raises(DeviceError, match="closed"):
        executable.run([X])
    with pytest.raises(DeviceError, match="cannot observe"):
        device.observe(HostDevice().capture(recording, schedule, [X]), recording, 1)


def test_observing_gives_the_simulated_timeline_and_the_given_costs() -> None:
    device = FakeDevice(by_label)
    recording = device.record(diamond, Signature((X,), {}), (X,), {})
    executable = device.capture(recording, nimble(build_graph(recording.program), device.costs(recording.program)), [X])
    seen = device.observe(executable, recording, 3)
    assert device.clock_ns() == 3 * 160.0
    assert seen.timeline.profiled_ns == seen.timeline.length_ns == 160.0
    assert seen.costs.ns == (100.0, 30.0, 50.0, 10.0)
