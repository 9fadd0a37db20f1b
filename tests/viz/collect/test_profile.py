"""Profiles of functions, blocks and scripts on this machine; the sampler by itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event, Thread
from time import sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter

import nimble_viz
from nimble_core import Nimble, Options, TrainStep
from nimble_core.profiling.cupti import profiler_runs
from nimble_core.utils.errors import DeviceError, InputError
from nimble_viz.cli.command import main
from nimble_viz.collect.profile import Profiling, Sampler, _Session, profile, profile_script
from nimble_viz.traces.profiler import profile_eager

NEXT = _BaseDataLoaderIter.__next__

SCRIPT = """
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.outer = torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def main(batches, workers):
    data = torch.utils.data.TensorDataset(torch.randn(batches * 4, 8), torch.randint(0, 2, (batches * 4,)))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained", len(sys.argv))

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    # Others have hooks too: an engine that was prepared earlier in this process hears of optimizers' steps.
    hooks = (_global_forward_hooks, _global_forward_pre_hooks, _global_optimizer_post_hooks)
    argv, path, before = sys.argv, sys.path[:], [dict(one) for one in hooks]
    yield
    assert _BaseDataLoaderIter.__next__ is NEXT
    assert [dict(one) for one in hooks] == before
    assert _get_current_dispatch_mode() is None
    assert not torch._C._autograd._profiler_enabled()
    assert (sys.argv, sys.path) == (argv, path)


def labels(report: nimble_viz.Report) -> list[str]:
    return [call.label for call in report.program.calls]


def test_an_interrupted_script_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "stops.py"
    path.write_text(
        "import torch\nx = torch.ones(9, 9)\nfor _ in range(99):\n    x = x @ x / 9\nraise KeyboardInterrupt\n"
    )
    report, code = profile_script(path, [])
    assert (report.complete, code) == (False, 130)


def test_an_exit_code_of_a_script_without_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ends.py"
    path.write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(SystemExit) as ended:
        profile_script(path, [])
    assert ended.value.code == 5
    assert "nothing was profiled" in capsys.readouterr().err


def test_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, code = profile_script(script, ["30", "0", "0"])
    assert (code, capsys.readouterr().out) == (0, "trained 4\n")
    taken, profile_ = report.sampling, report.overhead
    assert taken is not None
    assert profile_ is not None
    assert (taken.subject, taken.iteration) == ("train.py", "one batch of the data loader")
    assert (taken.timed, taken.profiled) == (10, 3)
    assert taken.loader_ns > 0
    assert [one.phase for one in profile_.phases] == ["loader", "forward", "backward", "optimizer"]
    assert profile_.loader_ns > 0
    assert labels(report).count("linear") == 2
    linear, relu = (next(c for c in report.program.calls if c.label == name) for name in ("linear", "relu"))
    lines = SCRIPT.splitlines()
    assert (linear.module, linear.origins[0].file) == ("inner", "train.py")
    assert "torch.relu(self.inner(x))" in lines[linear.origins[0].line - 1]
    assert (relu.module, relu.origins[0].line) == ("", linear.origins[0].line)
    backward = [call for call in report.program.calls if call.phase == "backward"]
    assert "cross_entropy" in lines[backward[0].origins[0].line - 1]
    assert [call.module for call in backward if call.label == "mm"] == ["outer", "outer", "inner"]
    eager = report.measurement("eager")
    assert eager is not None
    assert len(eager.samples_ns) == 10
    assert profile_.unprofiled_ns == eager.median_ns


