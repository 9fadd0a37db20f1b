"""Interrupts that are put off: when they come, and that the handler in force is left as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from nimble_core.utils.interrupts import interrupts_postponed


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """What a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, AssertionError("half done")])
def test_it_comes_at_the_end_of_the_outermost_and_before_any_error(error: Exception | None) -> None:
    done = []

    def work() -> None:
        with interrupts_postponed():
            with interrupts_postponed():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert done == ["inner", "outer"]
    assert raised.value.__context__ is error


def test_where_python_handles_none_nothing_is_changed() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_postponed():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_is_never_interrupted() -> None:
    seen = []

    def work() -> None:
        with interrupts_postponed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
