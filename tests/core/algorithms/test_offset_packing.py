"""Packing: blocks that conflict share nothing, and the whole is not larger than it has to be where that is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.algorithms.offset_packing import first_fit, pack


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes and symmetric conflicts."""
    sizes = draw(st.lists(st.integers(0, 6), max_size=10))
    conflicts = [0] * len(sizes)
    for v in range(len(sizes)):
        for u in range(v):
            if draw(st.booleans()):
                conflicts[u] |= 1 << v
                conflicts[v] |= 1 << u
    return sizes, conflicts


def apart(sizes: list[int], conflicts: list[int], offsets: list[int]) -> bool:
    return all(
        offsets[u] + sizes[u] <= offsets[v] or offsets[v] + sizes[v] <= offsets[u] or not sizes[u] or not sizes[v]
        for v in range(len(sizes))
        for u in range(v)
        if conflicts[v] >> u & 1
    )


@given(blocks(), st.data())
def test_each_block_lies_as_low_as_those_placed_before_allow(
    drawn: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    sizes, conflicts = drawn
    order = data.draw(st.permutations(range(len(sizes))))
    offsets, total = first_fit(sizes, conflicts, order)
    assert apart(sizes, conflicts, offsets)
    assert total == max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
    for place, block in enumerate(order):
        rivals = [other for other in order[:place] if conflicts[block] >> other & 1 and sizes[other]]
        for lower in range(offsets[block]):
            end = lower + sizes[block]
            assert any(lower < offsets[other] + sizes[other] and offsets[other] < end for other in rivals)


@given(blocks())
def test_the_best_of_several_orders_is_no_worse_than_one(drawn: tuple[list[int], list[int]]) -> None:
    sizes, conflicts = drawn
    offsets, total = pack(sizes, conflicts)
    assert apart(sizes, conflicts, offsets)
    assert max(sizes, default=0) <= total <= first_fit(sizes, conflicts, range(len(sizes)))[1]
    assert total == max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
