from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.tracing.operator_traits import (
    argument_texts,
    copies_to_host,
    fills_where_true,
    parts_of,
    shape_depends_on_data,
    traits_of,
    written_tensors,
    written_where_true,
)
from nimble_core.tracing.recording import Slot

aten = torch.ops.aten

MASK = torch.tensor([[True, False], [False, True]])


def overloads() -> Iterator[Any]:
    """Every operator of ATen's that has a schema."""
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def test_composite_operators_are_taken_apart_under_inference_mode_only() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    assert parts_of(aten.linear.default) is None
    with torch.inference_mode():
        parts = parts_of(aten.linear.default)
        assert parts is not None
        assert torch.equal(parts(x, weight), torch.nn.functional.linear(x, weight))
        for func in (aten.addmm.default, aten.convolution.default, aten.native_batch_norm.default, aten.add_.Tensor):
            assert parts_of(func) is None
        assert parts_of(torch.ops.higher_order.cond) is None


@pytest.mark.parametrize(
    "func",
    [aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor, aten.copy_.default],
    ids=str,
)
def test_operators_that_may_make_the_host_wait_are_doubtful(func: Any) -> None:
    assert traits_of(func).doubtful


def test_no_other_operator_makes_the_host_wait() -> None:
    mask = torch.zeros(2, dtype=torch.bool)
    seen = 0
    for func in overloads():
        if not traits_of(func).doubtful:
            seen += 1
            assert not shape_depends_on_data(func, (mask, [mask]), {}), func
            assert not copies_to_host(func, [mask.to("meta")], (mask,), {}), func
    assert seen > 1000


@given(st.data())
def test_one_value_where_a_mask_is_true_is_written_as_eager_does(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    before = data.draw(st.integers(0, len(sizes) - 1))
    masked = data.draw(st.integers(1, len(sizes) - before))
    order = data.draw(st.permutations(range(len(sizes))))
    func = data.draw(st.sampled_from([aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default]))
    mine = torch.randn([sizes[at] for at in order]).permute([order.index(at) for at in range(len(sizes))])
    theirs = mine.clone()
    assert list(mine.shape) == sizes
    mask = torch.rand(sizes[before : before + masked]) > data.draw(st.sampled_from([-1.0, 0.5, 2.0]))
    shape = [*sizes[:before], 1, *sizes[before + masked :]]
    shape = [data.draw(st.sampled_from([1, size])) for size in shape]
    while shape[:1] == [1] and data.draw(st.booleans()):
        shape = shape[1:]
    args = ([None] * before + [mask], torch.randn(shape))
    write = written_where_true(func, (mine, *args))
    assert write is not None
    expected, found = func(theirs, *args), write()
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert torch.equal(mine, theirs)
    assert (found is mine) == (expected is theirs)


@pytest.mark.parametrize(
    ("indices", "value", "more"),
    [
        ([MASK], torch.zeros(()), (True,)),  # adds
        ([MASK], torch.zeros(2), ()),  # a value for each
        ([MASK], torch.zeros((), dtype=torch.float64), ()),
        ([MASK[0], MASK[0]], torch.zeros(()), ()),
        ([torch.tensor([1])], torch.zeros(()), ()),
        ([MASK.byte()], torch.zeros(()), ()),
    ],
    ids=lambda one: "",
)
def test_what_else_is_written_at_indices_stays_as_it_is(indices: Any, value: torch.Tensor, more: Any) -> None:
    assert written_where_true(aten.index_put_.default, (torch.zeros(2, 2), indices, value, *more)) is None
    assert written_where_true(aten.index.Tensor, (torch.zeros(2, 2), indices)) is None


@pytest.mark.parametrize(
    ("indices", "value", "more", "fills"),
    [
        ([MASK], torch.zeros(()), (), True),
        ([None, MASK[0]], torch.zeros(1, 1), (), True),
        ([MASK.byte()], torch.zeros(()), (), True),
        ([MASK], torch.zeros(2), (), False),
        ([MASK], torch.zeros(()), (True,), False),
        ([MASK[0], MASK[0]], torch.zeros(()), (), False),
        ([torch.tensor([1])], torch.zeros(()), (), False),
        ([MASK], torch.zeros((), device="meta"), (), False),
    ],
    ids=lambda one: "",
)
def test_only_a_number_at_one_mask_fills(indices: Any, value: torch.Tensor, more: Any, fills: bool) -> None:
    args = (torch.zeros(2, 2), indices, value, *more)
    assert fills_where_true(aten.index_put_.default, args) == fills
    masked = any(one is not None and one.dtype != torch.int64 for one in indices)
    assert shape_depends_on_data(aten.index_put_.default, args, {}) == (masked and not fills)


def test_texts_of_arguments_name_the_storages_of_slots() -> None:
    texts = argument_texts(("tensors", "dim", "out"), ([Slot(0), (Slot(2), 1.5)], -1), (("out", Slot(1)),), [7, 8, 9])
    assert texts == (("tensors", "[%7, [%9, 1.5]]"), ("dim", "-1"), ("out", "%8"))


def test_tensors_that_are_written() -> None:
    x, y, mean = torch.ones(2), torch.ones(2), torch.ones(2)
    assert written_tensors(aten.add.Tensor, (x, y), {}) == []
    (written,) = written_tensors(aten.add.out, (x, y), {"out": mean})
    assert written is mean
    norm = (x, None, None, mean, y, True, 0.1, 1e-5)
    assert [
        tensor is other
        for tensor, other in zip(written_tensors(aten.native_batch_norm.default, norm, {}), (mean, y), strict=True)
    ] == [True, True]
    assert written_tensors(aten.native_batch_norm.default, (*norm[:5], False, *norm[6:]), {}) == []
