"""One view by itself: data, text, and the page opened at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from nimble_core.utils.errors import InputError
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.source import source
from nimble_viz.render.report import PANES, Pane
from tests.support.sample_reports import RENDERED, sample_report


def test_methods_of_a_report_are_its_panes() -> None:
    report = sample_report(20)
    assert report.source() == report.pane("source") == Pane(report, "source")
    assert report.source().data == source(report)
    assert report.live_memory().data == live_memory(report)
    assert repr(report.source()) == f"<source of {report!r}>"


@pytest.mark.parametrize("name", PANES)
@pytest.mark.parametrize("case", [case for case in RENDERED if "thousand" not in case])
def test_every_view_fits_its_width(case: str, name: str) -> None:
    text = RENDERED[case]().pane(name).to_text(60)
    assert max(cell_len(line) for line in text.splitlines()) <= 60
    assert "\x1b" not in text


@pytest.mark.parametrize("name", PANES)
def test_every_view_has_data_text_and_a_page(name: str, tmp_path: Path) -> None:
    pane = sample_report(20).pane(name)
    assert pane.data
    assert len(str(pane).splitlines()) > 3
    assert str(pane) == pane.to_text()
    text = pane.to_html(tmp_path / "view.html").read_text(encoding="utf-8")
    assert f'data-pane="{name}"' in text


def test_what_a_view_is_called() -> None:
    with pytest.raises(InputError, match=r"no view .sources.(.|\n)*timeline"):
        sample_report(3).pane("sources")
