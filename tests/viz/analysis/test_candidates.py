"""The plans that were tried, and what is said of each."""

from __future__ import annotations

import re
from dataclasses import replace

from nimble_core.ir.candidates import Candidate
from nimble_viz.analysis.candidates import candidates
from tests.support.sample_reports import CASES, choice, fused_report, sample_report


def test_the_chosen_candidate_comes_first_then_by_median_then_what_was_not_captured():
    report = sample_report(60)
    shown = candidates(report)
    assert [row["name"] for row in shown["rows"]] == ["nimble", "opara", "single"]
    best, wrong, single = shown["rows"]
    assert best["outcome"] == "chosen"
    assert best["single"]["text"] == f"{report.ratio('nimble', 'single').value:.2f}x"
    assert wrong["wrong"]
    assert (wrong["outputs"], wrong["outcome"], wrong["single"]) == ("DIFFER", "outputs differ from eager's", None)
    assert re.fullmatch(
        r"2\.\d\dx slower than the chosen plan \(2\.\d\dx to 2\.\d\dx\) when measured again", single["outcome"]
    )
    assert [text.partition(" (")[0] for text in shown["folded"]] == [
        "1 plan more, not captured: simulated slower",
        "1 plan more, not captured: the budget was spent",
    ]


def test_many_candidates_that_were_not_captured_are_folded_by_reason():
    shown = candidates(CASES["many candidates"]())
    assert [row["name"] for row in shown["rows"]] == ["nimble", "opara", "single"]
    assert len(shown["folded"]) == 2
    assert shown["folded"][0] == ("13 plans more, not captured: simulated slower (1.02 ms to 1.20 ms)")


def test_candidates_say_when_they_pay_back_and_why_they_were_dropped():
    report = fused_report()
    shown = candidates(report)
    rows = {row["name"]: row for row in shown["rows"]}
    over_eager, over_single = (report.ratio("inductor, nimble", base).value for base in ("eager", "single"))
    gain_ns = report.measurement("eager").median_ns * (1 - 1 / over_eager)
    count = int(re.sub(r"\D", "", rows["inductor, nimble"]["pays"]))
    assert (count - 1) * gain_ns < 12.34e9 <= count * gain_ns
    assert next(iter(rows)) == "inductor, nimble"
    assert rows["inductor, nimble"]["single"]["text"] == f"{over_single:.2f}x"
    assert rows["library, single"]["pays"] == "never"
    assert rows["library, nimble"]["outcome"] == "outputs differ from eager's"
    assert (rows["library, nimble"]["error"], rows["library, nimble"]["pays"]) == ("4.0e-01", "")
    assert (shown["fused"], shown["single"]) == (True, "one stream")
    assert not candidates(sample_report(60))["fused"]


def test_what_failed_is_never_folded_away():
    report = sample_report(60)
    failed = Candidate("library, nimble", 0, 0, fuse="library", note="this model cannot be exported: a graph break")
    shown = candidates(replace(report, candidates=(*choice(report.measurements, "nimble", 4, more=6), failed)))
    assert shown["rows"][-1]["outcome"] == failed.note
