"""Alignment against the textbook's longest common subsequence."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core.algorithms.alignment import align


def longest_common(left: str, right: str) -> int:
    """Length of the longest common subsequence, by the textbook table."""
    row = [0] * (len(right) + 1)
    for a in left:
        new = [0]
        for j, b in enumerate(right):
            new.append(row[j] + 1 if a == b else max(new[j], row[j + 1]))
        row = new
    return row[-1]


words = st.text("abcd", max_size=25)


@given(words, words)
@settings(max_examples=400)
def test_a_longest_common_subsequence(left: str, right: str) -> None:
    assert len(align(left, right)) == longest_common(left, right)


@given(words, words, st.sampled_from([1, 2, 3, 6, 256]))
@settings(max_examples=400)
def test_with_few_edits_it_is_still_a_common_subsequence(left: str, right: str, max_edits: int) -> None:
    pairs = align(left, right, max_edits)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs))


def test_a_long_stretch_of_others_and_missing_items() -> None:
    body = [f"op{i * i % 23}" for i in range(10_000)]
    profiled = body[:3000] + body[3100:6000] + ["op1", "op2"] * 100 + body[6000:]
    assert len(align(body, profiled)) >= 9_890
