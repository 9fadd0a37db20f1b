"""The viewer in a real browser: no console errors, no network, linked selection, hostile names, themes, size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sample_reports import CASES, sample_report

from nimble_viz.export.html import fragment, page

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_TABS = ("summary", "overhead", "dag", "timeline", "syncs")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for found in map(shutil.which, names) if found), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the PATH")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        yield launched
        launched.close()


@dataclass
class Opened:
    page: object
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser, tmp_path: Path):
    contexts = []

    def open_text(text: str, *, dark: bool = False, width: int = 1280) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
        )
        contexts.append(context)
        shown = Opened(context.new_page())
        shown.page.on("console", lambda message: shown.troubles.append(message.text))
        shown.page.on("pageerror", lambda error: shown.troubles.append(str(error)))
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.goto(path.as_uri())
        return shown

    yield open_text
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_shows_every_tab_without_a_word_on_the_console_or_the_network(opened, name):
    shown = opened(page(CASES[name]()))
    for tab in _TABS:
        shown.page.click(f"#nv-tab-{tab}")
        assert shown.page.get_attribute(f"#nv-tab-{tab}", "aria-selected") == "true"
        assert shown.page.is_visible(f"#nv-pane-{tab}")
        assert shown.page.inner_text(f"#nv-pane-{tab}").strip()
        shown.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.troubles == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:"))] == []
    assert shown.page.evaluate("window.hacked") is None


def test_arrow_keys_move_between_tabs(opened):
    shown = opened(page(sample_report(10)))
    shown.page.focus("#nv-tab-summary")
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate("document.activeElement.id") == "nv-tab-overhead"
    shown.page.keyboard.press("End")
    assert shown.page.get_attribute("#nv-tab-syncs", "aria-selected") == "true"


def test_a_clicked_node_selects_its_row_its_bar_and_its_sync(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-dag")
    point = shown.page.evaluate("nimbleViewer.dagPoint(4)")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 4
    assert "call 4:" in shown.page.inner_text("[aria-live]")
    shown.page.click("#nv-tab-overhead")
    assert shown.page.get_attribute("#nv-pane-overhead .nv-on", "data-call") == "4"
    shown.page.click("#nv-tab-syncs")
    assert "4 addmm" in shown.page.inner_text("#nv-pane-syncs tr.nv-on")


def test_a_clicked_bar_or_row_selects_everywhere(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    point = shown.page.evaluate("nimbleViewer.timelinePoint('single', 33)")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 33
    shown.page.click("#nv-tab-overhead")
    shown.page.click("text=By call")
    shown.page.click("#nv-pane-overhead button[data-call='7']")
    assert shown.page.evaluate("nimbleViewer.selected()") == 7
    assert "addmm" in shown.page.inner_text("aside")


def test_timeline_zooms_to_a_microsecond_and_no_further(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    shown.page.evaluate("nimbleViewer.zoomTimeline(5000, 5010)")
    low, high = shown.page.evaluate("nimbleViewer.timelineRange()")
    assert high - low == pytest.approx(1000)


def test_folding_and_opening_modules(opened):
    shown = opened(page(CASES["thousand"]()))
    shown.page.click("#nv-tab-dag")
    folded = shown.page.evaluate("nimbleViewer.dagBoxes()")
    assert folded < 1_000
    shown.page.click("text=Open all")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 1_000
    shown.page.click("text=Fold all")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") <= folded


def test_themes_follow_the_system_and_the_button(opened):
    shown = opened(page(sample_report(10)), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = shown.page.evaluate(ground)
    shown.page.click(".nv-theme")
    assert shown.page.get_attribute("html", "data-theme") == "light"
    assert shown.page.evaluate(ground) != dark
    shown.page.click(".nv-theme")
    assert shown.page.get_attribute("html", "data-theme") == "dark"
    assert shown.page.evaluate(ground) == dark


@pytest.mark.parametrize("width", [400, 2560])
def test_no_sideways_scrolling_of_the_page(opened, width):
    shown = opened(page(sample_report(60)), width=width)
    for tab in _TABS:
        shown.page.click(f"#nv-tab-{tab}")
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_frame_of_a_notebook_works_in_its_sandbox(opened):
    shown = opened(f"<!doctype html><title>t</title>{fragment(sample_report(60))}")
    frame = shown.page.frame_locator("iframe")
    frame.locator("#nv-tab-dag").click()
    assert frame.locator("#nv-pane-dag canvas").is_visible()
    assert shown.troubles == []
    assert shown.page.inner_text("summary") == "Summary as text"


def test_ten_thousand_calls_open(opened):
    shown = opened(page(CASES["ten thousand"]()))
    shown.page.click("#nv-tab-dag")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 0
    assert "modules folded" in shown.page.inner_text("#nv-pane-dag")
    shown.page.evaluate("nimbleViewer.select(9876)")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 0
    assert shown.troubles == []
