"""Many engines in one process: prepared, replayed and destroyed in any order, from any thread; nothing is left."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule, run_state_machine_as_test
from torch import nn

from nimble_core import DeviceError, InputError, Nimble, Options
from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture, device_for, schedule_by
from nimble_core.ir.costs import uniform_costs
from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.signature import Signature

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Branches(nn.Module):
    """Independent branches, each with results that have to stay its own."""

    def __init__(self, branches: int = 3, features: int = 8) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(features, features) for _ in range(branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x).tanh() * (i + 1) for i, branch in enumerate(self.branches)]).sum(0)


class InPlace(nn.Module):
    """Memory written by several calls, and a constant."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = torch.empty_like(x)
        made[:, :4] = x[:, :4].exp()
        made[:, 4:] = x[:, 4:].sin()
        made += torch.arange(8, device=x.device)
        return {"made": made * 2, "top": made.max(1).values}


class Residual(nn.Module):
    """One call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.norm(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"branches": Branches, "in place": InPlace, "residual": Residual}
OPTIONS = (
    Options(tune="off", policy="single"),
    Options(tune="off", policy="nimble"),
    Options(tune="off", policy="nimble", max_streams=2, outputs="static"),
)


def made(name: str, device: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().to(device).eval()


def drawn(device: str, rows: int = 4) -> torch.Tensor:
    # On the host: torch's generator of a GPU refuses to draw while any thread captures.
    return torch.randn(rows, 8).to(device)


def check(net: Nimble, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


class Engines(RuleBasedStateMachine):
    """Engines of several models, replayed and destroyed in any order."""

    device = "cpu"
    nets = Bundle("nets")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Nimble] = []

    @rule(target=nets, name=st.sampled_from(sorted(MODELS)), options=st.sampled_from(OPTIONS))
    def prepare(self, name: str, options: Options) -> Any:
        model = made(name, self.device)
        net = Nimble(model, options).prepare(drawn(self.device))
        self.open.append(net)
        return net, model

    @rule(net=nets, rows=st.sampled_from([4, 5]))
    def prepare_again(self, net: tuple[Nimble, nn.Module], rows: int) -> None:
        net[0].prepare(drawn(self.device, rows))

    @rule(net=nets)
    def replay(self, net: tuple[Nimble, nn.Module]) -> None:
        check(*net, drawn(self.device))

    @rule(net=nets)
    def replay_from_another_thread(self, net: tuple[Nimble, nn.Module]) -> None:
        in_threads([lambda: check(*net, drawn(self.device))])

    @rule(target=nets, net=consumes(nets))
    def close_and_prepare(self, net: tuple[Nimble, nn.Module]) -> Any:
        net[0].close()
        net[0].prepare(drawn(self.device))
        return net

    @rule(net=consumes(nets))
    def close(self, net: tuple[Nimble, nn.Module]) -> None:
        self.open.remove(net[0])
        net[0].close()
        net[0].close()
        assert net[0].engines == ()

    @rule(target=nets, net=consumes(nets))
    def drop(self, net: tuple[Nimble, nn.Module]) -> Any:
        self.open.remove(net[0])
        return multiple()

    def teardown(self) -> None:
        while self.open:
            self.open.pop().close()


class EnginesOnCuda(Engines):
    """The same on a GPU."""

    device = "cuda"


@pytest.mark.parametrize("machine", [Engines, pytest.param(EnginesOnCuda, marks=pytest.mark.gpu)])
def test_engines_come_and_go_in_any_order(machine: type[Engines]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=12, deadline=None))


def in_threads(jobs: list[Callable[[], None]], timeout_s: float = 120.0) -> None:
    """Run all jobs at once; raise what the first one raised, or if one does not end."""
    failed: list[BaseException] = []
    together = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            together.wait()
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"


@pytest.mark.parametrize("device", DEVICES)
def test_some_prepare_while_others_replay_and_destroy(device: str) -> None:
    nets = [(name, made(name, device)) for name in MODELS]
    engines = [(Nimble(model, OPTIONS[1]).prepare(drawn(device)), model) for _, model in nets]
    done = threading.Event()
    replays = [0] * len(engines)

    def replay(index: int) -> Callable[[], None]:
        def job() -> None:
            while not done.is_set():
                check(*engines[index], drawn(device))
                replays[index] += 1

        return job

    def come_and_go() -> None:
        try:
            for turn in range(6):
                name = sorted(MODELS)[turn % 3]
                model = made(name, device)
                net = Nimble(model, OPTIONS[turn % 3]).prepare(drawn(device))
                check(net, model, drawn(device))
                net.close()
        finally:
            done.set()

    in_threads([come_and_go, *(replay(index) for index in range(len(engines)))])
    assert min(replays) > 0
    for net, model in engines:
        check(net, model, drawn(device))
        net.close()


@pytest.mark.parametrize("device", DEVICES)
def test_threads_prepare_at_once(device: str) -> None:
    def job(turn: int) -> Callable[[], None]:
        def come_and_go() -> None:
            for round_ in range(3):
                model = made(sorted(MODELS)[(turn + round_) % 3], device)
                net = Nimble(model, OPTIONS[round_]).prepare(drawn(device))
                check(net, model, drawn(device))
                net.close()

        return come_and_go

    in_threads([job(turn) for turn in range(3)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["one stream", "several streams"])
def test_threads_replay_one_engine(device: str, options: Options) -> None:
    model = made("branches", device)
    net = Nimble(model, options).prepare(drawn(device))

    def job() -> None:
        for _ in range(20):
            check(net, model, drawn(device))

    in_threads([job] * 4)
    net.close()


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:.*runs in eager")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", ["branches", "residual"])
def test_threads_train_one_engine(name: str, locked: bool, device: str) -> None:
    """Each thread has inputs of its own.

    On a GPU a forward may overwrite what an earlier one has saved; the backward of that one says so. A thread that
    holds a lock from the forward to the end of the backward does not meet it.
    """
    model, eager = made(name, device).train(), made(name, device).train()
    example = drawn(device).requires_grad_()
    net = Nimble(model, OPTIONS[1]).prepare(example, training=True)
    lock = threading.Lock() if locked else nullcontext()
    early: list[InputError] = []

    def job(seed: int) -> None:
        inputs = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(4, 8, generator=inputs).to(device).requires_grad_()
            expected = eager(x)
            gradients = torch.autograd.grad(expected.square().sum(), [x, *eager.parameters()])
            with lock:
                out = net(x)
                torch.testing.assert_close(out, expected)
                try:
                    found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
                except InputError as error:
                    early.append(error)
                    continue
            torch.testing.assert_close(found, gradients)

    in_threads([partial(job, seed) for seed in range(8)])
    assert all("the backward of an earlier forward" in str(error) for error in early)
    assert not early or (device == "cuda" and not locked)
    assert all(one.grad is None for one in model.parameters())
    net.close()


@pytest.mark.usefixtures("switching")
@pytest.mark.filterwarnings("ignore:.*runs in eager")
@pytest.mark.parametrize("device", DEVICES)
def test_backwards_of_eight_threads_add_up(device: str) -> None:
    """On a GPU what is in ``.grad`` is memory that the next backward overwrites."""
    model, eager = made("branches", device).train(), made("branches", device).train()
    net = Nimble(model, OPTIONS[1]).prepare(drawn(device), training=True)
    inputs = [drawn(device) for _ in range(8)]
    for x in inputs:
        eager(x).square().sum().backward()
    lock = threading.Lock() if device == "cuda" else nullcontext()

    def job(x: torch.Tensor) -> None:
        with lock:
            net(x).square().sum().backward()

    for _ in range(10):
        in_threads([partial(job, x) for x in inputs])
        found = [one.grad for one in model.parameters()]
        torch.testing.assert_close(found, [one.grad for one in eager.parameters()], rtol=1e-5, atol=1e-5)
        net.zero_grad()
    net.close()


@pytest.mark.parametrize("device", DEVICES)
def test_closing_waits_for_the_run_and_later_runs_are_refused(device: str) -> None:
    model = made("branches", device)
    other, rest = Nimble(model, OPTIONS[1]).prepare(drawn(device)), made("residual", device)
    remaining = Nimble(rest, OPTIONS[1]).prepare(drawn(device))
    executable = other.engines[0].executable
    refused: list[str] = []

    def run_until_closed() -> None:
        x = drawn(device)
        with torch.no_grad():
            expected = model(x)
        while True:
            try:
                (found,) = executable.run([x])
            except DeviceError as error:
                refused.append(error.what)
                return
            torch.testing.assert_close(found, expected)

    def close() -> None:
        for _ in range(20):
            check(remaining, rest, drawn(device))
        executable.close()

    in_threads([run_until_closed, run_until_closed, close])
    assert ["closed" in what for what in refused] == [True, True]
    check(remaining, rest, drawn(device))
    remaining.close()


# -- nothing is left behind -------------------------------------------------------------------------------------------


def come_and_go(device: str, rounds: int) -> None:
    """Prepare, replay and destroy; every other engine is dropped instead of closed."""
    model = made("branches", device)
    for turn in range(rounds):
        x = drawn(device)
        net = Nimble(model, OPTIONS[1 + turn % 2]).prepare(x)
        net(x)
        if turn % 2:
            net.close()


@pytest.fixture
def settled() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _workers() -> int:
    """Threads of engines: other libraries start some whenever they like."""
    return sum(thread.name.startswith("nimble") for thread in threading.enumerate())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.usefixtures("settled")
def test_rounds_on_the_host_leave_nothing_behind() -> None:
    come_and_go("cpu", 30)
    gc.collect()
    threads, descriptors, tensors = _workers(), _descriptors(), _tensors()
    resident = [_resident_nbytes()]
    for _ in range(4):
        come_and_go("cpu", 250)
        gc.collect()
        resident.append(_resident_nbytes())
    assert _workers() == threads
    assert _descriptors() <= descriptors
    assert _tensors() <= tensors
    # Allocators keep what they once had: what counts is that it does not go on.
    growth = min(later - earlier for earlier, later in itertools.pairwise(resident))
    assert growth < 1 << 20, f"{growth} bytes more in every 250 rounds: {resident}"


def _tensors() -> int:
    return len(_all_tensors())


def _all_tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


class Classifier(nn.Module):
    """Norms that are folded into weights, and products beside each other that are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.heads = nn.ModuleList(nn.Linear(8 * 36, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.heads[0](x) * self.heads[1](x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
@pytest.mark.parametrize("how", ["inference", "training", "whole step"])
def test_what_is_closed_frees_its_tensors_without_pythons_collector(how: str, fuse: Any, device: str) -> None:
    """Which knows nothing of a GPU's memory, and may come long after that has run out."""
    x, y = torch.randn(4, 3, 8, 8, device=device), torch.randn(4, 16, device=device)
    options = Options(fuse=fuse, tune="off")

    def come_and_go() -> None:
        model = Classifier().to(device).train(how != "inference")
        if how == "whole step":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            step = TrainStep(model, nn.functional.mse_loss, optimizer, options=options).prepare(x, y)
            step(x, y)
            step.close()
        else:
            net = Nimble(model, options).prepare(x, training=how == "training")
            out = net(x)
            if how == "training":
                out.sum().backward()
            net.close()

    come_and_go()  # what is made once in a process stays
    gc.collect()
    known = _all_tensors()
    gc.disable()
    try:
        come_and_go()
        left = _all_tensors()
    finally:
        gc.enable()
    kept = {id(one) for one in known}
    new = [one for one in left if id(one) not in kept and type(one) in (torch.Tensor, nn.Parameter)]
    assert [tuple(one.shape) for one in new if one.numel() and not one.is_meta] == []


def _used_on_gpu_nbytes() -> int:
    """By this process, what the driver keeps for it included; by all where the driver does not tell them apart."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]):
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            pid, _, mebibytes = line.partition(",")
            if pid.strip() == str(os.getpid()) and mebibytes.strip().isdecimal():
                return int(mebibytes) << 20
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.gpu
@pytest.mark.usefixtures("settled")
def test_a_thousand_rounds_on_a_gpu_leave_nothing_behind() -> None:
    from nimble_core.runtime.cuda import streams as cuda_streams

    def held() -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "streams": sum(len(pool) for pool in cuda_streams._STREAMS.values()),
            "tensors": _tensors(),
            "threads": _workers(),
            "descriptors": _descriptors(),
            "used": _used_on_gpu_nbytes(),
        }

    come_and_go("cuda", 50)
    seen = [held()]
    for _ in range(4):
        come_and_go("cuda", 250)
        seen.append(held())
    used = [one.pop("used") for one in seen]
    before, after = seen[0], seen[-1]
    assert {name: after[name] - before[name] for name in before if after[name] > before[name]} == {}
    # Whatever leaks in each round (an event, a graph, a pool) takes more than 16 KiB. What counts is that it goes on:
    # the driver's own heaps grow by 2 MiB at a time.
    growth = min(later - earlier for earlier, later in itertools.pairwise(used))
    assert growth <= 4 << 20, f"{growth} bytes of the GPU are gone in every 250 rounds: {used}"


# -- more branches than torch has streams -----------------------------------------------------------------------------


WIDTH = 70


@pytest.mark.parametrize("device", DEVICES)
def test_seventy_branches_on_as_many_streams(device: str) -> None:
    torch.manual_seed(0)
    model = Branches(WIDTH).to(device).eval()
    signature = Signature([drawn(device)], {})
    where = device_for(signature.device)
    where.warm_up(model, signature.tensors, {})
    recorded = record_static(where, model, signature, strict=True, step=Stopwatch())
    schedule = schedule_by(recorded, "nimble", uniform_costs(recorded.graph.size), None)
    assert schedule.streams == WIDTH
    executable = capture(where, recorded, schedule)
    for _ in range(5):
        x = drawn(device)
        with torch.no_grad():
            torch.testing.assert_close(executable.run([x])[0], model(x))
    executable.close()


def test_seventy_branches_on_the_fake_device() -> None:
    torch.manual_seed(0)
    model = Branches(WIDTH).eval()
    signature, device = Signature([drawn("cpu")], {}), FakeDevice()
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    for lanes in (WIDTH, 33):
        schedule = plan_streams(
            recorded.graph,
            [index % lanes for index in range(recorded.graph.size)],
            policy="round robin",
        )
        assert schedule.streams == lanes
        executable = capture(device, recorded, schedule)
        x = drawn("cpu")
        with torch.no_grad():
            assert torch.equal(executable.run([x])[0], model(x))
        executable.close()


@pytest.mark.parametrize("device", DEVICES)
def test_replays_go_on_while_the_same_model_is_prepared_again(device: str) -> None:
    model = made("branches", device)
    net = Nimble(model, OPTIONS[0]).prepare(drawn(device, 4)).prepare(drawn(device, 5))
    done = threading.Event()

    def replay() -> None:
        while not done.is_set():
            check(net, model, drawn(device))

    def prepare_again() -> None:
        try:
            for turn in range(30):
                net.prepare(drawn(device, 4 + turn % 2))
        finally:
            done.set()

    in_threads([replay, replay, prepare_again])
    assert len(net.engines) == 2
    net.close()


def test_threads_that_prepare_at_once_leave_the_random_state() -> None:
    model = made("branches", "cpu")
    before = random.getstate(), torch.get_rng_state()
    x = torch.ones(4, 8)
    for _ in range(20):
        in_threads([lambda: Nimble(model, OPTIONS[1]).prepare(x).close() and None] * 3)
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
