"""Waits: promised, emitted, and of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.schedule import SyncCounts
from nimble_viz.analysis.syncs import hint, host_syncs, promise
from tests.support.sample_reports import sample_report, training_report


@pytest.mark.parametrize(
    ("emitted", "minimum", "kept", "text"),
    [
        (3, True, True, "emitted as promised: |E'| - |M| = 9 - 6 = 3"),
        (5, True, False, "emitted 5, 2 waits more than promised (|E'| - |M| = 9 - 6 = 3)"),
        (7, False, True, "emitted as planned: 7"),
        (6, False, False, "emitted 6, 1 wait fewer than planned (7)"),
    ],
)
def test_emitted_is_held_against_the_promise(emitted, minimum, kept, text):
    plan = replace(
        sample_report(60).schedules[1],
        minimum_syncs=minimum,
        meg_edges=9,
        matched=6,
        counts=SyncCounts(9, 8, 7, emitted),
    )
    assert promise(plan) == {"kept": kept, "text": text}
    assert promise(replace(plan, counts=SyncCounts(9, 8, 7))) is None


def test_host_syncs_come_with_advice():
    rows = host_syncs(sample_report(60))
    assert rows[0]["source"] == "sample_net/modeling.py:44"
    assert all(row["hint"] for row in rows)
    assert "pinned" in hint("cudaMemcpyAsync (device to host)")
    assert "once after the loop" in hint("aten::item") == hint("aten::item", "forward")
    assert "fused=True" in hint("aten::item", "optimizer")
    assert "fused=True" in {row["phase"]: row["hint"] for row in host_syncs(training_report())}["optimizer"]
