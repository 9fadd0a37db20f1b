from __future__ import annotations

import threading
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.program import Phase
from nimble_core.tracing.phase import current_phase, phase

PHASES = get_args(Phase)


@given(st.lists(st.sampled_from(PHASES), max_size=6), st.booleans())
def test_phases_nest_and_are_left_in_order(names: list[Phase], fails: bool) -> None:
    seen: list[str] = []

    def enter(left: list[Phase]) -> None:
        outside = current_phase()
        try:
            if left:
                with phase(left[0]):
                    seen.append(current_phase())
                    enter(left[1:])
            elif fails:
                raise ZeroDivisionError
        finally:
            assert current_phase() == outside

    if fails:
        with pytest.raises(ZeroDivisionError):
            enter(names)
    else:
        enter(names)
    assert seen == names
    assert current_phase() == "forward"


def test_each_thread_has_its_own() -> None:
    seen = []
    with phase("optimizer"):
        other = threading.Thread(target=lambda: seen.append(current_phase()))
        other.start()
        other.join()
        assert current_phase() == "optimizer"
    assert seen == ["forward"]
