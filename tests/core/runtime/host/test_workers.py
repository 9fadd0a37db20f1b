"""Workers: threads per operator, interrupts, forks, and their end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from nimble_core.runtime.host.device import HostExecutable
from nimble_core.utils.errors import DeviceError
from tests.support.host_models import (
    Branches,
    Prepared,
    eager,
    same,
)
from tests.support.interrupts import interrupted


def test_runs_from_new_threads_leave_the_process_its_number_of_threads() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    usual = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        executables = [made.wide(2) for _ in range(4)]
        together = threading.Barrier(len(executables))
        seen: list[int] = []

        def work(executable: HostExecutable) -> None:
            together.wait()
            for _ in range(10):
                executable.replay()
            seen.append(torch.get_num_threads())

        def in_threads(work: Callable[..., None], args: Sequence[Any]) -> None:
            threads = [threading.Thread(target=work, args=(arg,)) for arg in args]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        in_threads(work, executables)
        in_threads(lambda _: seen.append(torch.get_num_threads()), [None])
        assert seen == [5] * 5
        assert torch.get_num_threads() == 5
        for executable in executables:
            executable.close()
    finally:
        torch.set_num_threads(usual)


def test_closing_ends_the_workers_and_using_it_afterwards_raises() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    others = threading.active_count()
    executable = made.wide(2)
    executable.replay()
    assert threading.active_count() == others + 1
    executable.close()
    executable.close()
    with pytest.raises(DeviceError, match="closed"):
        executable.run([torch.randn(3, 8)])
    with pytest.raises(DeviceError, match="closed"):
        made.device.observe(executable, made.recording, 1)
    _until(lambda: threading.active_count() == others)


def test_an_executable_that_nobody_uses_is_collected_with_its_workers() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    others = threading.active_count()
    executable = made.wide(2)
    executable.replay()
    gone = weakref.ref(executable)
    del executable
    gc.collect()
    assert gone() is None
    _until(lambda: threading.active_count() == others)


def _until(reached: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(500):
        if reached():
            return
        waited.wait(0.01)
    raise AssertionError("not reached within five seconds")


def in_a_process(work: Callable[[], None], seconds: float) -> None:
    """Where it may hang, and interrupts reach nobody else."""
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join(seconds)
    hangs = process.is_alive()
    if hangs:
        process.kill()
        process.join()
    assert not hangs, "it hangs"
    assert process.exitcode == 0


def _interrupted_everywhere() -> None:
    gc.disable()  # Python itself ignores an interrupt while a thread is collected
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, x = Branches(2).eval(), torch.randn(3, 8)
    executable = Prepared(model, x).wide(2)
    (expected,), threads = eager(model, [x]), threading.active_count()
    for again in (0, 1, 2, 5):
        with torch.autocast("cpu", enabled=False):
            for _ in interrupted(lambda: executable.run([x]), again):
                assert torch.is_grad_enabled()
                assert torch.get_num_threads() == 2
                assert torch.equal(executable.run([x])[0], expected)
                assert threading.active_count() == threads + 1
    executable.close()
    assert threading.active_count() == threads


def test_an_interrupt_at_any_moment_leaves_an_executable_on_several_workers_usable() -> None:
    in_a_process(_interrupted_everywhere, 120)


_reached: list[Callable[[], object]] = []
"""What a call of ``_reach`` does."""


@torch.library.custom_op("nimble_tests::reach", mutates_args=())
def _reach(x: torch.Tensor) -> torch.Tensor:
    for act in _reached:
        act()
    return x + 1


def _in_a_child(work: Callable[[], None]) -> None:
    """Do ``work`` in a forked process."""
    child = os.fork()
    if not child:
        signal.alarm(30)  # nobody waits for a child that hangs
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, or hung"


class Reaching(Branches):
    """Calls ``_reach`` between branches that workers run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_reach(super().forward(x)[0]))


def _forked(in_a_run: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # OpenMP's own threads do not come along either
    model, x = Reaching(3).eval(), torch.randn(3, 8)
    executable = Prepared(model, x).wide(2)
    assert executable.schedule.streams == 2
    expected, used = eager(model, [x]), torch.get_num_threads()

    def works() -> None:
        _reached.clear()
        for _ in range(3):
            assert same(executable.run([x]), expected)
        assert torch.get_num_threads() == used

    if in_a_run:
        inside, go_on = threading.Event(), threading.Event()
        _reached[:] = [inside.set, lambda: go_on.wait(60)]
        thread = threading.Thread(target=executable.run, args=([x],))
        thread.start()
        assert inside.wait(60)
        try:
            _in_a_child(works)
        finally:
            go_on.set()
            thread.join()
    else:
        executable.run([x])
        _in_a_child(works)
    works()
    executable.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("in_a_run", [False, True])
def test_an_executable_on_several_workers_works_in_a_forked_process(in_a_run: bool) -> None:
    in_a_process(partial(_forked, in_a_run), 120)
