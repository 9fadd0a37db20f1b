"""Other ways to run the model, beside ours."""

from __future__ import annotations

from dataclasses import replace

from nimble_core.ir.measurement import summarize
from nimble_viz.analysis.summary import peers, summary
from nimble_viz.analysis.tiles import verdict
from nimble_viz.report.data import PeerResult
from tests.support.sample_reports import fused_report, sample_report
from tests.support.tables import shown


def test_peers_win_lose_tie_differ_or_are_absent():
    report = fused_report()
    ours = report.measurement("inductor, nimble").median_ns
    quick = summarize("compile", [0.8 * ours] * 48)
    report = replace(report, measurements=(*(one for one in report.measurements if one.name != "compile"), quick))
    table = peers(report, report.chosen)
    rows = shown(table)
    assert list(rows) == ["compile", "compile:reduce-overhead", "eager-tuned", "cuda-graph", "tensorrt"]
    assert rows["compile"]["Outcome"].startswith("ours is 1.25x slower than it (1.2")
    assert rows["compile:reduce-overhead"]["Outcome"].startswith("ours is 1.60x faster than it (1.5")
    assert "its time does not count" in rows["cuda-graph"]["Outcome"]
    assert [row["void"] for row in table["rows"]] == [False, False, False, True, False]
    assert table["rows"][0]["cells"][-1]["under"] == "outputs equal (2.9e-04)"
    assert shown(summary(report)["speed"])["cuda-graph"]["Over eager"] == ""
    assert rows["tensorrt"]["Outcome"].startswith("not installed")
    assert (rows["tensorrt"]["Median"], rows["eager-tuned"]["Prepared in"]) == ("", "1.90 s")
    assert "1.25x slower than compile (1.2" in verdict(report)
    even = replace(report, measurements=(*report.measurements[:-1], summarize("compile", [1.005 * ours] * 48)))
    assert shown(peers(even, report.chosen))["compile"]["Outcome"].startswith("ours: no difference from it (1.0")
    assert "no difference from compile (1.0" in verdict(even)
    assert peers(sample_report(60), "nimble") is None
    assert shown(peers(report, ""))["compile"]["Outcome"] == "nothing of ours to compare with"


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