def test_workers_of_the_loader_and_an_early_end(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, code = profile_script(script, ["40", "1", "5"], warmup=1, timed=2, profiled=1, stop=True)
    assert (code, capsys.readouterr().out) == (0, "")  # it ended before it printed or failed
    assert report.sampling is not None
    assert (report.sampling.iteration, report.sampling.timed) == ("one batch of the data loader", 2)
    assert report.overhead is not None
    assert report.overhead.phases[0].phase == "loader"


def test_a_loop_that_ends_too_soon(script: Path) -> None:
    report, _ = profile_script(script, ["5", "0", "0"])
    assert report.sampling is not None
    assert report.sampling.iteration == "one batch of the data loader"
    assert "before it was warm" in report.warnings[0]
    assert labels(report).count("linear") == 2


@pytest.mark.parametrize("iterations", [4, 9, 17])
def test_a_loop_that_ends_early_does_not_mix_cold_and_warm(iterations: int) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    run = profile()

    def ends_early() -> None:
        with run:
            for at in range(40):
                if at == iterations:
                    raise KeyboardInterrupt
                model(x)

    with pytest.raises(KeyboardInterrupt):
        ends_early()
    report, taken = run.report, run.report.sampling
    assert taken is not None
    assert (taken.iteration, taken.seen) == ("one call of the outermost module", iterations)
    assert (taken.timed, taken.profiled, taken.loader_ns) == (0, min(iterations - 3, 2), -1.0)
    assert report.measurements == ()
    assert "18 are enough" in report.warnings[0]
    assert ("later ones took" in report.warnings[0]) == (iterations > 7)
    assert "under the profiler" in report.to_text().split("\n\n")[0]


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


def test_what_fails_after_an_interrupt_does_not_come_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(session: object) -> None:
        raise AssertionError("Profiler must be initialized")

    monkeypatch.setattr(_Session, "recording", fails)
    with pytest.raises(KeyboardInterrupt) as raised, profile():
        raise KeyboardInterrupt
    assert raised.value.__notes__ == [
        "what was profiled before cannot be shown: AssertionError: Profiler must be initialized"
    ]
    with pytest.raises(AssertionError, match="must be initialized"), profile():
        pass


def test_as_many_iterations_as_are_said_to_be_enough_are() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for enough, counts in ((18, {}), (7, {"warmup": 1, "timed": 1, "profiled": 1})):
        with profile(**counts) as run:
            for _ in range(enough):
                model(x)
        assert run.sampler.enough == enough
        assert run.report.sampling is not None
        assert run.report.sampling.iteration == "one call of the outermost module"
        with profile(**counts) as run:
            for _ in range(enough - 1):
                model(x)
        assert run.report.sampling is not None
        assert run.report.sampling.timed == 0
        assert "before it was warm" in run.report.warnings[0]


@pytest.mark.parametrize(("counts", "first"), [({}, False), ({"warmup": 0}, True)])
def test_an_early_end_shows_no_step_that_makes_the_optimizers_state(counts: dict[str, int], first: bool) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(**counts) as run:  # type: ignore[call-overload]
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one step of the optimizer"
    assert "before it was warm" in run.report.warnings[0]
    assert ("zeros_like" in labels(run.report)) is first


@pytest.mark.parametrize("batches", [1, 2, 4, 32])
def test_gradients_that_accumulate_belong_to_one_step(batches: int) -> None:
    model, loss = torch.nn.Linear(4, 2), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile(warmup=0, timed=2, profiled=1) as run:
        for at in range(batches * 9):
            loss(model(torch.ones(2, 4)), torch.ones(2, 2)).backward()
            if at % batches == batches - 1:
                optimizer.step()
                optimizer.zero_grad()
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one step of the optimizer"
    assert labels(run.report).count("linear") == batches
    assert run.report.warnings == ()


def test_gradients_that_no_optimizer_takes() -> None:
    model = torch.nn.Linear(4, 2)
    with profile(warmup=0, timed=2, profiled=1) as run:
        for _ in range(80):
            model(torch.ones(2, 4)).sum().backward()
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one call of the outermost module"
    assert "no optimizer stepped twice within 66 calls" in run.report.warnings[0]
    with profile() as run:
        for _ in range(12):
            model(torch.ones(2, 4)).sum().backward()
    assert "no optimizer stepped twice, so all of it was profiled" in run.report.warnings[0]


def test_a_block_is_profiled_once() -> None:
    run = profile()
    with run:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(InputError, match="entered before"), run:
        pass
    assert labels(run.report) == ["ones", "ones", "mm"]


def test_of_two_threads_one_profiles() -> None:
    inside, done, together = Event(), Event(), Barrier(2)
    outcomes: list[object] = []

    def hold() -> None:
        with profile() as run:
            torch.ones(2) + 1
            inside.set()
            done.wait(60)
        outcomes.append(labels(run.report))

    holder = Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    try:
        with pytest.raises(DeviceError, match="another profiler"):
            profile(torch.ones, 2)
        with pytest.raises(DeviceError, match="another profiler"):
            profile().__enter__()
        with pytest.raises(DeviceError, match="another profiler"):
            profile_eager(lambda: None, device="cpu", synchronize=lambda: None)
    finally:
        done.set()
        holder.join()
    assert outcomes == [["ones", "add"]]

    def race() -> None:
        for _ in range(5):
            together.wait(60)
            try:
                outcomes.append(labels(profile(torch.ones, 2, warmup=0, timed=0, profiled=1)))
            except DeviceError as refused:
                outcomes.append(refused.what)

    racers = [Thread(target=race) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(outcomes) == 11
    assert all(one in (["ones"], "another profiler is running in this process") for one in outcomes[1:])
    assert profile(torch.ones, 2).sampling is not None


def test_a_profiler_of_another_thread_is_left_alone() -> None:
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(DeviceError) as error:
            profile(torch.ones, 2)
        refused.append(error.value.what)

    with torch.profiler.profile() as profiler:
        torch.ones(2) + 1
        thread = Thread(target=second)
        thread.start()
        thread.join()
    assert refused == ["another profiler is running in this process"]
    assert any(event.name == "aten::add" for event in profiler.events())


def test_the_command_line(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "a.nimble", tmp_path / "a.html"
    code = main(["profile", "--save", str(out), "--html", str(html), str(script), "30", "0", "3"])
    assert code == 3  # the script's own
    text = capsys.readouterr().out
    assert text.startswith("trained 4\nnimble_viz: train.py\n")
    assert "bound:" in text
    report = nimble_viz.load(out)
    assert report.sampling is not None
    assert "<html" in html.read_text()
    assert main(["profile", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["profile", "--timed", "-1", str(script)]) == 2
    assert "timed=-1" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert main(["profile", str(broken)]) == 2
    assert "cut short" in capsys.readouterr().err


def test_errors_of_a_script_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("raise LookupError('mine')\n")
    with pytest.raises(LookupError, match="mine"):
        profile_script(path, [])
    path.write_text("x = 1\n")
    with pytest.raises(InputError, match="nothing was profiled"):
        profile_script(path, [])


def test_a_script_that_raises_is_reported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "wrong.py", tmp_path / "out.nimble"
    path.write_text(
        "import torch\nnet = torch.nn.Linear(4, 4)\n"
        "for _ in range(40):\n    net(torch.ones(2, 4))\nraise LookupError('mine')\n"
    )
    with pytest.raises(LookupError, match="mine"):
        main(["profile", "--save", str(out), str(path)])
    assert capsys.readouterr().out.startswith("nimble_viz: wrong.py\n")
    taken = nimble_viz.load(out).sampling
    assert taken is not None
    assert (taken.iteration, taken.timed, taken.profiled) == ("one call of the outermost module", 10, 3)


def test_what_is_no_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "a.nimble"
    profile(torch.ones, 2, warmup=0, timed=1, profiled=1).save(report)
    renamed = report.rename(tmp_path / "a.dat").read_bytes()
    report.write_bytes(renamed)
    assert main(["profile", str(report)]) == 2
    said = capsys.readouterr().err
    assert "is a report" in said
    assert f"show {report}" in said
    assert main(["profile", str(tmp_path / "a.dat")]) == 2
    assert "is no Python script" in capsys.readouterr().err


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


def test_a_block_with_a_loop_of_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU()))
    x = torch.randn(2, 4)
    with profile(warmup=1, timed=5, profiled=2) as run, torch.no_grad():
        for _ in range(20):
            model(x)
    report = run.report
    assert report.sampling is not None
    assert report.sampling.iteration == "one call of the outermost module"
    assert labels(report) == ["linear", "relu"]
    assert [call.module for call in report.program.calls] == ["0", "1.0"]
    assert not model._forward_pre_hooks


def test_a_block_with_prepared_modules_and_steps() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    options = Options(fuse="none", tune="off")
    net = Nimble(model.eval(), options).prepare(x)
    other = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    step = TrainStep(other, lambda out: out.sum(), optimizer, options=options).prepare(x)
    with profile(warmup=1, timed=5, profiled=2) as run:
        for _ in range(12):
            run.step()
            net(x)
            step(x)
    assert "addmm" in " ".join(labels(run.report)) or "linear" in " ".join(labels(run.report))
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="forward hook"):
        net(x)
    hook.remove()
    net(x)


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


def test_a_function_that_does_not_run_is_refused() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.randn(2)

    async def later() -> None:
        torch.randn(2)

    with pytest.raises(InputError, match="returned a generator, and none of it ran"):
        profile(batches)
    with pytest.raises(InputError, match="returned a coroutine"):
        profile(later)


def test_the_floor_is_that_of_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        report = profile(torch.add, torch.ones(1, device="cpu"), 1, warmup=0, timed=1)
    assert report.overhead is not None
    assert "a floor of 0 ns" not in report.overhead.source
    assert not any("meta" in one for one in report.warnings)


def test_a_script_that_goes_elsewhere_and_keeps_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "away").mkdir()
    path = tmp_path / "away.py"
    path.write_text(
        "import io, os, sys, torch\nos.chdir('away')\nsys.stdout = io.StringIO()\n"
        "for _ in range(25):\n    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert main(["profile", "--save", "r.nimble", str(path)]) == 0
    finally:
        os.chdir(before)
    assert (tmp_path / "r.nimble").exists()
    assert "nimble_viz: away.py" in capsys.readouterr().out


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
    assert "printing a tensor" in report.to_text()
    assert [call.operator for call in report.eager_calls if "nimble" in call.operator] == ["nimble.print"] * 2


def test_operators_on_meta_are_said_to_compute_nothing() -> None:
    model, x = torch.nn.Linear(8, 8).to("meta"), torch.randn(2, 8, device="meta")
    (warning,) = (one for one in profile(model, x, warmup=0, timed=1).warnings if "meta" in one)
    assert "hold no values" in warning
    assert not any("meta" in one for one in profile(torch.nn.Linear(8, 8), torch.randn(2, 8), warmup=0).warnings)


def test_a_block_without_a_loop_is_profiled_whole() -> None:
    with profile() as run:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(InputError, match="no report yet"):
            _ = run.report
    assert labels(run.report) == ["ones", "ones", "mm"]
    assert "no loop was found" in run.report.warnings[0]
    assert run.report.measurements == ()


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


@contextmanager
def joined(thread: Thread) -> Iterator[None]:
    yield
    thread.join()


def test_other_threads_say_nothing() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def loop() -> None:
        for _ in range(20):
            model(x)

    with profile() as run:
        torch.mm(x.T, x)
        thread = Thread(target=loop)
        thread.start()
        thread.join()
    assert "no loop was found" in run.report.warnings[0]
    assert "ran in other threads" in run.report.warnings[1]
    assert labels(run.report) == ["mm"]
    thread = Thread(target=loop)
    with pytest.raises(InputError, match="ran in other threads") as refused, profile(), joined(thread):
        thread.start()
    assert "in the thread that runs the loop" in refused.value.fix


def test_hooks_of_others_are_called_meanwhile_and_stay() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    engine = Nimble(model, Options(policy="single", tune="off", fuse="none")).prepare(x)  # follows optimizers for good
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard: list[str] = []
    others = [
        register_optimizer_step_post_hook(lambda *_: heard.append("step")),
        register_module_forward_hook(lambda *_: heard.append("forward")),
    ]
    try:
        with profile(warmup=0, timed=1, profiled=1) as run:
            for _ in range(12):
                model(x).sum().backward()
                optimizer.step()
        assert heard == ["forward", "step"] * 12
        assert others[0].id in _global_optimizer_post_hooks
        assert others[1].id in _global_forward_hooks
    finally:
        for other in others:
            other.remove()
    assert run.report.sampling is not None
    assert run.report.sampling.iteration == "one step of the optimizer"
    assert torch.equal(engine(x), model(x))


def test_what_cannot_be_profiled() -> None:
    with pytest.raises(InputError, match="a int cannot be profiled"):
        profile(3)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="profiled=0"):
        profile(torch.ones, 2, profiled=0)
    with pytest.raises(InputError, match="nothing was profiled"), profile():
        pass
    with torch.profiler.profile(), pytest.raises(DeviceError, match="another profiler"):
        profile(torch.ones, 2)


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


