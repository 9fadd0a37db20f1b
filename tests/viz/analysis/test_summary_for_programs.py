"""A report for programs."""

from __future__ import annotations

import json

import pytest

from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.summary import brief
from tests.support.sample_reports import CASES, fused_report, sample_report


@pytest.mark.parametrize("case", CASES)
def test_any_report_is_json_of_at_most_12_kb(case):
    text = json.dumps(brief(CASES[case]()), ensure_ascii=False, allow_nan=False)
    assert len(text.encode()) <= 12_000


def test_a_large_report_is_no_longer_than_a_small_one():
    assert len(json.dumps(brief(sample_report(3000)))) < 12_000


@pytest.mark.parametrize("make", [lambda: sample_report(60), fused_report])
def test_it_says_what_the_report_says(make):
    report = make()
    found = brief(report)
    assert [one["name"] for one in found["runs"]] == [one.name for one in report.measurements]
    for one in found["runs"][1:]:
        assert one["over_eager"]["ratio"] == pytest.approx(report.ratio(one["name"]).value, abs=1e-3)
        assert one["over_eager"]["low"] <= one["over_eager"]["ratio"] <= one["over_eager"]["high"]
    assert [one["do"] for one in found["next"]] == [one.what for one in advice(report).changes[:5]]
    assert found["overhead"]["us"] == pytest.approx(report.overhead.overhead_ns / 1e3, abs=1e-2)
    assert found["chosen"] == report.chosen
    assert found["verdict"]


def test_long_names_are_cut():
    report = CASES["nothing profiled"]()
    object.__setattr__(report, "model", "m" * 500)
    assert brief(report)["model"] == "m" * 199 + "…"
