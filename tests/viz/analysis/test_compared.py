"""What is said where the medians of two runs do not fit their ratio, in every view that shows both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nimble_core.ir.measurement import Measurement, ratio, summarize
from nimble_viz.analysis.compared import time_doubt
from nimble_viz.analysis.summary import brief, summary
from nimble_viz.analysis.tiles import tiles, verdict
from nimble_viz.render.html import page
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import PeerResult
from tests.support.sample_reports import RENDERED, sample_report

SAID = "the machine changed its speed while measuring"


def two_speeds(name: str, ns: float, slow: int) -> Measurement:
    """200 rounds, the first ``slow`` of them at half the speed."""
    return summarize(name, [ns * (2 if at < slow else 1) * (1 + at % 7 / 1e3) for at in range(200)], 3)


EAGER, FASTER = two_speeds("eager", 31e3, 98), two_speeds("nimble", 25e3, 102)
"""Faster in nearly every round; the medians say the opposite."""


def test_medians_that_contradict_the_ratio_are_told() -> None:
    assert ratio(FASTER, EAGER).verdict == "faster"
    assert FASTER.median_ns > EAGER.median_ns
    assert time_doubt(ratio(FASTER, EAGER), FASTER, EAGER).startswith(SAID)
    assert time_doubt(ratio(EAGER, FASTER), EAGER, FASTER).startswith(SAID)


@pytest.mark.parametrize(("ours", "slow"), [(25e3, 98), (31e3, 98), (40e3, 98), (25e3, 0), (31.1e3, 200)])
def test_medians_that_fit_are_shown(ours: float, slow: int) -> None:
    taken, base = two_speeds("nimble", ours, slow), two_speeds("eager", 31e3, slow)
    assert time_doubt(ratio(taken, base), taken, base) == ""


def test_nothing_is_said_of_what_was_not_measured_or_of_too_few_samples() -> None:
    assert time_doubt(None, None, EAGER) == ""
    few, more = summarize("nimble", [1.0] * 3), summarize("eager", [9.0] * 3)
    assert time_doubt(ratio(few, more), few, more) == ""


def report_of(**more: Any) -> Any:
    measured = (EAGER, two_speeds("single", 28e3, 98), FASTER)
    return replace(sample_report(24), **{"measurements": measured, **more})


def test_the_headline_leaves_out_times_that_say_the_opposite() -> None:
    report = report_of()
    prepared = tiles(report)["prepared"]
    assert (prepared["verdict"], prepared["of"], prepared["ns"]) == ("faster", "", 0.0)
    assert prepared["lines"][0].startswith(SAID)
    assert SAID in tiles(report)["picture"]["note"]
    assert f"1.24x to 1.24x; float16, batch 1, NVIDIA H200); {SAID}" in verdict(report)
    assert SAID in brief(report)["verdict"]
    text = plain_text(report, 100)
    assert SAID in text
    assert "instead of" not in text
    assert len(text.splitlines()) <= 12
    assert SAID in page(report)


def test_tables_say_it_below_or_beside_both() -> None:
    report = report_of()
    assert [one.startswith(f"nimble replay: {SAID}") for one in summary(report)["speed"]["below"]] == [True]
    peer = two_speeds("compile", 31e3, 98)
    found = summary(report_of(measurements=(EAGER, FASTER, peer), peers=(PeerResult("compile"),)))["peers"]
    assert SAID in found["rows"][0]["cells"][-1]["under"]


@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_no_usual_report_says_it(case: str) -> None:
    report = RENDERED[case]()
    assert SAID not in repr((tiles(report), summary(report)))
