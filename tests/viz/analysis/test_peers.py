"""Other ways to run the model, beside ours."""

from __future__ import annotations

from dataclasses import replace

from nimble_core.ir.measurement import summarize
from nimble_viz.analysis.summary import peers, summary
from nimble_viz.analysis.tiles import verdict
from nimble_viz.report.data import PeerResult
from tests.support.sample_reports import fused_report, sample_report


def test_peers_win_lose_tie_differ_or_are_absent():
    report = fused_report()
    ours = report.measurement("inductor, nimble").median_ns
    quick = summarize("compile", [0.8 * ours] * 48)
    report = replace(report, measurements=(*(one for one in report.measurements if one.name != "compile"), quick))
    rows = {row["name"]: row for row in peers(report, report.chosen)}
    assert list(rows) == ["compile", "compile:reduce-overhead", "eager-tuned", "cuda-graph", "tensorrt"]
    assert rows["compile"]["outcome"].startswith("ours is 1.25x slower than it (1.2")
    assert rows["compile:reduce-overhead"]["outcome"].startswith("ours is 1.60x faster than it (1.5")
    assert "its time does not count" in rows["cuda-graph"]["outcome"]
    assert rows["cuda-graph"]["ratio"] is None
    assert next(row["eager"] for row in summary(report)["speed"] if row["name"] == "cuda-graph") is None
    assert rows["tensorrt"]["outcome"].startswith("not installed")
    assert (rows["tensorrt"]["median"], rows["eager-tuned"]["prepare"]) == ("", "1.90 s")
    assert "1.25x slower than compile (1.2" in verdict(report)
    even = replace(report, measurements=(*report.measurements[:-1], summarize("compile", [1.005 * ours] * 48)))
    assert peers(even, report.chosen)[0]["outcome"].startswith("ours: no difference from it (1.0")
    assert "no difference from compile (1.0" in verdict(even)
    assert peers(sample_report(60), "nimble") == []
    assert peers(report, "")[0]["outcome"] == "nothing of ours to compare with"


def test_a_peer_that_was_not_shown_to_be_right_is_named_with_that():
    report = fused_report()
    assert "whose outputs were not shown" not in verdict(report)
    doubtful = tuple(
        replace(one, check=replace(one.check, passed=False, reason="void: x")) if one.name == "compile" else one
        for one in report.peers
    )
    told = verdict(replace(report, peers=doubtful))
    assert "), the fastest peer, whose outputs were not shown to be eager's" in told
    alone = replace(report, peers=(PeerResult("compile", 31.0),))
    assert "), whose outputs were not shown to be eager's" in verdict(alone)
