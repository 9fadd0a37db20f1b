"""The Report shows itself: text, HTML, files, and a display that never fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.measurement import ratio
from nimble_core.utils.errors import InputError
from nimble_viz.render.report import Report
from nimble_viz.report.data import PeerResult
from tests.support.sample_reports import CASES, sample_report


@pytest.mark.parametrize("case", CASES)
def test_display_has_text_and_html(case: str) -> None:
    bundle = CASES[case]()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}, bundle["text/plain"][-300:]


def test_display_survives_a_page_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise OSError("no template")

    monkeypatch.setattr("nimble_viz.render.report.fragment", broken)
    bundle = sample_report()._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert bundle["text/plain"].startswith(str(sample_report().to_text(100)))
    assert bundle["text/plain"].endswith("(not shown in full: OSError: no template)\n")


def test_display_survives_text_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Report, __: int | None) -> str:
        raise ValueError("no text")

    monkeypatch.setattr("nimble_viz.render.report.plain_text", broken)
    assert "<Report of 'SampleNet': 60 calls, 3 measurements>" in sample_report()._repr_mimebundle_()["text/plain"]


def test_lookup_by_name() -> None:
    report = sample_report()
    assert report.schedule("nimble") is report.schedules[1]
    assert report.measurement("eager") is report.measurements[0]
    assert report.timeline("eager") is report.timelines[0]
    assert (report.schedule("x"), report.measurement("x"), report.timeline("x")) == (None,) * 3


def test_a_ratio_is_of_runs_that_there_are() -> None:
    report = sample_report()
    measured = next(one for one in report.measurements if one.name == "nimble")
    assert report.ratio("nimble") == ratio(measured, report.measurement("eager"))
    for asked in (("x",), ("nimble", "x")):
        with pytest.raises(InputError, match=r"no run 'x'\n.*one of eager, single, nimble"):
            report.ratio(*asked)


def test_a_ratio_of_a_run_without_a_time_is_none() -> None:
    report = replace(sample_report(), measurements=(), peers=(PeerResult("compile", note="failed"),))
    for name in ("eager", "single", "nimble", "compile", ""):
        assert report.ratio(name) is report.ratio("nimble", name) is None
