"""The plans that were tried, and what is said of each."""

from __future__ import annotations

import re
from dataclasses import replace

from nimble_core.ir.candidates import Candidate
from nimble_viz.analysis.candidates import candidates
from tests.support.sample_reports import CASES, choice, fused_report, sample_report
from tests.support.tables import shown


def test_the_chosen_candidate_comes_first_then_by_median_then_what_was_not_captured():
    report = sample_report(60)
    table = candidates(report)
    assert list(shown(table)) == ["nimble", "opara", "one stream"]
    best, wrong, single = shown(table).values()
    assert best["Outcome"] == "chosen"
    assert best["Over one stream"] == f"{report.ratio('nimble', 'single').value:.2f}x"
    assert [row["void"] for row in table["rows"]] == [False, True, False]
    assert (wrong["Outputs"], wrong["Outcome"]) == ("differ", "outputs differ from eager's")
    assert wrong["Over one stream"] == ""
    assert re.fullmatch(
        r"2\.\d\dx slower than the chosen plan \(2\.\d\dx to 2\.\d\dx\) when measured again", single["Outcome"]
    )
    assert [text.partition(" (")[0] for text in table["below"]] == [
        "1 plan more, not captured: simulated slower",
        "1 plan more, not captured: the budget was spent",
    ]


def test_many_candidates_that_were_not_captured_are_folded_by_reason():
    table = candidates(CASES["many candidates"]())
    assert list(shown(table)) == ["nimble", "opara", "one stream"]
    assert len(table["below"]) == 2
    assert table["below"][0] == ("13 plans more, not captured: simulated slower (1.02 ms to 1.20 ms)")


def test_candidates_say_when_they_pay_back_and_why_they_were_dropped():
    report = fused_report()
    rows = shown(candidates(report))
    over_eager, over_single = (report.ratio("inductor, nimble", base).value for base in ("eager", "single"))
    gain_ns = report.measurement("eager").median_ns * (1 - 1 / over_eager)
    count = int(re.sub(r"\D", "", rows["inductor, nimble"]["Break-even"]))
    spent_ns = 1e9 * max(12.34, sum(step.seconds for step in report.preparation if step.name != "choose"))
    assert (count - 1) * gain_ns < spent_ns <= count * gain_ns
    assert next(iter(rows)) == "inductor, nimble"
    assert rows["inductor, nimble"]["Over eager's one stream"] == f"{over_single:.2f}x"
    assert rows["library, one stream"]["Break-even"] == "never"
    assert rows["library, nimble"]["Outcome"] == "outputs differ from eager's"
    assert (rows["library, nimble"]["Outputs"], rows["library, nimble"]["Break-even"]) == ("differ", "")


def test_what_failed_is_never_folded_away():
    report = sample_report(60)
    failed = Candidate("library, nimble", 0, 0, fuse="library", note="this model cannot be exported: a graph break")
    table = candidates(replace(report, candidates=(*choice(report.measurements, "nimble", 4, more=6), failed)))
    assert shown(table)["library, nimble"]["Outcome"] == failed.note
