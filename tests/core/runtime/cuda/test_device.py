"""The CUDA device on a real GPU: what is captured, what is emitted, what is refused, what is left behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import CaptureError, DeviceError, InputError, Nimble, Options
from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.profiling import cupti
from nimble_core.runtime.cuda.graph_nodes import read_graph
from nimble_core.scheduling.memory_planner import check_memory
from nimble_core.scheduling.verify_capture import leading_fills
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static

pytestmark = pytest.mark.gpu

UNFUSED = Options(fuse="none")
"""Eager's own kernels: their replays give eager's bits."""


class Wide(nn.Module):
    """Branches that may run side by side, then one that needs them all."""

    def __init__(self, branches: int = 6, channels: int = 8) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(branches)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3))


class Towers(nn.Module):
    """Independent branches whose results are small beside what they need on the way."""

    def __init__(self, branches: int = 4, channels: int = 8) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3))
            for _ in range(branches)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x).mean((2, 3)) for branch in self.branches], 1)


@pytest.fixture
def wide() -> Wide:
    torch.manual_seed(0)
    return Wide().cuda().eval()


def inputs(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 8, 32, 32, device="cuda")


def plans(model: Any, *args: Any, max_streams: int | None = None, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    device.warm_up(model, args, kwargs)
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    single = capture(device, recorded, schedule_by(recorded, "single", None, 1))
    costs = observe(device, recorded, single).costs
    multi = capture(device, recorded, schedule_by(recorded, "nimble", costs, max_streams))
    return device, recorded, single, multi, costs


@torch.no_grad()
def test_replays_equal_eager_bit_for_bit_on_fresh_inputs(wide: Wide) -> None:
    _, _, single, multi, _ = plans(wide, inputs())
    for _ in range(5):
        x = inputs()
        expected = wide(x)
        assert torch.equal(single.run([x])[0], expected)
        assert torch.equal(multi.run([x])[0], expected)


def test_untraced_recordings_differ_in_what_is_known_of_allocations(wide: Wide) -> None:
    x = inputs()
    device, signature = device_for(x.device), check_inputs(wide, (x,), {})
    device.warm_up(wide, (x,), {})
    traced, untraced = (device.record(wide, signature, (x,), {}, traced=one) for one in (True, False))
    assert len(traced.asks) == len(traced.program.calls)
    assert untraced.asks == ()
    assert untraced.program == traced.program


def test_the_graph_holds_exactly_the_planned_syncs(wide: Wide) -> None:
    _, recorded, single, multi, _ = plans(wide, inputs())
    counts = multi.counts
    assert multi.schedule.streams == 6
    assert counts.emitted == counts.planned == multi.schedule.meg_edges - multi.schedule.matched > 0
    assert single.counts.emitted == 0
    assert crossing(multi) == set(multi.schedule.syncs)
    assert None not in multi.raw.owner
    assert set(multi.raw.owner) == set(range(len(recorded.recording.program.calls)))


def crossing(executable: Any) -> set[tuple[int, int]]:
    """Pairs of calls on different streams that an edge of the captured graph joins."""
    owner, stream = executable.raw.owner, executable.schedule.stream
    pairs = {(owner[tail], owner[head]) for tail, head in executable.raw.edges}
    return {(u, v) for u, v in pairs if stream[u] != stream[v]}


@torch.no_grad()
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_capped_and_prioritised_plans_are_captured_as_planned(wide: Wide, cap: int) -> None:
    device, recorded, _, multi, _ = plans(wide, inputs(), max_streams=cap)
    urgent = dataclasses.replace(multi.schedule, priority=tuple(call % 3 for call in multi.schedule.order))
    prioritised = capture(device, recorded, urgent)
    x = inputs()
    for one in (multi, prioritised):
        assert one.schedule.streams == cap
        assert crossing(one) == set(one.schedule.syncs)
        assert torch.equal(one.run([x])[0], wide(x))


def test_more_than_32_streams_stay_distinct() -> None:
    model = Wide(branches=40).cuda().eval()
    _, _, _, multi, _ = plans(model, inputs())
    assert multi.schedule.streams == 40
    assert multi.counts.emitted == multi.counts.planned


def test_every_kernel_is_seen_and_belongs_to_a_call(wide: Wide) -> None:
    device, recorded, _, multi, costs = plans(wide, inputs())
    if not cupti.available():
        pytest.skip("needs cupti-python")
    assert costs.reliable
    assert all(ns > 0 for ns in costs.ns)
    seen = device.observe(multi, recorded.recording, 5)
    assert seen.timeline.reliable
    assert {span.call for span in seen.timeline.spans} == set(range(len(costs.ns)))
    assert all(span.lane == multi.schedule.stream[span.call] for span in seen.timeline.spans)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch's own advice
def test_torch_profiler_still_works_after_cupti(wide: Wide) -> None:
    plans(wide, inputs())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        wide(inputs())
        torch.cuda.synchronize()
    assert any(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@torch.no_grad()
def test_outputs_are_copies_unless_asked_otherwise(wide: Wide) -> None:
    first, second = inputs(), inputs()
    net = Nimble(wide).prepare(first)
    kept = net(first)
    expected = kept.clone()
    net(second)
    assert torch.equal(kept, expected)
    static = Nimble(wide, Options(outputs="static")).prepare(first)
    overwritten = static(first)
    assert static(second).data_ptr() == overwritten.data_ptr()


@torch.no_grad()
def test_weights_are_read_live(wide: Wide) -> None:
    x = inputs()
    net = Nimble(wide, UNFUSED).prepare(x)
    wide.branches[0][0].weight.mul_(2)
    assert torch.equal(net(x), wide(x))


def test_batch_norm_statistics_survive_prepare_and_follow_replays() -> None:
    model, x = Wide().cuda().train(), inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = Nimble(model).prepare(x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    twin = Wide().cuda().train()
    twin.load_state_dict(before)
    with torch.no_grad():
        twin(x)
        net(x)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_dropout_draws_fresh_masks_and_prepare_keeps_the_seed() -> None:
    model, x = nn.Dropout(0.5).cuda().train(), torch.ones(4096, device="cuda")
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    net = Nimble(model, Options(policy="single")).prepare(x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    first, second = net(x), net(x)
    assert not torch.equal(first, second)
    for out in (first, second):
        assert 0.4 < (out == 0).float().mean() < 0.6
        assert set(out.unique().tolist()) == {0.0, 2.0}


def test_constants_made_on_the_host_are_kept() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 4.0])
        return x * table.to(x.device) + torch.arange(3).to(x.device, x.dtype)

    x = torch.randn(5, 3, device="cuda")
    net = Nimble(model).prepare(x)
    y = torch.randn(5, 3, device="cuda")
    assert torch.equal(net(y), model(y))


@pytest.mark.parametrize(
    ("model", "operator"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x + x.cpu().cuda(), "_to_copy"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
    ],
)
def test_host_reads_are_refused_by_name_and_the_process_stays_usable(model: Any, operator: str, wide: Wide) -> None:
    x = torch.randn(8, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError) as caught:
        Nimble(model).prepare(x)
    assert operator in str(caught.value)
    assert "test_device.py:" in str(caught.value)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    y = inputs()
    with torch.no_grad():
        assert torch.equal(Nimble(wide, UNFUSED).prepare(y)(y), wide(y))


def test_an_operator_that_synchronises_inside_is_refused_and_random_numbers_can_be_drawn_after() -> None:
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(CaptureError):
        Nimble(lambda x: torch.linalg.svd(x)[1]).prepare(x)
    assert torch.randn(3, device="cuda").isfinite().all()
    net = Nimble(nn.Dropout().cuda().train(), Options(policy="single")).prepare(torch.ones(64, device="cuda"))
    assert set(net(torch.ones(64, device="cuda")).unique().tolist()) == {0.0, 2.0}


def test_an_error_of_the_model_itself_passes_through(wide: Wide) -> None:
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # while recording, under the capture
            raise KeyError("mine")
        return x * 2

    with pytest.raises(KeyError, match="mine"):
        Nimble(model).prepare(torch.ones(3, device="cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_out_of_memory_is_a_device_error_and_leaves_the_process_usable() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(1 << 42, device=x.device)[:1]

    with pytest.raises(DeviceError, match="out of memory"):
        Nimble(model).prepare(torch.ones(1, device="cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_memory_limit(wide: Wide) -> None:
    with pytest.raises(DeviceError, match="memory_limit"):
        Nimble(wide, Options(memory_limit=1)).prepare(inputs(64))


@torch.no_grad()
def test_calls_from_several_streams_and_threads(wide: Wide) -> None:
    net = Nimble(wide, UNFUSED).prepare(inputs())
    failures: list[int] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(20):
                x = inputs()
                if not torch.equal(net(x), wide(x)):
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


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
    assert held()[0] > before[0]
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
    assert edges_by_handle(engine.executable.raw) == edges_by_handle(
        read_graph(engine.executable.graph.raw_cuda_graph())
    )
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
        assert edges_by_handle(held.raw) == edges_by_handle(read_graph(held.graph.raw_cuda_graph()))
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
def test_autocast_and_channels_last(wide: Wide) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return wide(x)

    x = inputs().to(memory_format=torch.channels_last)
    net = Nimble(model, UNFUSED).prepare(x)
    y = inputs().to(memory_format=torch.channels_last)
    assert torch.equal(net(y), model(y))


@torch.no_grad()
def test_inputs_written_in_place_are_written_back() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    x = torch.zeros(3, device="cuda")
    net = Nimble(model).prepare(x)
    assert x.tolist() == [0, 0, 0]
    assert net(x).tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


@torch.no_grad()
def test_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(num_hidden_layers=2)
    torch.manual_seed(0)
    model = transformers.BertModel(config).cuda().eval()
    tokens = torch.randint(0, 1000, (1, 32), device="cuda")
    mask = torch.ones_like(tokens)
    net = Nimble(model).prepare(input_ids=tokens, attention_mask=mask)
    other = torch.randint(0, 1000, (1, 32), device="cuda")
    ours, theirs = net(input_ids=other, attention_mask=mask), model(input_ids=other, attention_mask=mask)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state)


def test_compare_reports_everything(wide: Wide) -> None:
    import nimble_viz

    report = nimble_viz.compare(wide, inputs(), options=Options(fuse="none", policy="nimble", budget_s=0.5))
    assert report.complete
    assert report.environment.device == "cuda"
    assert {one.name for one in report.measurements} == {"eager", "single", "nimble"}
    assert all(check.passed for check in report.checks), report.checks
    assert {line.run for line in report.timelines} == {"eager", "single", "nimble"}
    nimble = report.schedule("nimble")
    assert nimble is not None
    assert nimble.counts.emitted == nimble.counts.planned
    assert (report.critical_path_ns > 0) == cupti.available()
    assert report.overhead is not None
    assert report.overhead.matched == report.overhead.total
    assert 0 <= report.overhead.device_idle_share <= 1


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


def test_captures_that_fail_leave_the_process_usable(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    from nimble_core.tracing.recording import Issuer

    real, issued = Issuer.issue, []

    def failing(self: Issuer, call: int) -> None:
        issued.append(call)
        if len(issued) == 3:
            torch.cuda.synchronize()  # which no capture survives
        real(self, call)

    monkeypatch.setattr(Issuer, "issue", failing)
    with pytest.raises(CaptureError):
        Nimble(wide, Options(tune="off")).prepare(inputs())
    monkeypatch.undo()
    net, x = Nimble(wide, UNFUSED).prepare(inputs()), inputs()
    with torch.no_grad():
        assert torch.equal(net(x), wide(x))
    torch.cuda.empty_cache()
    torch.rand(2, device="cuda")


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


def test_calls_are_timed_alone_and_side_by_side() -> None:
    """Kernels that spin on one multiprocessor each, for a tenth of a millisecond and more."""
    device = device_for(torch.device("cuda"))

    def spins() -> None:
        torch.cuda._sleep(200_000)

    def fails() -> None:
        raise RuntimeError("no routine")

    x = torch.randn(64, 64, device="cuda")
    alone, beside, broken, product = device.call_times_ns([spins, (spins, spins, spins), (spins, fails), lambda: x @ x])
    assert broken is None
    assert None not in (product, alone, beside)
    assert 0 < product < alone
    assert 0.9 * alone < beside < 2 * alone  # the clock may have risen
    assert not torch.cuda.is_current_stream_capturing()
    torch.testing.assert_close((x + 1) - 1, x, rtol=0, atol=1e-6)
