"""What ``benchmarks.kernel_times`` makes of three tools' words for one graph's kernels."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kernel_times
from benchmarks.kernel_times import compared, lines, medians

NAMES = st.sampled_from(["gemm", "relu", "conv"])
KERNELS = st.lists(st.tuples(NAMES, st.integers(500, 100_000).map(float)), min_size=3, max_size=20)


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(kernel_times).failed == 0


@given(KERNELS)
def test_a_replay_that_lacks_a_kernel_is_told(kernels: list[tuple[str, float]]) -> None:
    with pytest.raises(ValueError, match=r"not 2 times the same"):
        medians([*kernels, *kernels[:-1]], 2)


def test_a_tool_that_waits_around_each_kernel_shows_as_a_constant() -> None:
    ours = [("a", 1000.0), ("b", 6000.0), ("c", 9000.0)]
    found = compared({"nimble": ours, "ncu": [(name, 0.9 * ns + 700.0) for name, ns in ours]})["ours over"]["ncu"]
    assert found["theirs of ours"] == pytest.approx({"slope": 0.9, "added_ns": 700.0})


def test_other_kernels_are_not_joined_and_are_said() -> None:
    ours = [("a", 1000.0), ("b", 6000.0), ("c", 9000.0)]
    found = compared({"nimble": ours, "torch.profiler": ours, "ncu": ours[:2]}) | {"notes": ["no more"]}
    assert found["ours over"]["torch.profiler"]["sum"] == 1.0
    assert found["ours over"]["ncu"] == {"kernels": 2, "joined": 0}
    assert all("ncu" not in kernel for kernel in found["kernels"])
    said = lines("m, float32", found)
    assert said[1:] == ["m, float32: ncu saw 2 kernels, other ones than ours", "m, float32: no more"]
