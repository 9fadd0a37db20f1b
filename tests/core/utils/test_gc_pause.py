"""Pauses of the garbage collector: nested, overlapping, and left as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.gc_pause import collector_paused


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_left_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
            with pytest.raises(ZeroDivisionError), collector_paused():
                1 / 0  # noqa: B018  # for its error
            assert not gc.isenabled()
        assert gc.isenabled() == on
    finally:
        gc.enable()


@given(st.lists(st.integers(0, 3), max_size=12), st.booleans())
def test_of_pauses_that_overlap_the_last_lets_the_collector_run(turns: list[int], on: bool) -> None:
    pauses: dict[int, Any] = {}  # those of threads: each begins and ends whenever its turn comes
    (gc.enable if on else gc.disable)()
    try:
        for turn in [*turns, *turns]:
            if turn in pauses:
                pauses.pop(turn).__exit__(None, None, None)
            else:
                pauses[turn] = collector_paused()
                pauses[turn].__enter__()
            assert gc.isenabled() == (on and not pauses)
    finally:
        gc.enable()
    assert not pauses
