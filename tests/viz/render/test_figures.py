"""Plain figures: every value of the views, names with median and doubt, nothing that names can break."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from nimble_core.ir.measurement import summarize
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.overhead import PARTS, grouped
from nimble_viz.render.figures import KINDS, MAX_POINTS, MAX_ROWS, figure
from tests.support.sample_reports import CASES, HOSTILE, RENDERED, fused_report, plan_report, sample_report


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_drawn(case: str) -> None:
    report = CASES[case]()
    drawn = figure(report)
    boxes = [trace for trace in drawn.data if trace.type == "box"]
    assert [len(box.x) for box in boxes] == [len(taken.samples_ns) for taken in report.measurements]
    assert [box.x[0] for box in boxes] == [taken.samples_ns[0] / 1e6 for taken in report.measurements]
    assert drawn.to_json()


def test_the_title_names_what_the_times_belong_to() -> None:
    drawn = sample_report(stable=False).figure()
    assert drawn.layout.title.text == "Time per call of SampleNet, float16, batch 1 on NVIDIA H200"
    assert next(trace.name for trace in drawn.data if trace.type == "box").endswith("(unstable)")
    assert "<script" not in sample_report(3, model=HOSTILE).figure().to_json()


def test_nothing_measured() -> None:
    drawn = figure(replace(sample_report(3), measurements=()))
    assert not drawn.data
    assert "nothing was measured" in drawn.layout.title.text


def test_many_samples_are_not_all_points() -> None:
    many = summarize("eager", [1e6 + k for k in range(MAX_POINTS + 1)])
    drawn = figure(replace(sample_report(3), measurements=(many,)))
    assert drawn.data[0].boxpoints == "suspectedoutliers"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_every_report_is_drawn_and_its_names_stay_text(case: str, kind: str) -> None:
    text = RENDERED[case]().figure(kind).to_json()
    assert "<script" not in text
    assert "<img" not in text


def test_bars_of_the_timeline_are_the_spans_with_eager_above() -> None:
    report = fused_report()
    drawn = figure(report, "timeline")
    assert drawn.data[0].name == "eager"
    for bars, line in zip(drawn.data, sorted(report.timelines, key=lambda line: line.run != "eager"), strict=True):
        zero = min(span.start_ns for span in line.spans)
        wanted = sorted((span.start_ns - zero) / 1e6 for span in line.spans)
        assert sorted(bars.base) == pytest.approx(wanted, abs=1e-6)
        assert sum(bars.x) == pytest.approx(sum(span.end_ns - span.start_ns for span in line.spans) / 1e6, rel=1e-3)
    rows = [(min(bars.y), max(bars.y)) for bars in drawn.data]
    assert all(last < first for (_, last), (first, _) in pairwise(rows))


def test_bars_of_overhead_add_up_to_the_profile() -> None:
    report = sample_report(60)
    drawn = figure(report, "overhead")
    assert len(grouped(report, "operator")) <= MAX_ROWS
    for part, bars in zip(PARTS, drawn.data, strict=True):
        assert sum(bars.x) == pytest.approx(sum(getattr(row, f"{part}_ns") for row in report.overhead.calls) / 1e6)


def test_bars_of_syncs_are_the_counts_of_the_plans() -> None:
    report = sample_report(60)
    planned = next(bars for bars in figure(report, "syncs").data if bars.name == "Planned")
    assert list(planned.y) == [plan.counts.planned for plan in report.schedules]


def test_what_is_not_known_is_said() -> None:
    assert "eager was not profiled" in figure(plan_report(), "overhead").layout.title.text
    assert "no plan was made" in figure(replace(sample_report(3), schedules=()), "syncs").layout.title.text
    with pytest.raises(InputError, match=r"no figure 'bars'\n.*one of speed, timeline, overhead, syncs"):
        figure(sample_report(3), "bars")
