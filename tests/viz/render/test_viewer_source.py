"""Code line by line and memory call by call, in a real browser."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.source import hottest, source
from nimble_viz.render.html import page
from tests.support.sample_reports import fused_report, profile_report, sample_report, training_report

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_a_clicked_line_selects_its_calls_everywhere_and_a_call_marks_its_line(opened):
    report = sample_report(60)
    own = [call.index for call in report.program.calls if call.origins[0].line == 31]
    shown = opened(page(report))
    shown.page.click("#nv-tab-source")
    shown.page.click("#nv-pane-source details button[data-line='31']")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": own, "eager": own}
    assert "sample_net/modeling.py:31" in shown.page.inner_text("aside")
    assert "b1 = self.gelu(x)" in shown.page.inner_text("aside")
    assert f"{len(own)} calls" in shown.page.inner_text("[aria-live]")
    shown.page.click("#nv-tab-overhead")
    shown.page.click("text=By call")
    rows = shown.page.eval_on_selector_all(
        "#nv-pane-overhead .nv-on", "rows => rows.map(row => Number(row.dataset.call))"
    )
    assert sorted(rows) == own
    shown.page.evaluate("nimbleViewer.select(0)")
    shown.page.click("#nv-tab-source")
    marked = shown.page.eval_on_selector_all("#nv-pane-source .nv-on", "rows => rows.map(row => row.dataset.line)")
    assert set(marked) == {"21"}
    assert shown.troubles == []


@pytest.mark.slow
def test_a_line_of_fused_code_marks_what_its_eager_calls_became(opened):
    report = fused_report()
    eager = [call.index for call in report.eager_calls if call.origins[0].line == 32]
    became = [call.index for call in report.program.calls if set(eager) & set(call.eager)]
    shown = opened(page(report))
    shown.page.evaluate("nimbleViewer.selectLine('sample_net/modeling.py', 32)")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": became, "eager": eager}
    shown.page.click("#nv-tab-source")
    assert "Became" in shown.page.inner_text("aside")
    shown.page.evaluate("nimbleViewer.selectLine('sample_net/modeling.py', 99)")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": [], "eager": []}
    assert not shown.page.is_visible("aside")


@pytest.mark.slow
def test_heat_is_a_number_too_and_lines_are_sorted_by_what_is_asked_for(opened):
    report = sample_report(60)
    found = source(report)
    shown = opened(page(report))
    shown.page.click("#nv-tab-source")
    hot = "#nv-pane-source section.nv-card"
    shares = shown.page.locator(f"{hot} button.nv-hot .nv-meter b").all_inner_texts()
    assert len([text for text in shares if text.endswith("%")]) == len(
        {call.origins[0].line for call in report.program.calls}
    )
    for key, name in (("host", "Host"), ("replay", "Replay"), ("device", "GPU")):
        shown.page.click(f"#nv-pane-source .nv-tools >> text={name}")
        lines = shown.page.eval_on_selector_all(
            f"{hot} button.nv-hot", "rows => rows.map(row => Number(row.dataset.line))"
        )
        assert lines[:5] == [row["line"] for row in hottest(found, key, 5)]
    shown.page.click(f"{hot} >> text=Calls")
    assert shown.page.get_attribute(f"{hot} button[aria-pressed=true]:has-text('Calls')", "aria-pressed") == "true"
    shown.page.fill("#nv-pane-source input[type=search]", "gelu")
    assert shown.page.locator(f"{hot} button.nv-hot").count() == 1
    assert shown.troubles == []


@pytest.mark.slow
def test_code_without_calls_is_folded_and_opens(opened):
    report = sample_report(60)
    long = replace(report.sources[0], lines=(*report.sources[0].lines, *["    # quiet"] * 300))
    shown = opened(page(replace(report, sources=(long,))))
    shown.page.click("#nv-tab-source")
    text = "#nv-pane-source details"
    assert shown.page.locator(f"{text} >> text=# quiet").count() < 10
    shown.page.click(f"{text} .nv-quiet >> nth=-1")
    assert shown.page.locator(f"{text} >> text=# quiet").count() == 300
    shown.page.click("#nv-pane-source >> text=Fold all")
    assert not shown.page.is_visible(f"{text} .nv-lines")
    shown.page.evaluate("nimbleViewer.select(5)")
    assert shown.page.is_visible(f"{text} .nv-lines")


@pytest.mark.slow
def test_a_training_step_has_forward_and_backward_columns(opened):
    shown = opened(page(training_report()))
    shown.page.click("#nv-tab-source")
    head = shown.page.inner_text("#nv-pane-source .nv-top >> nth=0")
    assert "Host, forward" in head
    assert "backward" in head
    shown.page.click("#nv-pane-source details button[data-line='30']")
    assert "backward" in shown.page.inner_text("aside")


@pytest.mark.slow
def test_the_memory_curve_is_walked_clicked_and_zoomed(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-memory")
    point = shown.page.evaluate("nimbleViewer.views.memory.point(0, 33)")
    shown.page.mouse.move(point["x"], point["y"])
    assert "live during call 33" in shown.page.inner_text(".nv-tip")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 33
    shown.page.focus("#nv-pane-memory canvas >> nth=0")
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate("nimbleViewer.selected()") == 34
    shown.page.keyboard.press("+")
    low, high = shown.page.evaluate("nimbleViewer.views.memory.range()")
    assert high - low == pytest.approx(1 / 1.5)
    shown.page.keyboard.press("0")
    assert shown.page.evaluate("nimbleViewer.views.memory.range()") == [0, 1]
    shown.page.click("#nv-pane-memory tbody .nv-link >> nth=0")
    holder = live_memory(report)["runs"][0]["holders"][0]["call"]
    assert shown.page.evaluate("nimbleViewer.selected()") == holder
    assert shown.page.locator("#nv-pane-memory tr.nv-on").count() >= 1
    assert shown.troubles == []


@pytest.mark.slow
def test_what_a_call_is_not_known_to_hold_is_said(opened):
    shown = opened(page(profile_report()))
    shown.page.click("#nv-tab-memory")
    assert "is not known" in shown.page.inner_text("#nv-pane-memory")
