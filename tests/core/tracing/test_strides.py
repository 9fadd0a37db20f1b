"""The same numbers in other strides."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.tracing.strides import _piece, copied, copy_rows, corner, restrided, rests, strides_of_copy, widened


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


@given(
    sizes=st.lists(st.integers(0, 6), max_size=3),
    gaps=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]),
    start=st.integers(0, 3),
)
def test_rows_are_copied_and_what_is_between_them_stays(
    sizes: list[int], gaps: tuple[int, int], dtype: torch.dtype, start: int
) -> None:
    def padded(gap: int) -> tuple[torch.Tensor, torch.Tensor]:
        wide = [*sizes[:-1], sizes[-1] + gap] if sizes else []
        memory = torch.randint(0, 2, (torch.Size(wide).numel() + start,)).to(dtype)
        return memory, corner(memory[start:].view(wide), sizes)

    (_, source), (memory, target) = map(padded, gaps)
    expected = memory.clone()
    expected.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    copy_rows(target, source)
    assert torch.equal(memory, expected)


def test_padded_rows_are_copied_in_the_largest_pieces_that_they_allow() -> None:
    def piece(columns: int, target: int, source: int) -> Any:
        return _piece(torch.empty(4, target)[:, :columns], torch.empty(4, source)[:, :columns])

    assert piece(8, 12, 8) is torch.complex128
    assert piece(6, 8, 6) is torch.int64
    assert piece(6, 7, 6) is piece(7, 8, 7) is piece(8, 8, 8) is None
    halves = torch.empty(4, 8, dtype=torch.float16)
    assert _piece(halves[:, 2:4], halves[:, 4:6]) is torch.int32
    assert _piece(halves[:, 1:5], halves[:, 4:]) is None


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
