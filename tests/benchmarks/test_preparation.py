"""What the benchmark of preparation says of its rows."""

from __future__ import annotations

import gc

import pytest

from benchmarks.preparation import collections, line, summary


def row(first: float, median: float = 0.2) -> dict[str, object]:
    runs = [{"steps s": {"record": 0.1, "capture single": 0.05}, "collector s": 0.01}]
    return {"first s": first, "median s": median, "calls": 10, "runs": runs}


def test_targets_are_held_against_first_times() -> None:
    found = summary({"NASNet-A large, float16": row(1.0), "NASNet-A large, float32": row(1.2), "other": row(0.1)})
    met = {target: one["met"] for target, one in found["targets"].items()}
    assert met == {"mean of 3 rows at most 0.35 s": False, "NASNet-A large at most 1.07 s": False}
    assert found["targets"]["NASNet-A large at most 1.07 s"]["value"] == 1.2
    assert all(one["met"] for one in summary({"other": row(0.3), "more": row(0.39)})["targets"].values())
    assert found["mean of medians s"] == pytest.approx(0.2)


def test_a_row_says_what_took_longest() -> None:
    assert line("ResNet-50, float32", row(0.3)) == (
        "ResNet-50, float32: first 0.300 s (record 0.100, capture single 0.050; collector 0.010), median 0.200 s"
    )


def test_collections_are_timed_while_they_are_watched() -> None:
    before = list(gc.callbacks)
    with collections() as found:
        gc.collect()
    assert len(found) >= 1
    assert all(seconds > 0 for seconds in found)
    assert gc.callbacks == before
