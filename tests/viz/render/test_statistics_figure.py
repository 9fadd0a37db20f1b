"""The statistics figure: every sample, names with median and doubt, nothing that names can break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.measurement import summarize
from nimble_viz.render.statistics_figure import MAX_POINTS, statistics_figure
from tests.support.sample_reports import CASES, HOSTILE, sample_report


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_drawn(case: str) -> None:
    report = CASES[case]()
    figure = statistics_figure(report)
    boxes = [trace for trace in figure.data if trace.type == "box"]
    assert [len(box.x) for box in boxes] == [len(taken.samples_ns) for taken in report.measurements]
    assert [box.x[0] for box in boxes] == [taken.samples_ns[0] / 1e6 for taken in report.measurements]
    assert figure.to_json()


def test_the_title_names_what_the_times_belong_to() -> None:
    figure = sample_report(stable=False).figure()
    assert figure.layout.title.text == "Time per call of SampleNet, float16, batch 1 on NVIDIA H200"
    assert next(trace.name for trace in figure.data if trace.type == "box").endswith("(unstable)")
    assert "<script" not in sample_report(3, model=HOSTILE).figure().to_json()


def test_nothing_measured() -> None:
    figure = statistics_figure(replace(sample_report(3), measurements=()))
    assert not figure.data
    assert "nothing was measured" in figure.layout.title.text


def test_many_samples_are_not_all_points() -> None:
    many = summarize("eager", [1e6 + k for k in range(MAX_POINTS + 1)])
    figure = statistics_figure(replace(sample_report(3), measurements=(many,)))
    assert figure.data[0].boxpoints == "suspectedoutliers"
