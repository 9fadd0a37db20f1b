"""What the benchmark of compiling says of its rows."""

from __future__ import annotations

import pytest

from benchmarks.compiling import OURS, PEERS, WAYS, line, summary


def row(ours: float, peers: float) -> dict[str, dict[str, float]]:
    return {way: {"first s": ours if way in OURS else peers, "second s": 2.0} for way in WAYS}


def test_ratios_are_geometric_means_over_each_peer_and_process() -> None:
    found = summary({"ResNet-50, float16": row(20.0, 10.0), "GoogLeNet, float16": row(5.0, 10.0)})
    assert len(found["ratios"]) == 2 * len(OURS) * len(PEERS)
    assert all(ratio == pytest.approx(1.0) for ratio in found["ratios"].values())
    assert found["met"]
    assert found["rows"] == 2


@pytest.mark.parametrize(("ours", "met"), [(10.9, True), (11.1, False)])
def test_the_target_is_the_first_process_of_what_was_not_tuned(ours: float, met: bool) -> None:
    assert summary({"ResNet-50, float16": row(ours, 10.0)})["met"] is met


def test_nothing_measured_meets_nothing() -> None:
    assert summary({}) == {"rows": 0, "ratios": {}, "wanted at most": 1.1, "met": False}


def test_a_row_says_both_processes_of_each_way() -> None:
    assert line("ResNet-50, float16", {"ours": {"first s": 12.34, "second s": 3.0}}) == (
        "ResNet-50, float16: ours 12.3 s, then 3.0"
    )
