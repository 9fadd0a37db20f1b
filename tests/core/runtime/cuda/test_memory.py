"""Memory of captures on a real GPU: placed as planned, limited, freed."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import DeviceError, InputError, Nimble, Options
from nimble_core.autotune.capture_pipeline import capture, device_for, schedule_by
from nimble_core.scheduling.memory_planner import check_memory
from nimble_core.scheduling.verify_capture import leading_fills
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from tests.support.cuda_models import Towers, Wide, graph_of, inputs, plans

pytestmark = pytest.mark.gpu


@pytest.fixture
def wide() -> Wide:
    torch.manual_seed(0)
    return Wide().cuda().eval()


def test_closing_frees_the_memory(wide: Wide) -> None:
    def held() -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    x = inputs(64)
    wide(x)
    Nimble(wide).prepare(x).close()  # what torch and we allocate once in a process stays
    gc.collect()
    before = held()
    net = Nimble(wide).prepare(x)
    assert held() > before  # a recalled choice may fit into what the first one reserved
    gc.disable()
    try:
        net.close()
        after = held()
    finally:
        gc.enable()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)


@torch.no_grad()
def test_a_capture_gets_memory_that_ended_ones_hold(wide: Wide) -> None:
    """No other capture may have it, and torch gives nothing back in the midst of one."""
    x, ended = inputs(256), torch.cuda.CUDAGraph()
    with torch.cuda.graph(ended):
        torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    ended.reset()
    expected = wide(x)
    held = torch.cuda.memory_reserved()
    assert held > 1 << 30
    room = held + (8 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        net = Nimble(wide, Options(fuse="none", tune="off")).prepare(x)
        assert torch.equal(net(x), expected)
        with pytest.raises(DeviceError, match="out of memory"):
            Nimble(wide, Options(fuse="none", tune="off")).prepare(x.repeat(32, 1, 1, 1))
        assert torch.equal(net(x), expected)
        net.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


def counting(rows: int = 4096) -> tuple[nn.Module, torch.Tensor]:
    """Products in many rows, which cuBLAS gives kernels that count in their workspaces."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(768, 768), nn.ReLU()) for _ in range(10)]).cuda()
    return model, torch.randn(rows, 768, device="cuda")


def fills(executable: Any) -> tuple[int, int]:
    """Nodes that calls begin with by setting memory to zero, and all that set memory."""
    return len(leading_fills(executable.raw)), executable.raw.kinds.count("memset")


def edges_by_handle(raw: Any) -> tuple[set[int], set[tuple[int, int]]]:
    return set(raw.nodes), {(raw.nodes[tail], raw.nodes[head]) for tail, head in raw.edges}


def counting_calls(device: Any, recorded: Any, executable: Any) -> tuple[int, int]:
    """Calls that count in a workspace, and those of them whose workspaces are staggered."""
    layout = device.lay_out(recorded.recording, executable.schedule)
    return sum(any(ask.zeroed for ask in asks) for asks in recorded.recording.asks), sum(map(len, layout.chains))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("policy", ["single", "nimble"])
@torch.no_grad()
def test_counters_of_workspaces_are_set_to_zero_at_once(policy: str) -> None:
    model, x = counting()
    net = Nimble(model, Options(fuse="none", tune="off", policy=policy)).prepare(x)
    engine = net.engines[0]
    calls, staggered = counting_calls(device_for(x.device), engine.recorded, engine.executable)
    if calls < 8:
        pytest.skip("cuBLAS sets nothing to zero for these products on this GPU")
    assert staggered == calls
    assert fills(engine.executable) == (0, 1)
    assert edges_by_handle(engine.executable.raw) == edges_by_handle(graph_of(engine.executable))
    for _ in range(5):
        x = torch.randn_like(x)
        assert torch.equal(net(x), model(x))
    net.close()


@pytest.mark.usefixtures("tf32")
def test_gradients_are_right_where_counters_are_set_to_zero_at_once() -> None:
    model, x = counting()
    net = Nimble(model, Options(fuse="none", tune="off", policy="single")).prepare(x, training=True)
    engine = net.engines[0]
    if counting_calls(device_for(x.device), engine.recorded, engine.executable)[1]:
        assert fills(engine.executable) == (0, 1)
    for held in (engine.executable, engine.backward.executable):
        assert edges_by_handle(held.raw) == edges_by_handle(graph_of(held))
    for _ in range(3):
        x = torch.randn_like(x)
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        net(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-2, atol=1e-3)
    net.close()


@torch.no_grad()
def test_results_lie_where_they_were_planned_and_no_reader_sees_what_was_there_before(wide: Wide) -> None:
    _, recorded, single, multi, _ = plans(wide, inputs())
    for one in (single, multi):
        memory = one.memory
        assert memory is not None
        check_memory(recorded.recording.program, one.schedule, memory)
        unshared = sum(
            storage.nbytes
            for storage, offset in zip(recorded.recording.program.storages, memory.offsets, strict=True)
            if offset >= 0
        )
        assert 0 < memory.nbytes < unshared
        block = one._arena._block
        start, end = block.data_ptr(), block.data_ptr() + block.nbytes
        assert all(start < output.data_ptr() < end for output in one.outputs)
        for poison in (0xFF, 0x7F, 0):  # NaN, a large number, nothing
            block.fill_(poison)
            x = inputs()
            assert torch.equal(one.run([x])[0], wide(x))


@torch.no_grad()
def test_a_memory_limit_adds_order_or_is_refused() -> None:
    wide = Towers().cuda().eval()
    x = torch.randn(2, 8, 128, 128, device="cuda")
    free = Nimble(wide, Options(fuse="none", policy="nimble")).prepare(x)
    one = Nimble(wide, Options(fuse="none", policy="single")).prepare(x)
    held, least = free.engines[0].executable.nbytes, one.engines[0].executable.nbytes
    assert least < held
    limit = (held + least) // 2
    limited = Nimble(wide, Options(fuse="none", policy="nimble", memory_limit=limit)).prepare(x)
    engine = limited.engines[0]
    assert engine.executable.nbytes <= limit
    assert engine.schedule.added_order
    assert torch.equal(limited(x), wide(x))
    with pytest.raises(DeviceError, match="memory_limit"):
        Nimble(wide, Options(fuse="none", policy="nimble", memory_limit=4096)).prepare(x)


@torch.no_grad()
def test_allocations_that_nobody_planned_are_noticed(wide: Wide) -> None:
    x = inputs()
    signature = check_inputs(wide, (x,), {})
    device = device_for(signature.device)
    recorded = record_static(device, wide, signature, strict=True, step=Stopwatch())
    real = torch.ops.aten.relu.default
    recording = recorded.recording
    greedy = [
        dataclasses.replace(step, func=lambda x: (torch.ones(64, device="cuda"), real(x))[1])
        if step.func is real
        else step
        for step in recording.steps
    ]
    recorded = dataclasses.replace(recorded, recording=dataclasses.replace(recording, steps=tuple(greedy)))
    made = capture(device, recorded, schedule_by(recorded, "nimble", None, None))
    x = inputs()
    assert torch.equal(made.run([x])[0], wide(x))
    assert made.memory is not None
    relus = [call for call in recording.program.calls if call.label == "relu"]
    placed = {storage for storage, offset in enumerate(made.memory.offsets) if offset >= 0}
    assert relus
    assert not placed & {ref.storage for call in relus for ref in call.writes}
