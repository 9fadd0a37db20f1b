"""Calls are found among the operators of a profile."""

from __future__ import annotations

from hypothesis import given, settings

from nimble_core.ir.program import Program
from nimble_viz.collect.matched_trace import MatchedTrace
from nimble_viz.traces.events import Trace
from tests.support.eager_traces import op, program_of, programs, traces


@given(traces(), programs)
@settings(max_examples=100, deadline=None)
def test_matches_are_in_order_and_carry_the_name(trace: Trace, program: Program) -> None:
    matched = MatchedTrace.of(program, trace)
    calls = [call for call, _ in matched.matches]
    assert calls == sorted(set(calls))
    for call, position in matched.matches:
        assert matched.forest.events[position].name.split("::")[1] == program.calls[call].label


def test_an_operator_inside_a_call_is_no_candidate() -> None:
    operators = (op("addmm", 0, 50), op("copy_", 10, 20), op("copy_", 60, 70))
    matched = MatchedTrace.of(program_of("addmm", "copy_"), Trace("cpu", 0, 100, 100, operators))
    assert [(call, matched.forest.events[at].start_ns) for call, at in matched.matches] == [(0, 0), (1, 60)]