# The sampler.


def ticks(sampler: Sampler, *kinds: str, every: int = 100) -> list[str]:
    return [sampler.tick(kind, 0, every * at) for at, kind in enumerate(kinds)]  # type: ignore[arg-type]


def test_the_sampler_warms_up_times_profiles_and_forgets() -> None:
    sampler = Sampler(2, 3, 2)
    assert ticks(sampler, *["loader"] * 14) == [
        "", "", "watch no more", "stop first", "", "", "", "profile", "tick", "tick", "stop", "forget", "", ""
    ]  # fmt: skip
    assert sampler.times_ns == [100.0] * 3
    assert sampler.done
    assert sampler.seen == 14


def test_the_sampler_may_profile_at_once() -> None:
    assert ticks(Sampler(0, 0, 1), *["loader"] * 8) == [
        "",
        "",
        "watch no more",
        "profile",
        "tick",
        "stop",
        "forget",
        "",
    ]


def test_the_sampler_prefers_what_tells_more() -> None:
    sampler = Sampler(0, 1, 1)
    ticks(sampler, *["loader", "module", "optimizer"] * 3)
    assert sampler.chosen == ("loader", 0)
    sampler = Sampler(0, 1, 1)
    ticks(sampler, *["module", "optimizer"] * 3)
    assert sampler.chosen == ("optimizer", 0)
    sampler = Sampler(0, 1, 1)
    ticks(sampler, "module", "step")
    assert sampler.chosen == ("step", 0)
    # One batch, many modules: the second batch is waited for.
    sampler = Sampler(0, 1, 1)
    ticks(sampler, "loader", *["module"] * 20)
    assert sampler.chosen is None
    ticks(sampler, "loader")
    assert sampler.chosen == ("loader", 0)
    # A loader that comes once, before the loop, is not waited for for ever.
    sampler = Sampler(0, 1, 1)
    ticks(sampler, "loader", *["module"] * 40)
    assert sampler.chosen == ("module", 0)


def test_the_wait_for_the_loader_is_counted_by_iteration() -> None:
    sampler = Sampler(0, 2, 1)
    for at in range(8):
        sampler.tick("loader", 0, 100 * at)
        sampler.waited(30)
        sampler.tick("module", 1, 100 * at + 50)
    assert sampler.waits_ns == [30.0, 30.0]
    assert sampler.times_ns == [100.0, 100.0]


@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["loader", "optimizer", "module"]), st.just(0)), min_size=12, max_size=60),
)  # fmt: skip
def test_each_order_comes_once_and_in_turn(
    warmup: int, timed: int, profiled: int, given_: list[tuple[str, int]]
) -> None:
    sampler = Sampler(warmup, timed, profiled)
    said = [sampler.tick(kind, who, 10 * at) for at, (kind, who) in enumerate(given_)]  # type: ignore[arg-type]
    orders = [order for order in said if order]
    first = [[], [], ["stop first"], ["tick first", "stop first"]][min(warmup, 3)]
    whole = ["watch no more", *first, "profile", *["tick"] * profiled, "stop", "forget"]
    assert orders == whole[: len(orders)]
    assert len(sampler.times_ns) <= timed
    assert sampler.done == (orders == whole)
