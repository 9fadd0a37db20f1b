"""One view by itself: data, text, and the page opened at it."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from sample_reports import RENDERED, sample_report

from nimble_core.errors import InputError
from nimble_viz.pane import PANES, Pane
from nimble_viz.views.live import live_memory
from nimble_viz.views.source import source


def test_methods_of_a_report_are_its_panes() -> None:
    report = sample_report(20)
    assert report.source() == report.pane("source") == Pane(report, "source")
    assert report.source().data == source(report)
    assert report.live_memory().data == live_memory(report)
    assert repr(report.source()) == f"<source of {report!r}>"


@pytest.mark.parametrize("name", PANES)
def test_every_view_has_data_text_and_a_page(name: str, tmp_path: Path) -> None:
    pane = sample_report(20).pane(name)
    assert pane.data
    assert len(str(pane).splitlines()) > 3
    text = pane.to_html(tmp_path / "view.html").read_text(encoding="utf-8")
    assert f'data-pane="{name}"' in text


def test_what_a_view_is_called() -> None:
    with pytest.raises(InputError, match=r"no view .sources.(.|\n)*timeline"):
        sample_report(3).pane("sources")


@pytest.mark.parametrize("case", [case for case in RENDERED if "thousand" not in case])
@pytest.mark.parametrize("name", ["source", "memory"])
def test_a_notebook_shows_it(case: str, name: str) -> None:
    bundle = RENDERED[case]().pane(name)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert "not shown in full" not in bundle["text/plain"]
    assert "<iframe" in html.unescape(bundle["text/html"])


def test_a_display_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_viz.export.html.fragment", lambda *_: 1 / 0)
    bundle = sample_report(3).source()._repr_mimebundle_()
    assert "ZeroDivisionError" in bundle["text/plain"]
    assert "text/html" not in bundle
