"""Timelines in a real browser: zoom, gaps, figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import nimble_viz
from nimble_core.ir.timeline import SelfCheck
from nimble_viz.analysis.gaps import gaps, replay_gaps
from nimble_viz.analysis.limit import in_flight
from nimble_viz.render.html import page
from tests.support.sample_reports import sample_report

pytestmark = pytest.mark.browser
RECORDINGS = Path(__file__).parents[3] / "examples" / "recordings"

_DERIVED = """(name) => {
  const { flights, gaps } = nimbleViewer.runs.find((one) => one.run === name);
  return { flights, gaps };
}"""


@pytest.mark.slow
def test_timeline_zooms_to_a_microsecond_and_no_further(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    shown.page.evaluate("nimbleViewer.views.timeline.zoom(5000, 5010)")
    low, high = shown.page.evaluate("nimbleViewer.views.timeline.range()")
    assert high - low == pytest.approx(1000)


@pytest.mark.slow
def test_an_idle_stretch_says_which_call_waited_for_which_and_why(opened):
    report = sample_report(60)
    line, plan = report.timeline("nimble"), report.schedule("nimble")
    gap = max(gaps(report.graph, plan, line), key=lambda one: one.unready_ns)
    zero = line.spans[0].start_ns
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    width = gap.end_ns - gap.start_ns
    shown.page.evaluate(f"nimbleViewer.views.timeline.zoom({gap.start_ns - zero - width}, {gap.end_ns - zero + width})")
    waiter = shown.page.evaluate(f"nimbleViewer.views.timeline.point('nimble', {gap.call})")
    board = shown.page.locator("#nv-pane-timeline canvas").last.bounding_box()
    middle = board["x"] + 168 + (board["width"] - 168 - 8) / 2
    shown.page.mouse.move(middle, waiter["y"])
    text = shown.page.inner_text(".nv-tip")
    assert waiter["x"] > middle
    assert f"before call {gap.call} " in text
    assert f"waited for call {gap.awaited} " in text
    assert "nothing ready" in text


@pytest.mark.slow
def test_figures_of_a_run_open_below_its_lanes_and_lead_to_calls(opened):
    report = sample_report(60)
    line = report.timeline("nimble")
    seen = replace(line, streams=tuple(20 + span.lane for span in line.spans), check=SelfCheck(60, 60, "graph node id"))
    shown = opened(page(replace(report, timelines=(*report.timelines[:-1], seen))))
    shown.page.click("#nv-tab-timeline")
    shown.page.locator(".nv-figures summary").last.click()
    text = shown.page.locator(".nv-figures").last.inner_text()
    assert "60 kernels seen, 60 nodes expected" in text
    point = shown.page.evaluate("nimbleViewer.views.timeline.point('nimble', 33)")
    shown.page.mouse.move(point["x"], point["y"])
    assert f"ran on stream {20 + report.schedule('nimble').stream[33]} of the device" in shown.page.inner_text(
        ".nv-tip"
    )
    shown.page.locator(".nv-figures").last.locator(".nv-link").first.click()
    assert shown.page.evaluate("nimbleViewer.selected()") >= 0


@pytest.mark.slow
def test_an_unreliable_replay_is_marked_and_has_no_gaps(opened):
    report = sample_report(60)
    lines = [replace(line, reliable=False, note="59 of 60 nodes seen in every replay") for line in report.timelines]
    shown = opened(page(replace(report, timelines=tuple(lines))))
    shown.page.click("#nv-tab-timeline")
    assert shown.page.locator("#nv-pane-timeline h3 >> text=unreliable: self-check failed").count() == 3
    assert "59 of 60 nodes seen" in shown.page.inner_text("#nv-pane-timeline")
    shown.page.locator(".nv-figures summary").last.click()
    assert "not derived: kernels are missing" in shown.page.locator(".nv-figures").last.inner_text()


@pytest.mark.slow
def test_the_timeline_zooms_to_the_replays_and_back(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    shown.page.click("text=Fit all")
    _, whole = shown.page.evaluate("nimbleViewer.views.timeline.range()")
    shown.page.click("text=Fit replays")
    low, high = shown.page.evaluate("nimbleViewer.views.timeline.range()")
    longest = max(line.length_ns for line in report.timelines if line.run != "eager")
    assert low == 0
    assert high == pytest.approx(1.02 * longest)
    shown.page.click("text=Fit all")
    assert shown.page.evaluate("nimbleViewer.views.timeline.range()")[1] == pytest.approx(whole)


@pytest.mark.slow
def test_the_timeline_opens_where_the_replays_can_be_read(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    rest = shown.page.locator("#nv-pane-timeline .nv-rest")
    longest = max(line.length_ns for line in report.timelines if line.run != "eager")
    assert shown.page.evaluate("nimbleViewer.views.timeline.range()") == [0, pytest.approx(1.02 * longest)]
    assert [rest.nth(at).is_visible() for at in range(rest.count())] == [True, False, False]
    assert "goes on to the right" in rest.first.inner_text()
    assert shown.page.get_attribute("text=Fit replays", "aria-pressed") == "true"
    rest.first.click()
    assert shown.page.evaluate("nimbleViewer.views.timeline.range()")[1] > report.timeline("eager").length_ns
    assert not rest.first.is_visible()
    assert shown.page.get_attribute("text=Fit all", "aria-pressed") == "true"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet-h200", "nasnet-a-mobile-h200", "resnet18-training-h200"])
def test_the_page_derives_what_runs_side_by_side_and_where_gaps_are(opened, name):
    report = nimble_viz.load(RECORDINGS / f"{name}.nimble")
    shown = opened(page(report))
    for line in report.timelines:
        derived = shown.page.evaluate(_DERIVED, line.run)
        assert max(derived["flights"]["running"]) == in_flight(line)[0]
        assert derived["flights"]["running"][-1] == 0
        gaps = [gap for gap in replay_gaps(report, line) if gap.call is not None]
        assert derived["gaps"]["call"] == [gap.call for gap in gaps]
        assert derived["gaps"]["lane"] == [gap.lane for gap in gaps]
        zero = min(span.start_ns for span in line.spans)
        assert derived["gaps"]["start"] == pytest.approx([gap.start_ns - zero for gap in gaps], abs=1)
        assert derived["gaps"]["length"] == pytest.approx([gap.end_ns - gap.start_ns for gap in gaps], abs=1)


@pytest.mark.slow
def test_what_got_slower_is_red_beside_what_was_before(opened):
    old = sample_report(60)
    ns = tuple(3 * one if call == 5 else one for call, one in enumerate(old.costs.ns))
    new = replace(old, costs=replace(old.costs, ns=ns))
    shown = opened(page(new, before=old))
    assert "5 " in shown.page.inner_text("#nv-pane-summary section:has-text('What got slower') td >> nth=0")
    assert "3.00x" in shown.page.inner_text("#nv-pane-summary section:has-text('What got slower')")
    shown.page.click("#nv-tab-timeline")
    assert shown.page.is_visible("#nv-pane-timeline .nv-legend >> text=slower than before")
    red = [int(part) for part in re.findall(r"\d+", shown.page.evaluate(_BAD))]
    seen = {run: shown.page.evaluate(_COLOUR, [run, 5]) for run in ("nimble", "before")}
    assert (seen["nimble"] == red, seen["before"] == red) == (True, False)
    assert shown.troubles == []


_BAD = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--bad)";
  return getComputedStyle(probe).color;
}"""
_COLOUR = """async ([run, call]) => {
  const { x, y } = nimbleViewer.views.timeline.point(run, call);
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const canvas = document.elementFromPoint(x, y), box = canvas.getBoundingClientRect();
  const ratio = canvas.width / box.width, paint = canvas.getContext("2d");
  return [...paint.getImageData((x - box.left) * ratio, (y - box.top - 8) * ratio, 1, 1).data].slice(0, 3);
}"""
