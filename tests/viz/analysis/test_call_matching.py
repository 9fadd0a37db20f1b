"""Calls of two programs: the same ones are found whatever was put in, moved or renumbered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.program import Call, Origin
from nimble_viz.analysis.call_matching import match_calls


def call(operator: str = "aten.relu.default", module: str = "", line: int = 1) -> Call:
    """A call that touches nothing."""
    return Call(0, operator, (), (), origins=(Origin(operator, module, "net.py", line),))


def kernel(name: str) -> Call:
    return replace(call(module="m"), operator=name)


def left(old: list[Call], new: list[Call]) -> tuple[list[int], list[int]]:
    """Positions of old and of new calls that have no partner."""
    pairs = match_calls(old, new)
    gone, come = {u for u, _ in pairs}, {v for _, v in pairs}
    return [u for u in range(len(old)) if u not in gone], [v for v in range(len(new)) if v not in come]


LINES = [call(module=str(k), line=k) for k in range(6)]
LOOP = [call(module="cell")] * 4000


@pytest.mark.parametrize(
    ("old", "new", "removed", "added"),
    [
        pytest.param([], [], [], [], id="nothing"),
        pytest.param(LINES, [call(module=str(k), line=k + 3) for k in range(6)], [], [], id="moved lines"),
        pytest.param(
            [call("a.mm.x", "0"), call("a.gelu.x", "1"), call("a.mm.x", "2")],
            [call("a.mm.x", "0"), call("a.norm.x", "1"), call("a.gelu.x", "2"), call("a.mm.x", "3")],
            [],
            [1],
            id="renumbered modules",
        ),
        pytest.param(
            [call(module="left"), call(module="right")],
            [call(module="right"), call(module="left")],
            [],
            [],
            id="changed places",
        ),
        pytest.param(
            [kernel(f"triton_poi_fused_relu_{k}") for k in range(3)],
            [kernel("triton_per_fused_mean_0"), *(kernel(f"triton_poi_fused_relu_{k + 1}") for k in range(3))],
            [],
            [0],
            id="numbered kernels",
        ),
        pytest.param(LINES, LINES[:3] + LINES[4:], [3], [], id="a removed call"),
        pytest.param([call("a.mm.x")], [call("a.relu.x")], [0], [0], id="another operator"),
    ],
)
def test_what_has_no_partner(old: list[Call], new: list[Call], removed: list[int], added: list[int]) -> None:
    assert left(old, new) == (removed, added)
    assert left(new, old) == (added, removed)


def test_long_loops_are_aligned() -> None:
    old, new = [call(module="a"), *LOOP, call(module="b")], [call(module="c"), *LOOP, *LOOP[:7], call(module="d")]
    removed, added = left(old, new)
    assert (len(removed), len(added)) == (0, 7)


kinds = st.lists(st.builds(call, st.sampled_from(["a.mm.x", "a.relu.x"]), st.sampled_from("xy"), st.integers(1, 2)))


@given(kinds, kinds)
def test_pairs_are_of_one_operator_and_mirror(old: list[Call], new: list[Call]) -> None:
    pairs = match_calls(old, new)
    assert pairs == sorted(pairs)
    assert len({u for u, _ in pairs}) == len({v for _, v in pairs}) == len(pairs)
    assert all(old[u].operator == new[v].operator for u, v in pairs)
    assert {(u, v) for v, u in match_calls(new, old)} == set(pairs)
    assert match_calls(old, old) == [(k, k) for k in range(len(old))]
