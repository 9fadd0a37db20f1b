"""The benchmark of views: that it drags what it times, that its limits are those of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.views import dragged, missed, saved
from nimble_viz.render.html import page
from tests.support.lab import chromium
from tests.support.sample_reports import sample_report


def test_a_file_is_timed_and_a_limit_that_it_misses_is_said(tmp_path: Path) -> None:
    row = {"file": saved(sample_report(20), tmp_path, 1), "open": {}, "pan": {}}
    assert min(row["file"].values()) > 0
    assert missed(row) == []
    assert missed({**row, "file": {**row["file"], "bytes": 6_000_000}}) == ["6,000,000 bytes"]


@pytest.mark.browser
def test_what_is_timed_moves(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(sample_report(60)), encoding="utf-8")
    with chromium() as browser:
        shown = browser.new_page()
        shown.goto(path.as_uri())
        shown.click("#nv-tab-dag")
        before = shown.evaluate("nimbleViewer.views.dag.point(0)")
        found = dragged(shown, "#nv-pane-dag canvas", 0.3)
        assert shown.evaluate("nimbleViewer.views.dag.point(0)") != before
    assert found["frames"] > 1
    assert found["longest_ms"] > 0
