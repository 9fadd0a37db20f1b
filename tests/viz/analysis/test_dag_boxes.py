"""Calls grouped by module."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_viz.analysis.dag_boxes import components, nest


@given(st.lists(st.lists(st.sampled_from(["a", "b", "layer", "0", "1"]), max_size=4).map(".".join), max_size=40))
def test_groups_are_nested_runs_of_one_module(modules):
    boxes = nest(modules)
    for group, (first, last) in enumerate(zip(boxes.first, boxes.last, strict=True)):
        assert last > first
        around = boxes.parent[boxes.calls + group]
        if around >= 0:
            assert around < boxes.calls + group
            outer = around - boxes.calls
            assert boxes.first[outer] <= first
            assert last <= boxes.last[outer]
            assert (boxes.first[outer], boxes.last[outer]) != (first, last)
        steps = components(boxes.name[group])
        for module in modules[first : last + 1]:
            path = components(module)
            assert any(path[at : at + len(steps)] == steps for at in range(len(path)))
