"""Rows, positions and lanes of the DAG."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from nimble_viz.analysis.dag_layout import components, lay_out, layers, nest, order
from tests.support.sample_reports import tangled_report


@st.composite
def dags(draw):
    size = draw(st.integers(1, 30))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] < pair[1])
    return size, sorted(draw(st.sets(pairs, max_size=60)))


@given(dags(), st.sampled_from([1.0, 0.15, 3.0]))
def test_layout_keeps_edges_downward_and_boxes_apart(drawn, last):
    size, edges = drawn
    row, width = layers(size, edges), [*[1.0] * (size - 1), last]
    assert all(row[u] < row[v] for u, v in edges)
    assert set(row) == set(range(max(row) + 1))
    position = order(row, edges, width)
    for line in set(row):
        members = sorted((box for box in range(size) if row[box] == line), key=lambda box: position[box])
        for left, right in itertools.pairwise(members):
            assert position[right] - position[left] >= (width[left] + width[right]) / 2 - 1e-9
    assert (row, position) == (layers(size, edges), order(row, edges, width))


@given(dags(), st.integers(0, 3))
def test_every_edge_that_passes_a_row_has_a_lane_there(drawn, seed):
    size, edges = drawn
    names = [call.module for call in tangled_report(seed, size).program.calls]
    boxes = nest(names)
    layout = lay_out(boxes, edges)
    held = {(lane.within, lane.source, lane.first + k) for lane in layout.lanes for k in range(len(lane.places))}
    height: dict[int, int] = {}
    for box, around in enumerate(boxes.parent):
        height[around] = max(height.get(around, 0), layout.row[box] + 1)
    for u, v in edges:
        up, down = _chain(boxes.parent, u), _chain(boxes.parent, v)
        while up[-1] == down[-1]:
            up.pop()
            down.pop()
        assert layout.row[up[-1]] < layout.row[down[-1]]
        needed = [(box, layout.row[box] + 1, height[boxes.parent[box]]) for box in up[:-1]]
        needed += [(box, 0, layout.row[box]) for box in down[:-1]]
        needed.append((up[-1], layout.row[up[-1]] + 1, layout.row[down[-1]]))
        for box, begin, end in needed:
            assert all((boxes.parent[box], u, row) in held for row in range(begin, end))
    assert layout == lay_out(boxes, edges)


def test_lanes_of_a_graph_of_long_edges_stay_few():
    size = 3_000
    edges = sorted({(v - 1, v) for v in range(1, size)} | {(v // 2, v) for v in range(2, size)})
    layout = lay_out(nest([""] * size), edges)
    assert 0 < sum(len(lane.places) for lane in layout.lanes) <= 2 * size + 4_000


def _chain(parent, box):
    chain = [box]
    while parent[box] >= 0:
        box = parent[box]
        chain.append(box)
    return chain


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
