"""The same numbers in other strides."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.tracing.strides import copied, corner, restrided, rests, strides_of_copy, widened


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    expanded=st.booleans(),
)
def test_restrided_holds_the_same_numbers(sizes: list[int], order: Any, expanded: bool) -> None:
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    strides, step = [0] * len(sizes), 1
    for dim in dims:
        strides[dim], step = step, step * sizes[dim]
    tensor = torch.randn(*sizes)
    if expanded:
        tensor = tensor.narrow(dims[0], 0, 1).expand(sizes)
        strides[dims[0]] = 0
    found = restrided(tensor, tuple(strides))
    assert torch.equal(found, tensor)
    assert all(size == 1 or a == b for size, a, b in zip(sizes, found.stride(), strides, strict=True))
    assert restrided(found, tuple(strides)) is found


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    kind=st.sampled_from(("dense", "padded", "expanded")),
)
def test_copies_have_the_strides_of_copies_whatever_was_copied(sizes: list[int], order: Any, kind: str) -> None:
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    eagers = torch.randn([sizes[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(sizes))])
    if kind == "expanded":
        eagers = eagers[..., None].expand(*sizes, 2)
    strides = strides_of_copy(eagers.shape, eagers.stride())
    assert strides == eagers.clone().stride()
    made = torch.nn.functional.pad(eagers, (0, 3))[..., :-3] if kind == "padded" else eagers.contiguous()
    for one in (eagers, made):
        found = copied(one, strides)
        assert torch.equal(found, eagers)
        assert found.stride() == strides
        assert not found.numel() or found.data_ptr() != one.data_ptr()


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3), data=st.data())
def test_a_corner_and_its_rests_are_everything_once(sizes: list[int], data: st.DataObject) -> None:
    wide = [size + data.draw(st.integers(0, 3)) for size in sizes]
    counts = torch.zeros(wide)
    for part in (corner(counts, sizes), *rests(counts, sizes)):
        part.add_(1)
    assert torch.equal(counts, torch.ones(wide))
    tensor = torch.randn(sizes)
    found = widened(tensor, wide)
    assert torch.equal(corner(found, sizes), tensor)
    assert all(not part.any() for part in rests(found, sizes))
    assert (found is tensor) == (sizes == wide)
