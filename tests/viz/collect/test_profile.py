"""Profiles of functions and blocks on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter

import nimble_viz
from nimble_core import Nimble, Options, TrainStep
from nimble_core.profiling.cupti import profiler_runs
from nimble_core.utils.errors import DeviceError, InputError
from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.tiles import tiles
from nimble_viz.collect.profile import Profiling, profile

NEXT = _BaseDataLoaderIter.__next__


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    # Others have hooks too: an engine that was prepared earlier in this process hears of optimizers' steps.
    hooks = (_global_forward_hooks, _global_forward_pre_hooks, _global_optimizer_post_hooks)
    before = [dict(one) for one in hooks]
    yield
    assert _BaseDataLoaderIter.__next__ is NEXT
    assert [dict(one) for one in hooks] == before
    assert _get_current_dispatch_mode() is None
    assert not torch._C._autograd._profiler_enabled()


def labels(report: nimble_viz.Report) -> list[str]:
    return [call.label for call in report.program.calls]


@pytest.mark.parametrize("iterations", [4, 9, 17, 18])
def test_a_loop_that_ends_early_does_not_mix_cold_and_warm(iterations: int) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with profile() as run:
        for _ in range(iterations):
            model(x)
    report, taken = run.report, run.report.sampling
    assert taken is not None
    assert (taken.iteration, taken.seen) == ("one call of the outermost module", iterations)
    assert run.sampler.enough == 18
    if iterations == 18:
        assert (taken.timed, report.warnings) == (10, ())
        return
    assert (taken.timed, taken.profiled, taken.loader_ns) == (0, min(iterations - 3, 2), -1.0)
    assert report.measurements == ()
    assert "18 are enough" in report.warnings[0]
    assert ("later ones took" in report.warnings[0]) == (iterations > 7)
    assert "under the profiler" in report.to_text(full=True).split("\n\n")[0]


@pytest.mark.parametrize("run", [1, 2], ids=["at once", "once warm"])
@pytest.mark.parametrize("method", ["start", "stop"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_comes_once_torchs_profiler_has_started_or_stopped(
    method: str, after: bool, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    original, calls = getattr(torch.profiler.profile, method), []

    def interrupted(profiler: torch.profiler.profile) -> None:
        calls.append(method)
        if len(calls) == run and not after:
            signal.raise_signal(signal.SIGINT)
        original(profiler)
        if len(calls) == run and after:
            signal.raise_signal(signal.SIGINT)

    def loop(run: Profiling, iterations: int) -> Profiling:
        with run:
            for _ in range(iterations):
                model(x)
        return run

    taken = profile(warmup=2, timed=1, profiled=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    monkeypatch.setattr(torch.profiler.profile, method, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop(taken, 1000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not profiler_runs()
    assert not _global_forward_hooks
    assert not _global_forward_pre_hooks
    assert taken.found == ((method, run) != ("start", 1))
    assert loop(profile(warmup=2, timed=1, profiled=1), 20).report.complete


def test_a_function() -> None:
    calls = []
    model = torch.nn.Linear(4, 4)

    def step(x, *, twice):
        calls.append(twice)
        return model(x).relu() if twice else x

    report = profile(step, torch.randn(2, 4), kwargs={"twice": True}, warmup=1, timed=6, profiled=2)
    assert len(calls) == 1 + 6 + 2 + 2
    assert report.model == "step"
    assert labels(report) == ["linear", "relu"]
    assert report.program.calls[0].origins[0].file.endswith("test_profile.py")
    assert report.sampling is not None
    assert (report.sampling.iteration, report.sampling.timed, report.sampling.profiled) == (
        "one call of the function",
        6,
        2,
    )
    assert nimble_viz.profile is profile


def test_a_block_with_a_prepared_module() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    net = Nimble(model.eval(), Options(fuse="none", tune="off")).prepare(x)
    with profile(warmup=1, timed=5, profiled=2) as run:
        for _ in range(12):
            run.step()
            net(x)  # refuses hooks of others
    assert {"addmm", "linear"} & set(labels(run.report))


def prepared_step(x: torch.Tensor) -> TrainStep:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return TrainStep(model, torch.nn.functional.mse_loss, optimizer).prepare(x, x)


def advised(report: nimble_viz.Report) -> tuple[str, str]:
    found = tiles(report)
    return found["prepared"]["figure"], f"{[one.what for one in advice(report).changes]} {found['next']['code']}"


def test_what_is_prepared_is_not_to_be_prepared() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    for function, given in ((Nimble(model).prepare(x), (x,)), (prepared_step(x), (x, x))):
        report = profile(function, *given)
        assert report.sampling is not None
        assert report.sampling.replayed
        figure, code = advised(report)
        assert figure == "replayed by nimble_core already"
        assert "prepare" not in code
        assert "compile" not in code
    report = profile(model, x)
    assert report.sampling is not None
    assert not report.sampling.replayed
    assert "prepare the model with Nimble" in advised(report)[1]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_block_without_a_loop_knows_a_prepared_module(prepared: bool) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    net = Nimble(model).prepare(x) if prepared else model
    with profile() as run:
        net(x)
    assert run.report.sampling is not None
    assert run.report.sampling.replayed == prepared


@pytest.mark.parametrize("way", ["step", "drop-in", "eager"])
def test_a_loop_that_trains_what_is_prepared(way: str) -> None:
    x = torch.randn(2, 4)
    step, model = prepared_step(x), torch.nn.Linear(4, 4)
    net = Nimble(model).prepare(x, training=True) if way == "drop-in" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.repeat(30, 1)), batch_size=2)
    with profile() as run:
        for (batch,) in loader:
            if way == "step":
                step(batch, batch)
            else:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(batch), batch).backward()
                optimizer.step()
    assert run.report.sampling is not None
    assert run.report.sampling.replayed == (way != "eager")
    assert ("prepare" in advised(run.report)[1]) == (way == "eager")


def test_a_block_that_says_what_an_iteration_is() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with profile(warmup=0, timed=3, profiled=1) as run:
        for _ in range(12):
            run.step()
            model(x)
            model(x)
    report = run.report
    assert report.sampling is not None
    assert report.sampling.iteration == "what lies between two calls of step()"
    assert labels(report) == ["linear", "linear"]


def test_batches_of_a_generator_are_input_where_it_is_said() -> None:
    model = torch.nn.Linear(8, 8)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(25):
            sleep(0.004)
            yield torch.randn(2, 8)

    with profile() as run:
        seen = [model(x) for x in run.loader(batches())]
    assert len(seen) == 25
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one batch of the data loader"
    assert run.report.sampling.loader_ns > 4e6
    assert run.report.overhead is not None
    assert run.report.overhead.loader_ns > 4e6
    assert max(row.python_ns for row in run.report.overhead.calls) < 4e6
    assert list(run.loader([1, 2])) == [1, 2]  # after the block it is the iterable's own


def test_of_a_loader_within_a_loader_the_time_counts_once() -> None:
    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 25

        def __getitem__(self, index: int) -> torch.Tensor:
            sleep(0.004)
            return torch.randn(8)

    model = torch.nn.Linear(8, 8)
    with profile() as run:
        for x in run.loader(torch.utils.data.DataLoader(Slow(), batch_size=1)):
            model(x)
    assert run.report.sampling is not None
    timed = next(one for one in run.report.measurements if one.name == "eager")
    assert 4e6 < run.report.sampling.loader_ns < timed.median_ns


def test_a_scripted_module_is_no_obstacle() -> None:
    scripted = torch.jit.trace(torch.nn.Linear(8, 8), torch.randn(2, 8))
    with profile() as run:
        for _ in range(25):
            scripted(torch.randn(2, 8))
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one call of the outermost module"
    assert run.report.sampling.timed == 10


def test_a_tensor_that_is_printed_is_one_wait_on_its_line() -> None:
    x = torch.randn(3, 4)

    def printing() -> None:
        str(x * 2)
        str(torch.empty(0))
        float(x.sum())

    original = torch._tensor_str._str
    report = profile(printing, warmup=0, timed=1, profiled=1)
    assert torch._tensor_str._str is original
    assert report.overhead is not None
    first = printing.__code__.co_firstlineno
    waits = {one.kind: (one.count, Path(one.source).name) for one in report.overhead.host_syncs}
    assert waits == {
        "print(tensor)": (1, f"test_profile.py:{first + 1}"),
        "aten::item": (1, f"test_profile.py:{first + 3}"),
    }
    assert "printing a tensor" in report.to_text(full=True)
    assert [call.operator for call in report.eager_calls if "nimble" in call.operator] == ["nimble.print"] * 2


def test_a_block_that_raises_keeps_what_it_had() -> None:
    run = profile()

    def fails() -> None:
        with run:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            raise LookupError

    with pytest.raises(LookupError):
        fails()
    assert labels(run.report) == ["ones", "ones", "mm"]
    with pytest.raises(LookupError), profile():
        raise LookupError


def test_a_mode_that_the_loop_enters_is_left_alone() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with profile(warmup=0, timed=1, profiled=1) as run:
        for _ in range(12):
            with FlopCounterMode(display=False):
                model(x)
    assert labels(run.report) == ["linear"]


def test_what_is_compiled_meanwhile_holds_no_hook() -> None:
    torch.compiler.reset()
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with profile(warmup=1, timed=2, profiled=1) as run, torch.no_grad():
        for _ in range(12):
            compiled(x)
    assert labels(run.report) == ["linear", "relu"]
    assert 1 <= len(made) <= 2  # once more when the hooks of all modules are gone, and before anything is timed
    torch.compiler.reset()


def test_what_other_threads_run_is_not_seen() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def loop() -> None:
        for _ in range(20):
            model(x)

    thread = Thread(target=loop)
    with profile() as run:
        torch.mm(x.T, x)
        thread.start()
        thread.join()
    assert "no loop was found" in run.report.warnings[0]
    assert "what other threads run is not seen" in run.report.warnings[0]
    assert labels(run.report) == ["mm"]


@pytest.mark.parametrize(
    ("function", "more", "said"),
    [
        (3, {}, "a int cannot be profiled"),
        (lambda: torch.ones(2), {"profiled": 0}, "profiled=0"),
        (lambda: None, {}, "nothing was profiled"),
    ],
)
def test_what_cannot_be_profiled(function: Any, more: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        profile(function, **more)


def test_a_block_without_a_loop_is_profiled_whole_and_once() -> None:
    run = profile()
    with run:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(InputError, match="no report yet"):
            _ = run.report
    assert labels(run.report) == ["ones", "ones", "mm"]
    assert "no loop was found" in run.report.warnings[0]
    assert run.report.measurements == ()
    with pytest.raises(InputError, match="entered before"), run:
        pass
    with pytest.raises(InputError, match="nothing was profiled"), profile():
        pass


def test_beside_another_profiler_nothing_is_profiled() -> None:
    with torch.profiler.profile() as theirs:
        with pytest.raises(DeviceError, match="another profiler"):
            profile(torch.ones, 2)
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in theirs.events())


@pytest.mark.gpu
def test_a_loop_on_a_gpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(30 * 16, 256), torch.randint(0, 8, (30 * 16,)))
    with profile() as run:
        for x, y in torch.utils.data.DataLoader(data, batch_size=16):
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    report = run.report
    profile_, taken = report.overhead, report.sampling
    assert profile_ is not None
    assert taken is not None
    assert taken.iteration == "one batch of the data loader"
    assert [one.phase for one in profile_.phases] == ["loader", "copy", "forward", "backward", "optimizer"]
    assert labels(report).count("linear") == 2
    assert labels(report)[:5] == ["to", "linear", "relu", "linear", "to"]  # the targets follow when they are needed
    found = {call.label: call.origins[0] for call in report.program.calls}
    assert found["linear"].file.endswith("test_profile.py")
    assert found["linear"].module == "2"
    assert profile_.idle is not None
    idle = profile_.idle.host_late_ns + profile_.idle.launch_ns + profile_.idle.dependency_ns
    assert idle + profile_.idle.unknown_ns + profile_.device_busy_ns == pytest.approx(profile_.profiled_ns)
    parts = profile_.overhead_ns + profile_.waiting_ns + profile_.loader_ns + profile_.remainder_ns
    assert parts == pytest.approx(profile_.profiled_ns)
    assert {sync.kind for sync in profile_.host_syncs if sync.phase == "copy"} == {"Memcpy HtoD (Pageable -> Device)"}
    assert any(sync.kind == "aten::item" for sync in profile_.host_syncs)
    assert all(row.work_ns > 0 for row in profile_.calls)
    assert taken.bound.input_ns + taken.bound.device_ns + taken.bound.host_ns == pytest.approx(profile_.profiled_ns)


@pytest.mark.gpu
def test_a_function_on_a_gpu_does_not_count_the_wait_that_is_ours() -> None:
    model, x = torch.nn.Linear(256, 256).cuda(), torch.randn(16, 256, device="cuda")
    report = profile(model, x)
    assert labels(report) == ["linear"]
    assert report.overhead is not None
    assert report.overhead.host_syncs == ()
    assert report.overhead.waiting_ns > 0
