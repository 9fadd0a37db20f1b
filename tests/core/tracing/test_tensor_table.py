"""Tensors are found by what they show, whoever gave them other memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from nimble_core.ir.call_graph import build_graph
from nimble_core.utils.errors import CaptureError
from tests.support.recordings import any_order, assert_clean, recorded, reissued, same

STEPS = {
    "new": lambda seen, y, z: seen.append(y * 2 + 1),
    "join": lambda seen, y, z: seen.append(y.sum() + z),
    "row": lambda seen, y, z: seen.append(z[-1:]),
    "turned": lambda seen, y, z: seen.append(z.t()),
    "write": lambda seen, y, z: y.add_(z.mean()),
    "turn": lambda seen, y, z: y.t_(),
    "data": lambda seen, y, z: setattr(y, "data", z),
    "data of data": lambda seen, y, z: setattr(y, "data", z.data.neg_().data),
    "constant": lambda seen, y, z: setattr(y, "data", torch.full((2, 3), 5.0)),
    "set": lambda seen, y, z: y.set_(z),
    "set to all": lambda seen, y, z: y.set_(z.clone().untyped_storage()).unsqueeze_(0),
    "further": lambda seen, y, z: y.set_(y.untyped_storage(), 1, (1, 2), (3, 2)),
}
"""What a forward may do with two of the tensors that it has."""


def steps_taken(steps: Sequence[tuple[str, int, int]]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = [x + 1, x * 2]
        for name, y, z in steps:
            STEPS[name](seen, seen[y % len(seen)], seen[z % len(seen)])
        return tuple(seen)

    return forward


@settings(max_examples=200)
@example([("data", 0, 1), ("new", 0, 0)], 0)
@example([("data", 0, 1), ("write", 0, 0)], 0)
@example([("row", 0, 0), ("data", 0, 1), ("join", 2, 0)], 0)
@example([("turned", 0, 0), ("data", 0, 2), ("turn", 0, 0)], 0)
@example([("set", 0, 1), ("write", 1, 0), ("join", 0, 0)], 0)
@example([("further", 0, 0), ("new", 0, 0)], 0)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 9)] * 2), max_size=9), st.integers(0, 99))
def test_tensors_that_are_given_other_memory_are_what_they_show(steps: list[tuple[str, int, int]], seed: int) -> None:
    forward = steps_taken(steps)
    try:
        with torch.no_grad():
            forward(torch.ones(2, 3))
    except RuntimeError:  # such as a memory too small for what is set
        reject()
    recording = None
    # A window on memory that no recorded tensor shows in that way, nor starts before, is refused.
    with suppress(CaptureError) if {name for name, *_ in steps} & {"further", "set to all"} else nullcontext():
        recording = recorded(forward, torch.ones(2, 3))
    if recording is None:
        return
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        right = forward(x.clone())
    order = any_order(build_graph(recording.program), random.Random(seed))
    assert same(reissued(recording, [x.clone()], order), right)


def test_an_output_argument_that_is_resized() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x, out=torch.empty(0)) + 1

    x = torch.randn(2, 2)
    recording = recorded(forward, x)
    assert torch.equal(reissued(recording, [x + 1])[0], forward(x + 1))
    assert recording.program.calls[1].reads[0] == recording.program.calls[0].writes[0]
    assert build_graph(recording.program).edges == ((0, 1),)


def test_memory_that_is_freed_gives_its_address_to_no_other() -> None:
    freed: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            before = torch._C._WeakTensorRef(x)
            x = x + 1
            freed.append(before.expired())
        return x

    program = recorded(forward, torch.ones(3)).program
    assert len({call.writes[0].storage for call in program.calls}) == 50
    assert sum(freed) >= 49, "a recording does not hold what the model lets go of"


def test_inputs_that_share_memory_may_be_read_but_not_written() -> None:
    base = torch.randn(5)
    with pytest.raises(CaptureError, match="share memory"):
        recorded(lambda a, b: a.mul_(2) + b, base[:4], base[1:])
    with pytest.raises(CaptureError, match="share memory"):
        recorded(lambda a, b: a.add_(b), base, base)


@pytest.mark.parametrize(
    ("forward", "operator"),
    [
        (lambda x: x.clone().resize_(9), "resize_"),
        (lambda x: x.clone().set_(torch.ones(7).untyped_storage(), 1, (2,), (3,)), "set_"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to_sparse_csr(), "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_memory_that_changes_under_a_tensor_and_sparse_tensors_are_refused(
    forward: Callable[[torch.Tensor], Any], operator: str
) -> None:
    with pytest.raises(CaptureError, match=operator) as caught:
        recorded(forward, torch.randn(2, 2))
    assert "test_tensor_table.py" in caught.value.where
    assert_clean()
