"""Locks that a forked child finds free."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from nimble_core.utils.locks import free_after_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CHILD = """
import faulthandler, os, threading, warnings
import torch
from nimble_core import Nimble, Options

torch.set_num_threads(1)
inside, go = threading.Event(), threading.Event()

def waits(x):
    inside.set()
    go.wait(60)
    return x + 1

def prepared():
    x = torch.ones(2)
    return torch.equal(Nimble(lambda x: x * 2, Options(tune="off")).prepare(x)(x), x * 2)

other = threading.Thread(target=lambda: Nimble(waits, Options(tune="off")).prepare(torch.ones(2)))
other.start()
inside.wait(60)
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(30, exit=True)
    os._exit(not prepared())
_, status = os.waitpid(child, 0)
go.set()
other.join()
raise SystemExit(status or not prepared())
"""


def test_a_child_forked_while_another_thread_prepares_prepares_too() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def in_child(run: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if run() else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_only_what_other_threads_hold_is_freed() -> None:
    ours, theirs = free_after_fork(threading.RLock()), free_after_fork(threading.RLock())
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with theirs:
            held.set()
            done.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        with ours:

            def free() -> bool:
                ours.release()  # it is still this thread's
                return theirs.acquire(blocking=False)

            assert in_child(free)
        assert not theirs.acquire(blocking=False)
    finally:
        done.set()
        other.join()
