"""The CUDA device on a real GPU: what is captured, what is emitted, what is refused, what is left behind."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import CaptureError, DeviceError, Nimble, Options
from nimble_core.autotune.capture_pipeline import capture, device_for
from nimble_core.profiling import cupti
from tests.support.cuda_models import UNFUSED, Wide, inputs, plans

pytestmark = pytest.mark.gpu


@pytest.fixture
def wide() -> Wide:
    torch.manual_seed(0)
    return Wide().cuda().eval()


@torch.no_grad()
def test_replays_equal_eager_bit_for_bit_on_fresh_inputs(wide: Wide) -> None:
    _, _, single, multi, _ = plans(wide, inputs())
    for _ in range(5):
        x = inputs()
        expected = wide(x)
        assert torch.equal(single.run([x])[0], expected)
        assert torch.equal(multi.run([x])[0], expected)


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


@torch.no_grad()
def test_a_call_on_another_stream_follows_one_on_the_default_stream() -> None:
    weight = torch.randn(2048, 2048, device="cuda") / 45

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):  # some ms
            x = x @ weight
        return x

    net = Nimble(model, UNFUSED).prepare(weight.clone())
    given = [torch.randn(2048, 2048, device="cuda") for _ in range(6)]
    wanted, side = [model(x) for x in given], torch.cuda.Stream()
    torch.cuda.synchronize()
    for at in range(0, 6, 2):
        with torch.cuda.stream(torch.cuda.default_stream()):
            first = net(given[at])
        with torch.cuda.stream(side):
            second = net(given[at + 1])
        torch.cuda.synchronize()
        assert torch.allclose(first, wanted[at], rtol=0.01, atol=0.01)
        assert torch.allclose(second, wanted[at + 1], rtol=0.01, atol=0.01)


@torch.no_grad()
def test_inputs_written_in_place_are_written_back() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    x = torch.zeros(3, device="cuda")
    net = Nimble(model).prepare(x)
    assert x.tolist() == [0, 0, 0]
    assert net(x).tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


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
