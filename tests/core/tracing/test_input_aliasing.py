from __future__ import annotations

import doctest
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.tracing import input_aliasing
from nimble_core.tracing.input_aliasing import Apart, share_memory
from nimble_core.utils.errors import InputError

MEMORY = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def windows(draw: st.DrawFn) -> torch.Tensor:
    """A dense tensor of some type anywhere on the same memory: rows, columns, expanded, empty, showing bytes twice."""
    typed = MEMORY.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32])))
    sizes = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    return typed.as_strided(sizes, strides, draw(st.integers(0, 150)))


def taken(tensor: torch.Tensor) -> set[int]:
    """Addresses of all its bytes, one by one."""
    starts = (
        tensor.data_ptr()
        + tensor.itemsize * sum(at * stride for at, stride in zip(index, tensor.stride(), strict=True))
        for index in product(*map(range, tensor.shape))
    )
    return {start + byte for start in starts for byte in range(tensor.itemsize)}


@given(windows(), windows())
def test_tensors_share_memory_where_a_byte_is_both_of_theirs(one: torch.Tensor, other: torch.Tensor) -> None:
    assert share_memory(one, other) == share_memory(other, one) == bool(taken(one) & taken(other))


@given(st.lists(windows(), min_size=1, max_size=5), st.data())
def test_no_input_may_share_memory_with_one_that_is_written(inputs: list[torch.Tensor], data: st.DataObject) -> None:
    written = sorted(data.draw(st.sets(st.integers(0, len(inputs) - 1), min_size=1)))
    prepared = data.draw(st.sampled_from([inputs, [torch.empty(one.shape, dtype=one.dtype) for one in inputs]]))
    apart = Apart(prepared, written, [f"input {at}" for at in range(len(inputs))])
    bytes_of = list(map(taken, inputs))
    pairs = {(a, b) for a in written for b in range(len(inputs)) if a != b and bytes_of[a] & bytes_of[b]}
    if pairs:
        with pytest.raises(InputError) as caught:
            apart.require(inputs)
        assert any(
            str(caught.value).startswith(f"input {a}, ") and f"with input {b}:" in str(caught.value) for a, b in pairs
        )
    else:
        apart.require(inputs)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(input_aliasing).failed == 0


QUICK = Options(fuse="none", tune="off")


def adds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_inputs_that_share_memory_are_refused_before_anything_is_written(policy: str) -> None:
    net = Nimble(adds, Options(fuse="none", policy=policy)).prepare(torch.randn(3, 3), torch.randn(3, 3))
    s, z = torch.randn(4, 3), torch.randn(3, 3)
    for a, b in ((z, z), (z, z.t()), (s[:3], s[1:]), (z.t(), z.view(9).view(3, 3))):
        before = s.clone(), z.clone()
        with pytest.raises(InputError, match=r"args\[0\], which the model writes.*args\[1\][\s\S]*clone"):
            net(a, b)
        assert torch.equal(s, before[0])
        assert torch.equal(z, before[1])
    expected = s[1:] * 2
    torch.testing.assert_close(net(s[:3].clone(), s[1:]), expected)
    net.close()


def test_windows_side_by_side_are_taken_as_they_are() -> None:
    net = Nimble(adds, QUICK).prepare(torch.randn(3, 2), torch.randn(3, 2))
    s = torch.randn(3, 4)
    before = s.clone()
    torch.testing.assert_close(net(s[:, :2], s[:, 2:]), before[:, 2:] * 2)
    torch.testing.assert_close(s, torch.cat([before[:, :2] + 1, before[:, 2:]], 1))
    net.close()


def test_inputs_that_are_only_read_may_share_memory() -> None:
    net = Nimble(torch.add, QUICK).prepare(torch.randn(3, 3), torch.randn(3, 3))
    z = torch.randn(3, 3)
    torch.testing.assert_close(net(z, z.t()), z + z.t())
    assert net.engines[0].apart is None
    net.close()


def test_a_module_prepared_for_training_refuses_them_too() -> None:
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return self.linear(b)

    net = Nimble(Adds(), QUICK).prepare(torch.randn(3, 3), torch.randn(3, 3), training=True)
    z = torch.randn(3, 3)
    before = z.clone()
    with pytest.raises(InputError, match="shares memory"):
        net(z, z)
    assert torch.equal(z, before)
    net.close()
